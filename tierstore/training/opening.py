"""Opening a session: what goes where, and how much room there is for it.

What plans runs is imported when the first is opened: it takes a good part of what importing all of training
would take.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.planning import Machine, PlacedMark, Placement, Stashing, rules
from tierstore.planning.placement import patterns_in, tiers_in
from tierstore.planning.rules import HOST
from tierstore.store import Store
from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.swapping.run_store import RunStore
from tierstore.training.budgets.memory_meters import (
    beside_bytes,
    tensors_in,
)
from tierstore.training.budgets.widening import widening_of
from tierstore.training.bundles.freed_memory import give_freed_memory_back, return_free_memory
from tierstore.training.bundles.grouping import SMALL_BYTES, Group, first_names, group_parameters
from tierstore.training.bundles.working_sets import TrainedSets, WorkingSet
from tierstore.training.checkpoints.agreement import Agreement
from tierstore.training.checkpoints.resumed import ResumedCheckpoint, forget, is_held
from tierstore.training.checkpoints.weights import Weights
from tierstore.training.formats.json_codec import not_in_the_model
from tierstore.training.inventory import Inventory
from tierstore.training.modules import replicas
from tierstore.training.modules.buffers import group_buffers
from tierstore.training.modules.forward_needs import forward_sets
from tierstore.training.modules.host_modules import PlacedModules, place_modules, say_placed
from tierstore.training.optimizer_needs import (
    check_lbfgs,
    check_steps_in_backward,
    require_room,
    stepped_in_host,
    targets_of,
    without_elsewhere,
    without_host_modules,
    working_sets,
)
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.placing import placement_of, use_tiers
from tierstore.training.policies import policies_for
from tierstore.training.selection import SelectedTensors, require_one_place
from tierstore.training.session import Session
from tierstore.training.sharding.shards import AnyShards
from tierstore.training.tables.cache_wishes import (
    CacheWishes,
    cache_wishes,
    require_targets,
)
from tierstore.training.tables.division import TableDivision
from tierstore.training.tables.found_tables import lookups_on_host
from tierstore.training.tables.run_tables import RunTables
from tierstore.training.totals import require_together
from tierstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tierstore.training.first_call import FirstCall

log = logging.getLogger("tierstore")


# ---------------------------------------------------------------------- what there is already


def find_former(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], store: Store, *, is_wanted: bool
) -> ResumedCheckpoint | None:
    """Return the checkpoint that a durable store holds, if it is wanted and there is one.

    Raises:
        UsageError: there is something else, or it does not fit; or an optimizer trains what a checkpoint
            could not name.
    """
    known = set(model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise not_in_the_model(parameter)
    if not is_held(store):
        return None
    if is_wanted:
        return ResumedCheckpoint(store, model, optimizers)
    forget(store)
    return None


# ---------------------------------------------------------------------- opening


class Others(NamedTuple):
    """The processes that train with this one.

    Attributes:
        agreement: with them, about checkpoints.
        division: of the rows of tables among them.
        shards: of parameters of which each of them has a part.
    """

    agreement: Agreement
    division: TableDivision
    shards: AnyShards


def open_session(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    store: RunStore,
    source: Weights | ResumedCheckpoint | None,
    selection: SelectedTensors,
    marks: tuple[PlacedMark, ...],
    others: Others,
) -> Session:
    """Adopt the model and the optimizers' state, and register the hooks; undo all if that fails.

    Args:
        model: that is offloaded.
        optimizers: that train it.
        config: how.
        store: where to.
        source: where values come from; ``None``: they are there.
        selection: which tensors are treated otherwise.
        marks: what will happen to activations.
        others: who train with this process.
    """
    former = source if isinstance(source, ResumedCheckpoint) else None
    use_tiers(store, tiers_in(config.placement))
    plan = _plan(model, optimizers, config, store, former, selection, marks, others)
    machine = None if others.shards.group_of else _machine_of(store, config)  # a copy would gather
    first_call = None if machine is None else _foreseen(model, optimizers, config, machine, plan)
    inventory = Inventory()
    on_host = {*plan.placed.tensors_on_host(model), *selection.tables}
    policies = policies_for(
        optimizers,
        store,
        TrainedSets([*plan.sets, *plan.tables.cache_sets()], widening_of(model, on_host)),
        inventory,
        plan.placement,
        Stepping.IN_BACKWARD if config.optimizer_in_backward else Stepping.WHEN_ASKED,
        plan.placed,
        follows_plan=plan.is_followed,
    )
    session = Session(model, optimizers, store, policies, inventory, selection.ignored, plan.tables)
    if plan.placement.stashing is not Stashing.NEVER or not plan.tables.fit:
        give_freed_memory_back()
    try:
        _say_if_elsewhere(store, selection.ignored, on_host)
        _say_if_another_way(model, selection.ignored)
        _make_way_for_wrappers(session, plan.sets, plan.fastest_bytes)
        plan.tables.take_in(session.bindings.leasing, {} if former is None else former.tables())
        _take_in(session, plan.groups, source)
        return_free_memory()
        others.shards.watch(session)
        session.bindings.say_if_parts([*session.bundles, *session.buffers])
        if store.is_durable:
            session.make_durable(former, others.agreement)
            _say_if_small(store, plan.sets, plan.tables)
        if former is not None:
            former.end()
        say_placed(model, plan.placed, store.device)
        if first_call is not None:
            first_call.watch(session.hold)
        if machine is not None and not list(plan.tables.attached()):
            _let_be_planned(session, optimizers, machine, config, first_call, plan.placement)
    except BaseException:
        session.undo()
        raise
    return session


def _machine_of(store: RunStore, config: OffloadConfig) -> Machine | None:
    """Return the machine of a run; ``None``: it cannot be told, and the run goes on without plans."""
    from tierstore.training.run_machine import machine_of

    try:
        return machine_of(store, config)
    except Exception:
        log.debug("the run is neither foreseen nor planned: its machine is not known", exc_info=True)
        return None


def _let_be_planned(
    session: Session,
    optimizers: Sequence[torch.optim.Optimizer],
    machine: Machine,
    config: OffloadConfig,
    first_call: FirstCall | None,
    placement: Placement,
) -> None:
    """Let a run be planned as it goes on, if it is to be."""
    from tierstore.training.planned import RunPlanner, is_planned

    if is_planned(config, optimizers, placement):
        RunPlanner(session, machine, config, first_call).watch()


def _foreseen(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    machine: Machine,
    plan: _SessionPlan,
) -> FirstCall | None:
    """Return what knows a step of the run, once its inputs are known."""
    from tierstore.training.first_call import first_call_of
    from tierstore.training.foreseen import ForeseenRun
    from tierstore.training.planned import is_planned

    certain_bytes = sum(each.nbytes for each in plan.sets)
    is_plain = not plan.placed.are_any and not plan.tables.whole_bytes
    wants_plan = is_planned(config, optimizers, plan.placement)
    run = ForeseenRun(config, plan.placement, plan.groups, certain_bytes, is_plain, wants_plan)
    return first_call_of(model, optimizers, machine, run)


# ---------------------------------------------------------------------- what goes where


class _SessionPlan(NamedTuple):
    """What goes where, before anything has gone there.

    Attributes:
        placed: which modules compute on the host.
        groups: what travels together.
        sets: what of it has to be together where the model computes.
        fastest_bytes: what there is for it.
        tables: whose rows are divided.
        placement: where everything lives.
        is_followed: whether what steps need is fetched ahead.
    """

    placed: PlacedModules
    groups: Sequence[Group]
    sets: Sequence[WorkingSet]
    fastest_bytes: int
    tables: RunTables
    placement: Placement
    is_followed: bool


def _plan(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    store: RunStore,
    former: ResumedCheckpoint | None,
    selection: SelectedTensors,
    marks: tuple[PlacedMark, ...],
    others: Others,
) -> _SessionPlan:
    """Decide what goes where, and see that there is room for it; otherwise as `open_session`."""
    fastest = store.tier_names[0]
    check_steps_in_backward(optimizers, config, fastest)
    placed = _place_modules(model, config, store)
    groups = _groups(model, optimizers, config, store, selection, placed, others.shards)
    sets = working_sets(groups, optimizers, former)
    facts, placement = placement_of(config, store, optimizers, groups, sets, marks)
    if config.placement is not None:
        for group in groups:
            group.is_pinned = placement.bundles[group.key].is_pinned
        sets = working_sets(groups, optimizers, former)
    require_together(groups, optimizers, store, has_state=former is not None)
    wishes = _cache_wishes(model, optimizers, config, store, placed, others.division)
    tables = RunTables(store, selection.tables, wishes, others.division)
    looks = {} if former is None else former.table_looks()
    on_device = without_host_modules(groups, sets)
    placement = replace(placement, tables=tables.divide(optimizers, sets, placement.tables, on_device, looks))
    if facts.has_device:
        host_bytes = store.stats().tiers[HOST].capacity_bytes - tables.bytes_in(HOST)
        _require_host_room(model, groups, sets, optimizers, host_bytes, placement, selection)
    fastest_bytes = store.stats().tiers[fastest].capacity_bytes - tables.bytes_in(fastest)
    check_lbfgs(optimizers, on_device, fastest, fastest_bytes)
    forward = forward_sets(model, [group for group in groups if not group.is_on_host])
    forward += others.shards.gathered_together(groups)
    require_room(groups, on_device, optimizers, fastest, fastest_bytes, forward)
    is_followed = rules.follows_plan(placement, facts)
    return _SessionPlan(placed, groups, on_device, fastest_bytes, tables, placement, is_followed)


def _place_modules(model: nn.Module, config: OffloadConfig, store: Store) -> PlacedModules:
    """Return where each module computes; without a device all compute in one place, whatever is said."""
    placed = placed_by(model, patterns_in(config.placement), lookups=True)
    return placed if store.tier_names[0] != HOST else PlacedModules()


def _cache_wishes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    store: Store,
    placed: PlacedModules,
    division: TableDivision,
) -> CacheWishes:
    """Return what tables keep on the device; without one all of their rows are in host memory anyway."""
    wishes = cache_wishes(model, placed.is_on_host)
    if store.tier_names[0] == HOST:
        for wish in wishes.values():
            log.info("cache_rows=%d of %r: there is no device in this run", wish.rows, wish.module)
        return {}
    division.check_caches(wishes)
    targets = targets_of(optimizers, first_names(model), placed.tensors_on_host(model))
    require_targets(wishes, targets, config.optimizer_target)
    return wishes


def placed_by(model: nn.Module, given: Mapping[str, str], *, lookups: bool = False) -> PlacedModules:
    """Return where patterns of module names say that each module computes; see `PlacedModules`.

    Args:
        model: whose modules.
        given: the device of each pattern, in the order in which they count.
        lookups: whether tables that keep no rows on the device look them up where these are, on the host.

    Raises:
        ConfigError: a text is no pattern.
        UsageError: something would be used on both sides, or a pattern names operators.
    """
    patterns = {text: (Pattern(text), device) for text, device in given.items()}
    for text, (pattern, _) in patterns.items():
        if pattern.is_aten:
            raise UsageError(f"placement: modules[{text!r}] names operators; accepted are names of modules.")
    matched = {text: (each.matches, device) for text, (each, device) in patterns.items()}
    if lookups:
        matched = {**lookups_on_host(model), **matched}
    placed = place_modules(model, matched)
    if placed.are_any:
        placed.require_one_side(model)
    return placed


def _require_host_room(
    model: nn.Module,
    groups: Sequence[Group],
    sets: Sequence[WorkingSet],
    optimizers: Sequence[torch.optim.Optimizer],
    capacity_bytes: int,
    placement: Placement,
    selection: SelectedTensors,
) -> None:
    """Raise if what is used in host memory, beside a device, does not fit into ``capacity_bytes`` there."""
    in_host = stepped_in_host(groups, placement)
    on_host = [group for group in groups if group.is_on_host]
    if in_host:
        require_one_place(selection.ignored, groups, [optimizers[index] for index in in_host])
    if in_host or on_host:
        needs = without_elsewhere(groups, sets, placement)
        require_room(groups, needs, optimizers, HOST, capacity_bytes, forward_sets(model, on_host))


def _groups(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    store: Store,
    selection: SelectedTensors,
    placed: PlacedModules,
    shards: AnyShards,
) -> list[Group]:
    """Return what travels together: of parameters first, then of buffers."""
    on_host = placed.tensors_on_host(model)
    targets = targets_of(optimizers, first_names(model), on_host)
    fastest_bytes = store.stats().tiers[store.tier_names[0]].capacity_bytes
    ignored, pinned = selection.ignored, selection.pinned
    left_bytes = max(0, fastest_bytes - beside_bytes(store.device, _taken_in(model, optimizers, ignored)))
    model_bytes = sum(each.nbytes for each in model.parameters() if each not in ignored)
    small_bytes = min(SMALL_BYTES, rules.small_bytes(left_bytes, model_bytes))
    parameters = group_parameters(
        model,
        optimizers,
        small_bytes,
        ignored=ignored,
        pinned=pinned,
        on_host=on_host,
        targets=targets if store.tier_names[0] != HOST else {},
        gathered=shards.group_of,
    )
    smallest_bytes = None if config.buffer_min_size is None else parse_bytes(config.buffer_min_size)
    left = {*selection.ignored_buffers, *replicas.buffers_sent(model)}
    buffers = group_buffers(model, smallest_bytes, ignored=left, pinned=pinned, on_host=on_host)
    return [*parameters, *buffers]


def _taken_in(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ignored: Container[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what the store is about to have."""
    entries = (entry for optimizer in optimizers for entry in optimizer.state.values())
    return [*(each for each in model.parameters() if each not in ignored), *tensors_in(entries)]


def _say_if_elsewhere(
    store: Store, ignored: Mapping[torch.Tensor, str], on_host: Container[torch.Tensor]
) -> None:
    """Log which ignored parameters are not where the model computes: its operations may refuse them."""
    names = [
        name
        for each, name in ignored.items()
        if each.device.type not in ("cpu" if each in on_host else store.device.type, "meta")
    ]
    if names:
        log.warning(
            "%d ignored parameters are not on %s, where the model computes, and stay where they are: %s",
            len(names),
            store.device,
            ", ".join(names[:4]),
        )


def _say_if_another_way(model: nn.Module, ignored: Container[torch.Tensor]) -> None:
    """Log which layers compute another way in evaluation than without hooks: last bits may differ."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        and module.self_attn.batch_first
        and any(parameter not in ignored for parameter in module.parameters())
    ]
    if names:
        log.warning(
            "%d transformer encoder layers do not take PyTorch's fast path in evaluation while they are "
            "offloaded, as it is for modules without hooks: the last bits of their outputs may differ: %s. "
            "With ignored=[patterns] they take it, and stay on the device.",
            len(names),
            ", ".join(names[:4]),
        )


def _make_way_for_wrappers(session: Session, sets: Sequence[WorkingSet], capacity_bytes: int) -> None:
    """Keep gradients where a wrapper reads them, now or when one is made later."""
    largest_bytes = max((each.bundle_bytes + each.state_bytes for each in sets), default=0)
    room = replicas.ComputeRoom(
        session.store.tier_names[0],
        sum(each.bundle_bytes for each in sets),
        capacity_bytes,
        None if session.budget is None else capacity_bytes - largest_bytes,
    )
    keep = session.gradients.keep if session.stepping is Stepping.WHEN_ASKED else replicas.refuse_to_average
    tables = session.tables
    wrappers = replicas.wrappers_in(session.model, session.store.device)
    on_host = [each for each in session.placed.tensors_on_host(session.model) if each not in tables]
    if wrappers and on_host and session.store.device.type != "cpu":
        raise UsageError(
            "placement: the model is in a DistributedDataParallel, which takes parameters of one device, and "
            f"{len(on_host)} tensors are used on the host beside {session.store.device.type!r}. Leave the "
            "wrapper out and call run.average_gradients(), or leave these modules on the device."
        )
    for wrapper in wrappers:
        reduced = [each for each in wrapper.parameters() if each not in tables]
        room.refuse_gradients(reduced, are_views=wrapper.gradient_as_bucket_view)
        keep(reduced)
    tables.division.follow_wrappers(session.model)
    told = tables.division.is_wrapped_by
    wrapping = replicas.Wrapping(session.model, keep, session.buffers.release, room, tables, told)
    session.hold(replicas.LeftOut(session.model, tables))
    session.hold(wrapping.watch())


def _take_in(session: Session, groups: Sequence[Group], source: Weights | ResumedCheckpoint | None) -> None:
    """Take everything into the store, and register the hooks."""
    if source is not None:
        source.load_buffers({tensor for group in groups for tensor in group.tensors})
    if isinstance(source, ResumedCheckpoint):
        source.prepare(groups)
    session.adopt(groups, source)
    session.buffers.move()
    session.watch(groups)


def _say_if_small(store: Store, sets: Sequence[WorkingSet], tables: RunTables) -> None:
    """Log what checkpoints need if the durable tier is smaller."""
    kept_bytes = sum(each.bundle_bytes + each.state_bytes for each in sets)
    rows_bytes = sum(tables.whole_bytes.values())
    kept_bytes += rows_bytes
    of_tables = (
        f", {format_bytes(rows_bytes)} of that of tables when all of their rows have been used,"
        if rows_bytes
        else ""
    )
    name = store.tier_names[-1]
    capacity_bytes = store.stats().tiers[name].capacity_bytes
    if capacity_bytes < 2 * kept_bytes:
        log.warning(
            "a checkpoint keeps %s in %r%s, and beside it there has to be room for the next one; its "
            "capacity is %s. A step may find no room: raise it to %s.",
            format_bytes(kept_bytes),
            name,
            of_tables,
            format_bytes(capacity_bytes),
            format_bytes(2 * kept_bytes),
        )
