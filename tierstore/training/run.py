"""What a program has of a model that is offloaded: its run, until that is closed."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from tierstore import forks
from tierstore.callers import opener
from tierstore.errors import UsageError
from tierstore.metrics import Number, as_metrics
from tierstore.planning import Placement, Program
from tierstore.planning.rules import HOST
from tierstore.recorded import CopyRecord
from tierstore.signals import interruptible
from tierstore.store import Store
from tierstore.training import again, processes
from tierstore.training.activations.apply import Activations
from tierstore.training.autograd.clipping import clip_gradients
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.checkpoints.files import Checkpoint, ordinary_access
from tierstore.training.checkpoints.resumed import Resumed
from tierstore.training.checkpoints.run_files import write_run_file
from tierstore.training.held_memory import note_holders, noted
from tierstore.training.leaving import OnClose, choice_of
from tierstore.training.modules.replicas import refuse_to_average
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.run_stats import RunStats
from tierstore.training.session import Session
from tierstore.training.suspension import Suspension
from tierstore.training.tables.found_tables import refuse_norms_of_parts
from tierstore.training.telling import say_ended

if TYPE_CHECKING:
    from tierstore.training.ranks import Ranks

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
        if session is not None:
            session.note_fault = functools.partial(noted, session=weakref.proxy(session))
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
    def is_closed(self) -> bool:
        """Whether `close` has ended it: the model is an ordinary one again, or released."""
        return self._is_closed

    def shortage(self) -> str | None:
        """Say why `close` would release what the run has, with ``on_close="auto"``; ``None``: it would not.

        Measured anew each time: promises nothing about what other programs take meanwhile.
        """
        self._require_here()
        found = None if self._session is None or self._is_closed else self._session.leaving.shortage()
        return None if found is None else str(found)

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
            session.recorder.ended,
        )

    def metrics(self) -> dict[str, Number]:
        """Return the numbers of `stats` under stable names, as those of `Store.metrics`.  In any thread.

        Such as ``{"tierstore_run_steps_total": 3, 'tierstore_tier_hits_total{tier="host"}': 14, ...}``.
        """
        return as_metrics(self.stats())

    def program(self) -> Program:
        """Return what one step does: a program for `tierstore.planning.simulating.simulate` and its like.

        It is that of the second step, with the times of the quicker one of the second and the third.  What
        could not be known is said in its ``assumptions``.

        Raises:
            UsageError: fewer than three steps have run, the run is closed, or ``memory_offload`` is OFF.
        """
        from tierstore.training.recorded_runs import program_of

        return program_of(self._recordable("program()"))

    def recorded_copies(self) -> tuple[CopyRecord, ...]:
        """Return the copies of the steps that `program` is made of: how fast links were seen to be.

        Raises:
            UsageError: no step was recorded yet, the run is closed, or ``memory_offload`` is OFF.
        """
        from tierstore.training.recorded_runs import copies_of

        return copies_of(self._recordable("recorded_copies()"))

    def record(self, path: str | Path) -> contextlib.AbstractContextManager[None]:
        """Record the steps inside a context; when it ends write to ``path`` what happened when.

        The file is a trace that Perfetto and ``chrome://tracing`` open, with the clock of `torch.profiler`'s.
        It is written however the block ends, as a whole or not at all; it takes the place of one that is
        there.  Recording keeps some hundred bytes of host memory for each use of a key until then.

        Raises:
            UsageError: the path is a directory's, the run is closed, or ``memory_offload`` is OFF.
            OSError: the file cannot be made; or, when the block ends, written.
        """
        from tierstore.training.recorded_runs import recorded_to

        return recorded_to(self._recordable("record(...)"), Path(path))

    def _recordable(self, what: str) -> Session:
        self._require_here()
        if self._session is None:
            raise UsageError(f"memory_offload is OFF: run.{what} has no store to watch. Set it to ON.")
        if self._is_closed:
            raise UsageError(f"the run is closed: run.{what} has nothing to watch.")
        return self._session

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
                among several processes or has no store, they train different parameters, or ``fully_shard``
                has sharded the model.
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

    def late_state_dicts(self, place: str = "cpu") -> contextlib.AbstractContextManager[None]:
        """Return a context in which state dicts take no memory: their entries are read when they are used.

        `save_file` writes them one bundle at a time.  Whoever else uses an entry has its values as they are
        then, and reads them again each time.  ``torch.distributed.checkpoint`` saves and loads so, one bundle
        at a time.  For the calling thread only.

        Args:
            place: the device that entries say they are on.  ``"meta"`` is for writers that look for memory
                which entries share: with it ``save_pretrained`` of transformers has one shard in memory.
        """
        session = None if self._is_closed else self._session
        return contextlib.nullcontext() if session is None else session.state_dicts.late(place)

    @interruptible
    def save_file(self, path: str | Path, value: object) -> None:
        """Write a value as ``torch.save`` does, with one bundle of the run in memory at a time.

        ``torch.load`` reads the file.  A file that is there is replaced when the new one is whole and on the
        disk.

        Args:
            path: of the file.
            value: anything that can be pickled, with state dicts in it that are made in `late_state_dicts`,
                and parameters of the run, which are written as plain tensors.

        Raises:
            UsageError: it holds sparse, quantised or nested tensors, or such as ``torch.save`` alone writes;
                nothing was written.
            AttributeError, TypeError, pickle.PicklingError: it cannot be pickled; nothing was written.
            OSError: the file system failed; a former file is unharmed.
        """
        self._require_here()
        session = None if self._is_closed else self._session
        write_run_file(
            Path(path), value, ordinary_access(self._model) if session is None else session.access()
        )

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
            UsageError: ``restore`` is something else; or ``fully_shard`` has sharded the model, and it is to
                be released.
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
        if error is not None and self._session is not None and not self._is_closed:
            note_holders(error, self._session)
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
