"""The one entry: ``offload(model, optimizer, config)``.

An unchanged PyTorch loop then trains with parameters, gradients and optimizer state in a tiered store,
bit for bit as without.  The model and the optimizer stay the user's own objects; leaving the context
makes everything ordinary again, or leaves it where it lies.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from tierstore import forks
from tierstore.callers import opener, opening
from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.planning import Placement
from tierstore.planning.placement import with_patterns
from tierstore.planning.rules import HOST
from tierstore.signals import interruptible
from tierstore.store import Store
from tierstore.training import again, processes
from tierstore.training.activations import Sections, apply
from tierstore.training.activations.apply import Activations
from tierstore.training.activations.config.layers import Names
from tierstore.training.activations.swapping.run_store import RunStore
from tierstore.training.autograd.clipping import clip_gradients
from tierstore.training.bundles.bundle_tiers import named_by_settings
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.checkpoints.agreement import Agreement, OneProcess
from tierstore.training.checkpoints.files import Checkpoint, ordinary_access
from tierstore.training.checkpoints.resumed import Resumed
from tierstore.training.checkpoints.weights import Weights
from tierstore.training.given import Config, check_is_model, optimizers_of, settings_of
from tierstore.training.leaving import OnClose, choice_of, on_close_of
from tierstore.training.left_behind import let_go
from tierstore.training.modules.replicas import refuse_to_average
from tierstore.training.offloadable import check_model
from tierstore.training.opening import Others, find_former, open_session
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.place import given_patterns, placement_around
from tierstore.training.placing import marks_of
from tierstore.training.run_stats import RunStats
from tierstore.training.selection import SelectedTensors, patterns, select
from tierstore.training.session import Session
from tierstore.training.suspension import Suspension
from tierstore.training.tables.division import AllHere, TableDivision
from tierstore.training.tables.found_tables import refuse_norms_of_parts
from tierstore.training.telling import say_ended, say_opened

if TYPE_CHECKING:
    from tierstore.training.ranks import Ranks

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
log = logging.getLogger("tierstore")


class Offload:
    """An offloaded model.  A context manager; `close` does the same.

    Made by `offload`.

    Attributes:
        resumed: the checkpoint that training goes on from, with what `checkpoint` was given;
            ``None``: it begins.
        opened_by: which call of the program made it, for messages.
        is_entered: whether its ``with`` block is under way.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        session: Session | None,
        resumed: Resumed | None = None,
        activations: Activations | None = None,
        on_close: OnClose = OnClose.AUTO,
        ranks: Ranks | None = None,
    ) -> None:
        self.resumed = resumed
        self._ranks = ranks
        self._on_close = on_close
        self._stays: BaseException | None = None  # why it could not be closed
        self._activations = Activations() if activations is None else activations
        self._model = model
        self._optimizers = tuple(optimizers)
        self._session = session
        self._suspension = None if session is None else Suspension(session)
        self._is_closed = False
        self._closer: int | None = None  # the thread that closes it just now
        self._ending = RunEnding()
        self._process = forks.here()
        self.is_entered = False
        self.opened_by = opener()
        if session is not None:
            session.hold(again.NotedRun(model, self, session))

    @property
    def store(self) -> Store:
        """The store that everything is in.

        Raises:
            UsageError: ``memory_offload`` is OFF: there is none.
        """
        if self._session is None:
            raise UsageError("memory_offload is OFF: there is no store. Set it to ON.")
        return self._session.store

    @property
    def placement(self) -> Placement:
        """Where everything lives and what computes with it, with what was learned so far; prints readably.

        Raises:
            UsageError: ``memory_offload`` is OFF: nothing is placed.
        """
        if self._session is None:
            raise UsageError("memory_offload is OFF: nothing is placed. Set it to ON.")
        return self._session.placing.placement

    def stats(self) -> RunStats:
        """Return what the run did so far."""
        self._require_here()
        session = self._session
        if session is None:
            return RunStats(None, 0.0, 0.0, 0.0, 0.0, recompute=self._activations.recompute_stats)
        store = session.store.stats()
        optimizer_s = sum(steps.seconds for steps in session.steps)
        clock = session.clock
        durable = session.durable
        return RunStats(
            store,
            clock.forward_s,
            clock.backward_s,
            optimizer_s,
            store.stall_seconds,
            0 if durable is None else durable.checkpoints,
            0.0 if durable is None else durable.seconds,
            session.activations.swap_stats,
            session.activations.recompute_stats,
            session.tables.stats(),
        )

    def swap_paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no activation is swapped, as `Swap.paused`; without swap it is empty."""
        activations = self._activations if self._session is None else self._session.activations
        return activations.swap_paused()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return what it was.

        The same as ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, which takes no sparse ones:
        those count with the values of one row added up, and are coalesced afterwards.

        Raises:
            UsageError: ``optimizer_in_backward`` is set: there are no gradients any more; or other processes
                have a part of a table's.
        """
        self._require_here()
        if self._session is not None and self._session.stepping is Stepping.IN_BACKWARD:
            raise UsageError(
                "optimizer_in_backward has stepped with the gradients and let go of them: their norm cannot "
                "be clipped. Leave it out to clip."
            )
        refuse_norms_of_parts(self._model)
        return clip_gradients(self._model.parameters(), max_norm, norm_type)

    def average_gradients(self) -> None:
        """Average gradients over all processes from now on, each as soon as backward has it.

        For models whose gradients do not fit together where they compute, as `DistributedDataParallel` needs
        it.  All processes call it; parameters and buffers become those of the first.  With one process it
        does nothing.

        Raises:
            UsageError: ``optimizer_in_backward`` is set, gradients are averaged already, the run is alone
                among several processes or has no store, or they train different parameters.
        """
        self._require_here()
        if not processes.are_several():
            return
        if self._ranks is None or self._session is None:
            raise UsageError(
                "the run knows of no other processes, as alone=True or memory_offload is OFF says: it has "
                "nobody to average gradients with. Wrap the model in DistributedDataParallel."
            )
        if self._session.stepping is Stepping.IN_BACKWARD:
            refuse_to_average(())
        session = self._session
        self._ranks.average_gradients(self._model, session.store.device, session.gradients.stash_if_needed)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate, after `average_gradients`."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.paused()

    @interruptible
    def save(self, path: str | Path) -> None:
        """Write a checkpoint of the training to a directory, one bundle at a time.

        Save between steps: gradients are not part of it.  Random number generators are not, either.  Where
        the rows of tables are spread over several processes all of them call it, and the first one writes.

        Raises:
            UsageError: a value that a checkpoint cannot hold; the message names it.
            OSError: the file system failed; a former checkpoint there is unharmed.
            TierStoreError: another process could not read its rows, or the first could not write them.
        """
        self._checkpoint().save(Path(path))

    def load(self, path: str | Path) -> None:
        """Take parameters, buffers and optimizer state over from a checkpoint: training resumes bit for bit.

        Where the rows of tables are spread over several processes all of them call it, and read the files.

        Raises:
            UsageError: it cannot be read or does not fit; every fault is listed, and nothing was changed.
        """
        self._checkpoint().load(Path(path))

    def _require_here(self) -> None:
        """Raise ``StoreForked`` in the child of a fork, unless there is no store."""
        if self._session is not None:
            forks.require_here(self._process, "the run")

    def _checkpoint(self) -> Checkpoint:
        self._require_here()
        session = None if self._is_closed else self._session
        access = ordinary_access(self._model) if session is None else session.access()
        return Checkpoint(self._model, self._optimizers, access)

    @interruptible
    def checkpoint(self, extra: Mapping[str, object] | None = None) -> None:
        """Make the state of training durable where it lies.  Blocks until it would survive a power loss.

        What survives is parameters, persistent buffers, the optimizers' state and options as the last
        step left them, PyTorch's random number generators (the CPU's and the device's), and ``extra``.
        Gradients do not.  Bytes that are on disk already are not written again.  A crash at any moment
        leaves this checkpoint or the former one, whole.

        Call it between steps.  Between a backward pass and its step, or in the midst of accumulation, the
        gradients so far are lost to whoever resumes.

        Args:
            extra: what else is needed to go on, such as the number of the step and a scheduler's state
                dict: a mapping of text to numbers, text, tensors, and lists, tuples and dicts of these.

        Raises:
            UsageError: ``durable`` is not set; the model or a step is under way, a step failed in its
                midst, or something refers to the bytes of a parameter; or a value cannot be kept.
            CapacityError: the disk tier has no room for it beside the former one, which is unharmed.
            BackendError: the disk failed; the former checkpoint is unharmed.
        """
        self._require_here()
        session = self._session
        if session is None:
            raise UsageError(
                "memory_offload is OFF: there is no store that could keep a checkpoint. Set it to ON and "
                "durable to true, or use run.save(path)."
            )
        if self._is_closed:
            raise UsageError("the run is closed: make a checkpoint before it ends.")
        if session.durable is None:
            raise UsageError(
                "the disk tier is scratch space: a checkpoint would not survive. Set durable=True in the "
                "configuration, or use run.save(path)."
            )
        session.tables.division.begin_checkpoint()
        session.leaving.go_on()
        session.host_stepper.finish()
        session.durable.commit({} if extra is None else extra)

    def suspend(self, to: str = HOST) -> None:
        """Take the whole run off the device, for another model to use it.  Blocks until that is done.

        Parameters, gradients and optimizer state go down to host memory, or to disk where that is full, and
        buffers to host memory; what the device's allocator had cached of it is given back.  Until `resume`
        whatever would need bytes on the device raises: the model, a backward pass, a step, an operation on
        a parameter.  `stats`, `save`, `checkpoint`, state dicts, ``zero_grad`` and `close` work.  Ignored
        parameters stay, and so do gradients that something else refers to; a warning names them.

        Suspended once more, it does nothing, or goes further down.

        Args:
            to: the fastest tier that bytes may be in: ``"host"`` or ``"disk"``.

        Raises:
            UsageError: the model, a backward pass or a step is under way, swapped activations wait for
                backward, something refers to the bytes of a parameter, there is no such tier, or the run
                is closed.
            CapacityError: the tiers from ``to`` on cannot hold everything; nothing has changed.
            BackendError: a medium failed; the run goes on as it was.
        """
        self._suspendable("suspend").suspend(to)

    def resume(self) -> None:
        """Let a suspended run go on where it was.  What was on the device is on its way there.  Idempotent.

        Raises:
            UsageError: the run is closed.
            CapacityError: what is pinned has no room on the device; the run stays suspended.
            BackendError: a medium failed; the run stays suspended.
        """
        self._suspendable("resume").resume()

    def _suspendable(self, what: str) -> Suspension:
        self._require_here()
        if self._suspension is None:
            raise UsageError(f"memory_offload is OFF: run.{what}() has no store to work on. Set it to ON.")
        if self._is_closed:
            raise UsageError(f"the run is closed: run.{what}() has nothing to work on.")
        return self._suspension

    @interruptible
    def close(self, restore: bool | None = None) -> None:
        """Leave the run: bring everything back as ordinary tensors, or leave it where it lies.  Idempotent.

        What is brought back lies in host memory, or on the accelerator if it did before, and leaves the store
        piece by piece.  What is not is *released*: parameters, gradients, buffers and optimizer state keep
        their looks, and whatever needs their bytes raises `StoreClosed`, which names the durable directory
        and the key where they lie, or says that they are gone.  That takes no memory and reads no byte.
        Nothing is made durable in either case: what survives is the last `checkpoint`.  In the child of a
        fork it does nothing: the run is the parent's.  Nor does it in the midst of another call of the same
        thread, as from a signal's handler.

        One interrupt does not stop it: it is raised in the end.  If restoring fails half-way, as there is no
        memory or a medium has failed, or by a second interrupt, **the run stays open**: nothing is lost,
        everything can be used and saved as before, and `close` can be called again.

        Args:
            restore: True brings everything back, whatever is available; False releases everything; ``None``
                does what ``on_close`` of `offload` says.

        Raises:
            UsageError: ``restore`` is something else.
            MemoryError, RuntimeError, OSError, BackendError: restoring has failed, and the run stays open; a
                note at the error says what is still in the store.
            TierStoreError: something is gone, as its key is not in the store any more.  It names all of that,
                with the causes attached; every use of it raises `StoreClosed`.  Or nothing is gone, and the
                store could not be closed.
        """
        choice = choice_of(restore, self._on_close)
        me = threading.get_ident()
        if self._closer == me or (self._session is not None and self._process is not forks.here()):
            return
        self._closer = me
        try:
            self._close(choice)
        finally:
            self._closer = None

    def _close(self, choice: OnClose) -> None:
        session, ending = self._session, self._ending
        if session is None:
            ending.attempt(self._activations.close)
        elif not self._is_closed:
            assert self._suspension is not None
            stays = session.leaving.leave(choice, ending, self._suspension.give_buffers_back)
            if stays is not None:
                self._stays = stays
                raise stays
            ending.attempt(lambda: say_ended(session, self.stats()))
            ending.attempt(functools.partial(session.store.close, flush=False))
            if self._ranks is not None:
                ending.attempt(self._ranks.close)
        self._is_closed = True
        ending.conclude()

    def __enter__(self) -> Self:
        """Return the run itself."""
        self.is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it as `close` does, also where that is interrupted; an exception of the block is raised."""
        self.is_entered = False
        if error is not None and self._ranks is not None:
            self._ranks.leave_with(error)
        try:
            try:
                self.close()
            except BaseException as failure:
                if failure is not self._stays:
                    self.close()  # does nothing, or goes on where an interrupt has ended it
                raise
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"Closing the run has failed, too: {type(failure).__name__}: {failure}")
            for note in getattr(failure, "__notes__", ()):
                error.add_note(note)
            log.exception("closing the run has failed; what has ended its block is raised")


@interruptible
def offload(  # noqa: PLR0913 - each has a default, and a name
    model: nn.Module,
    optimizer: Optimizers = None,
    config: Config = None,
    *,
    weights: str | Path | None = None,
    resume: bool = True,
    layers: Names = None,
    ignored: Sequence[str] = (),
    pinned: Sequence[str] = (),
    on_close: str = "auto",
    placement: Mapping[str, str] | None = None,
    alone: bool = False,
) -> Offload:
    r"""Train ``model`` with its parameters, gradients and optimizer state in a tiered store.

    With ``durable`` set in the configuration, training goes on from the checkpoint that is in
    ``offload_path``, if there is one: parameters, buffers, optimizer state and options, and random number
    generators are those of `Offload.checkpoint`.

    A model that is offloaded already, by a run that nobody has closed, is given to the new run: the former
    one is closed, and a warning says so.  Where something would be lost by that, it is refused.

    Args:
        model: any module.
        optimizer: the optimizers that train it: one, several, or none for inference.
        config: an `OffloadConfig`, a mapping of its keys, or a document: a mapping of sections, or the path
            of a YAML file of them.  A document's ``swap_config`` and ``recompute_config`` are applied, too:
            activations are then kept in the same store, within the same quotas.
        weights: a safetensors file, the index of several (``model.safetensors.index.json``) or their
            directory, that parameters and buffers get their values from; needed where the model was built
            under ``torch.device("meta")``.  Not read if training is resumed.
        resume: whether it is.  If not, training begins anew, and the checkpoint that is there stays
            until the first one of this run.
        layers: names of the containers of the model's layers, such as ``"model.layers"``, for documents that
            swap or recompute; ``None``: the only ``nn.ModuleList`` or ``nn.Sequential`` of like modules.
        ignored: patterns of parameters and buffers that the store does not touch: they stay ordinary where
            they are, with their gradients and optimizer state.  A pattern is levels separated by ``\.``, from
            the model down, each a regular expression that matches a name fully: ``r"layers\.\d+\.norm"``
            means modules, and so all that is below them.  One name of a shared parameter is enough.
        pinned: patterns of parameters and buffers that are the store's and never leave its fastest tier.
            Their gradients and optimizer state travel as others do.
        on_close: what becomes of everything when the run is left: ``"restore"`` makes it ordinary tensors
            again, ``"release"`` leaves it where it lies, and ``"auto"`` restores it if it fits into what is
            available with room to spare, and else releases it with a warning.  See `Offload.close`.
        placement: where modules compute, by pattern of their names: ``"cpu"`` or ``"device"``.  The first
            pattern that matches counts, for a module and all below it; what no pattern names computes on the
            device.  These come before the ``placement`` of the configuration.  Values cross as ``.to`` would
            bring them, through the store; what modules on the host have is never on the device, and their
            optimizer steps there.
        alone: where there are several processes, this one's run is none of the others': nobody is waited for,
            and quotas and ``offload_path`` are this process's.  If not, all of them call `offload`, each has
            its share of the quotas of host memory and disk and a directory of its own in ``offload_path``.

    Raises:
        ConfigError: the configuration is wrong or does not fit this machine.
        UsageError: a parameter or an optimizer cannot be offloaded, or the weights do not fit; the
            message names it.  Or ``on_close`` is something else.  Or the checkpoint is of another model or
            other optimizers: the message lists every difference, and nothing was changed.  Or a
            parameter is both ignored and pinned.
        CapacityError: the tiers together cannot hold it, or one module does not fit on the device, beside
            what is pinned.
    """
    settings, sections = settings_of(config)
    own = given_patterns(placement)
    placement = {**own, **placement_around(model, but=own)}
    if placement:
        settings = replace(settings, placement=with_patterns(settings.placement, placement))
    in_the_end = on_close_of(on_close)
    check_is_model(model)
    optimizers = optimizers_of(optimizer, model)
    selection = select(
        model,
        [*settings.ignored, *patterns("ignored", ignored)],
        [*settings.pinned, *patterns("pinned", pinned)],
    )
    with contextlib.ExitStack() as files:
        files.enter_context(opening("offload(...)"))
        again.make_way(model)
        source = None if weights is None else files.enter_context(Weights(model, Path(weights)))
        if settings.is_on:
            given = {
                "resume": resume,
                "weights": weights is not None,
                "on_close": in_the_end.value,
                "ignored tensors": sorted(selection.ignored.values()),
                "pinned tensors": sorted(selection.pinned.values()),
                "swap_config and recompute_config": sections,
                "layers": layers,
            }
            with _joined(settings, given, alone=alone) as ranks:
                return _open(
                    model,
                    optimizers,
                    settings if ranks is None else ranks.settings,
                    source,
                    selection,
                    resume=resume,
                    activations=(sections, layers),
                    on_close=in_the_end,
                    ranks=ranks,
                )
        if source is not None:
            source.load_buffers()
            source.load_ordinary()
        if settings.offload_checkpoint is not None:
            log.warning("memory_offload is OFF: offload_checkpoint has no effect.")
        applied = apply.apply(model, sections, layers, None)
        return Offload(model, optimizers, None, activations=applied, on_close=in_the_end)


@contextlib.contextmanager
def _joined(settings: OffloadConfig, given: Mapping[str, object], *, alone: bool) -> Iterator[Ranks | None]:
    """Join the processes that train together, if there are several; leave them again if opening fails."""
    if alone or not processes.are_several():
        if settings.durable and given["resume"] and not alone:
            processes.refuse_directories_of_several(settings.offload_path)
        yield None
        return
    from tierstore.training.ranks import join  # not with one process

    ranks = join(settings, given)
    try:
        with ranks.explained():
            yield ranks
    except BaseException as error:
        ranks.leave_with(error)
        ranks.close()
        raise


def _open(  # noqa: PLR0913 - what `offload` was given, and what was made of it
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    settings: OffloadConfig,
    source: Weights | None,
    selection: SelectedTensors,
    *,
    resume: bool,
    activations: tuple[Sections, Names],
    on_close: OnClose,
    ranks: Ranks | None,
) -> Offload:
    """Open a store for the model and move it there."""
    check_model(
        model,
        optimizers,
        has_weights=source is not None or settings.durable,
        ignored=selection.ignored,
    )
    tiers = named_by_settings(settings.store_config())
    store = RunStore(tiers if ranks is None else ranks.named(tiers))
    try:
        agreement: Agreement = OneProcess()
        if ranks is not None and store.is_durable:
            agreement = ranks.agreement(store, is_resumed=resume)
        former = find_former(model, optimizers, store, is_wanted=resume) if store.is_durable else None
        has_weights = source is not None or former is not None
        check_model(model, optimizers, has_weights=has_weights, ignored=selection.ignored)
        session: Session | None = None
        division: TableDivision = AllHere()
        if ranks is not None and selection.tables:
            division = ranks.spread(model, selection.tables)
        try:
            with let_go(model, optimizers, is_resumed=former is not None):
                marks = marks_of(model, *activations)
                others = Others(agreement, division)
                session = open_session(
                    model, optimizers, settings, store, former or source, selection, marks, others
                )
                session.apply_to_activations(*activations)
                say_opened(session)
                resumed = None if former is None else former.resumed
                run = Offload(model, optimizers, session, resumed, on_close=on_close, ranks=ranks)
                division.opened()
        except BaseException:
            if session is not None:
                session.undo()
            raise
    except BaseException:
        store.close(flush=False)
        raise
    return run
