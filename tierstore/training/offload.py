"""The one entry: ``offload(model, optimizer, config)``.

An unchanged PyTorch loop then trains with parameters, gradients and optimizer state in a tiered store,
bit for bit as without.  The model and the optimizer stay the user's own objects; leaving the context
makes everything ordinary again, or leaves it where it lies.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tierstore.callers import opening
from tierstore.config import OffloadConfig
from tierstore.formats.safetensors_files import TensorSource
from tierstore.live import show
from tierstore.planning.placement import patterns_in, with_patterns
from tierstore.signals import interruptible
from tierstore.training import again, processes
from tierstore.training.activations import Sections, apply
from tierstore.training.activations.config.layers import Names
from tierstore.training.activations.swapping.run_store import RunStore
from tierstore.training.bundles.bundle_tiers import named_by_settings
from tierstore.training.checkpoints.agreement import Agreement, OneProcess
from tierstore.training.checkpoints.weights import Weights
from tierstore.training.given import Config, model_of, optimizers_of, settings_of
from tierstore.training.leaving import OnClose, on_close_of
from tierstore.training.left_behind import let_go
from tierstore.training.live_view import RunView
from tierstore.training.offloadable import check_model
from tierstore.training.opening import Others, find_former, open_session
from tierstore.training.place import given_patterns, placement_around
from tierstore.training.placing import marks_of
from tierstore.training.run import Offload
from tierstore.training.selection import SelectedTensors, patterns, select
from tierstore.training.session import Session
from tierstore.training.sharding.found import come_to_rest
from tierstore.training.sharding.shards import AnyShards, taken_over
from tierstore.training.tables.division import AllHere, TableDivision
from tierstore.training.telling import say_opened

if TYPE_CHECKING:
    from tierstore.training.ranks import Ranks

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
log = logging.getLogger("tierstore")


@interruptible
def offload(  # noqa: PLR0913 - each has a default, and a name
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizers = None,
    config: Config = None,
    *,
    weights: str | Path | TensorSource | None = None,
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
        model: any module; or several, which are one then: in one store, within the same quotas, each name
            with the number of its model before it (``0.layers.1.weight``).
        optimizer: the optimizers that train it: one, several, or none for inference.
        config: an `OffloadConfig`, a mapping of its keys, or a document: a mapping of sections, or the path
            of a YAML file of them.  A document's ``swap_config`` and ``recompute_config`` are applied, too:
            activations are then kept in the same store, within the same quotas.
        weights: what parameters and buffers get their values from: a safetensors file, the index of several
            (``model.safetensors.index.json``) or their directory; or `InitialValues`, or what
            `tierstore.integrations.transformers_models` returns.  Needed where the model was built under
            `without_values` or ``torch.device("meta")``.  Not read if training is resumed.
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
    model = model_of(model)
    settings, sections = settings_of(config)
    own = given_patterns(placement)
    placement = {**own, **placement_around(model, but=own)}
    if placement:
        settings = replace(settings, placement=with_patterns(settings.placement, placement))
    in_the_end = on_close_of(on_close)
    come_to_rest(model)
    optimizers = optimizers_of(optimizer, model)
    selection = select(
        model,
        [*settings.ignored, *patterns("ignored", ignored)],
        [*settings.pinned, *patterns("pinned", pinned)],
    )
    run: Offload | None = None
    try:
        with contextlib.ExitStack() as files:
            files.enter_context(opening("offload(...)"))
            again.make_way(model)
            source = None if weights is None else files.enter_context(Weights(model, weights))
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
                unshared = {
                    "a placement of modules": bool(patterns_in(settings.placement)),
                    "on_close='release'": in_the_end is OnClose.RELEASE,
                }
                has_values = weights is not None or settings.durable
                with (
                    taken_over(
                        model, optimizers, settings, selection.ignored, unshared, has_values=has_values
                    ) as shards,
                    _joined(settings, given, alone=alone) as ranks,
                ):
                    if ranks is not None:
                        shards.share_collectives(model, ranks.where.machine)
                    run = _open(
                        model,
                        optimizers,
                        settings if ranks is None else ranks.settings,
                        source,
                        selection,
                        resume=resume,
                        activations=(sections, layers),
                        on_close=OnClose.RESTORE if shards.parts else in_the_end,
                        ranks=ranks,
                        shards=shards,
                    )
            else:
                if source is not None:
                    source.load_buffers()
                    source.load_ordinary()
                if settings.offload_checkpoint is not None:
                    log.warning("memory_offload is OFF: offload_checkpoint has no effect.")
                applied = apply.apply(model, sections, layers, None)
                run = Offload(model, optimizers, None, activations=applied, on_close=in_the_end)
    except BaseException:
        if run is not None:  # it came between the opening and this function's end
            run.close()
        raise
    return run


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
    shards: AnyShards,
) -> Offload:
    """Open a store for the model and move it there."""
    check = functools.partial(check_model, model, optimizers, ignored=selection.ignored, sharded=shards.parts)
    check(has_weights=source is not None or settings.durable)
    tiers = named_by_settings(settings.store_config())
    store = RunStore(tiers if ranks is None else ranks.named(tiers))
    try:
        agreement: Agreement = OneProcess()
        if ranks is not None and store.is_durable:
            agreement = ranks.agreement(store, is_resumed=resume)
        former = find_former(model, optimizers, store, is_wanted=resume) if store.is_durable else None
        check(has_weights=source is not None or former is not None)
        session: Session | None = None
        division: TableDivision = AllHere()
        if ranks is not None and selection.tables:
            division = ranks.spread(model, selection.tables)
        try:
            with let_go(model, optimizers, is_resumed=former is not None):
                marks = marks_of(model, *activations)
                others = Others(agreement, division, shards)
                session = open_session(
                    model, optimizers, settings, store, former or source, selection, marks, others
                )
                session.hold(shards)
                session.apply_to_activations(*activations)
                say_opened(session)
                resumed = None if former is None else former.resumed
                run = Offload(model, optimizers, session, resumed, on_close=on_close, ranks=ranks)
                shown = show(RunView(run, type(model).__name__)) if settings.live_view else None
                if shown is not None:
                    session.hold(shown)
                division.opened()
        except BaseException:
            if session is not None:
                session.undo()
            raise
    except BaseException:
        store.close(flush=False)
        raise
    return run
