"""Opening a session: what can be offloaded, what goes where, and how much room there is for it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.store import Store
from tierstore.training import guard
from tierstore.training.budget import ALIGNMENT_BYTES, DeviceBudget, WorkingSet
from tierstore.training.encoding import not_in_the_model
from tierstore.training.follow import Follower, Window
from tierstore.training.footprint import AllocatorMeter, EmulatedMeter, Meter
from tierstore.training.former import Former, forget, is_held
from tierstore.training.groups import SMALL_BYTES, ParameterGroup, group_parameters
from tierstore.training.session import Session
from tierstore.training.tiers import HOST, Placements
from tierstore.training.weights import Weights
from tierstore.units import MIB, align_up, format_bytes

log = logging.getLogger("tierstore")

_M_MMAP_THRESHOLD = -3  # malloc.h
_PREFETCH_SHARE = 4  # a quarter of a tier may be ahead of its use
_SMALL_SHARE = 64  # bundles below this part of the fastest tier are worth joining


# ---------------------------------------------------------------------- what can be offloaded


def check_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, has_weights: bool) -> None:
    """Raise if something cannot be offloaded.

    Raises:
        UsageError: it names what, and says why.
    """
    for name, parameter in model.named_parameters():
        reason = _why_not(parameter, has_weights=has_weights)
        if reason is not None:
            raise UsageError(f"the parameter {name!r} cannot be offloaded: {reason}.", key=name)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and not has_weights:
            raise UsageError(f"the buffer {name!r} is on the meta device and has no values.", key=name)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS looks at all parameters at once and cannot be stepped a bundle at a time. "
                "Use an optimizer that treats each parameter by itself, such as AdamW or SGD."
            )


def _why_not(parameter: nn.Parameter, *, has_weights: bool) -> str | None:
    is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
    is_wrapper: bool = is_traceable_wrapper_subclass(parameter)
    reasons = {
        "it is offloaded already; close that run first": guard.tenant_of(parameter) is not None,
        "it has no shape yet; run the model once before": is_lazy,
        f"it is a {type(parameter).__name__}, a wrapper without plain bytes": is_wrapper,
        "it is on the meta device and has no values; pass weights=...": parameter.is_meta and not has_weights,
        f"it is sparse ({parameter.layout})": parameter.layout is not torch.strided,
        f"it is quantised ({parameter.dtype})": parameter.is_quantized,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


# ---------------------------------------------------------------------- what there is already


def find_former(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], store: Store, *, is_wanted: bool
) -> Former | None:
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
        return Former(store, model, optimizers)
    forget(store)
    return None


# ---------------------------------------------------------------------- opening


def open_session(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    store: Store,
    source: Weights | Former | None,
) -> Session:
    """Adopt the model and the optimizers' state, and register the hooks; undo all if that fails.

    Args:
        model: that is offloaded.
        optimizers: that train it.
        config: how.
        store: where to.
        source: where values come from; ``None``: they are there.
    """
    fastest = store.tier_names[0]
    fastest_bytes = store.stats().tiers[fastest].capacity_bytes
    groups = group_parameters(model, optimizers, min(SMALL_BYTES, fastest_bytes // _SMALL_SHARE))
    former = source if isinstance(source, Former) else None
    sets = [_working_set(group, optimizers, former) for group in groups]
    fits = sum(each.nbytes for each in sets) <= int(fastest_bytes * config.hbm_ratio)
    meter = None if fastest == HOST else _meter(store)
    windows = [] if fits and meter is None else _windows(store)
    session = _new_session(model, optimizers, config, store, windows, meter)
    is_stashing = not fits or config.offload_grad is not None
    session.gradients.must_stash = lambda: is_stashing
    if is_stashing or meter is not None:
        give_freed_memory_back()
    try:
        if meter is not None and sets:
            budget = _bound(session, sets, meter, fastest_bytes)
            if config.offload_grad is None:
                session.gradients.must_stash = lambda: not budget.has_room_for_gradients
        _take_in(session, groups, source)
        if store.is_durable:
            session.make_durable(0 if former is None else former.checkpoints)
            _say_if_small(store, sets)
        if former is not None:
            former.end()
    except BaseException:
        session.remove_hooks()
        session.restore()
        raise
    return session


def _new_session(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    store: Store,
    windows: Sequence[Window],
    meter: Meter | None,
) -> Session:
    """Return a session that has nothing yet; its follower knows the bytes of what will be adopted."""
    nbytes: Mapping[str, int] = {}
    follower = Follower(store, windows, lambda key: nbytes.get(key, 0), len(optimizers))
    session = Session(model, optimizers, store, Placements.of(config, store), follower, meter)
    nbytes = session.adopter.nbytes
    return session


def _bound(session: Session, sets: Sequence[WorkingSet], meter: Meter, fastest_bytes: int) -> DeviceBudget:
    """Let the session's store have of the device what activations and workspace leave."""
    fastest, follower = session.store.tier_names[0], session.follower
    session.budget = budget = DeviceBudget(
        session.store,
        fastest_bytes,
        sets,
        meter,
        session.bindings.apart,
        lambda quota_bytes: follower.set_limit(fastest, quota_bytes // _PREFETCH_SHARE),
    )
    budget.staying_bytes = session.gradients.staying_bytes
    session.bindings.prepare = budget.prepare
    session.bindings.ask_for_more = budget.grow
    return budget


def _take_in(session: Session, groups: Sequence[ParameterGroup], source: Weights | Former | None) -> None:
    """Take everything into the store, and register the hooks."""
    if source is not None:
        source.load_buffers()
    session.move_buffers()
    if isinstance(source, Former):
        source.prepare(groups)
    session.adopt(groups, source)
    session.watch(groups)


def give_freed_memory_back() -> None:
    """Let the C library return every freed piece of 1 MiB and more to the system at once.

    By itself glibc raises that bound to 32 MiB as pieces are freed (mallopt(3), M_MMAP_THRESHOLD), and
    gradients and fresh state then leave holes in its heap that no quota knows of: measured, three
    times the host quota.  Holds for the process; other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MIB)


def _meter(store: Store) -> Meter:
    if store.device.type == "cpu":
        return EmulatedMeter(store)
    return AllocatorMeter(store, store.device)


def _windows(store: Store) -> list[Window]:
    """Return how far ahead is prefetched: to the fastest tier, and from disk to host memory."""
    tiers = store.stats().tiers
    names = [store.tier_names[0], *(name for name in store.tier_names[1:] if name == HOST)]
    return [Window(name, tiers[name].capacity_bytes // _PREFETCH_SHARE) for name in names]


def _working_set(
    group: ParameterGroup, optimizers: Sequence[torch.optim.Optimizer], former: Former | None
) -> WorkingSet:
    """Return what is needed together to train one bundle."""
    bundle_bytes = align_up(group.nbytes, ALIGNMENT_BYTES)
    if group.optimizer is None:
        return WorkingSet(group.names[0], bundle_bytes, 0, bundle_bytes)
    trained = [p for p in group.parameters if p.requires_grad]
    gradient_bytes = sum(align_up(p.numel() * p.element_size(), ALIGNMENT_BYTES) for p in trained)
    optimizer = optimizers[group.optimizer]
    known_bytes = 0 if former is None else former.state_bytes(group.optimizer, group.names)
    state_bytes = align_up(known_bytes or sum(_state_bytes(optimizer, p) for p in trained), ALIGNMENT_BYTES)
    return WorkingSet(group.names[0], bundle_bytes, state_bytes, bundle_bytes + gradient_bytes + state_bytes)


def _say_if_small(store: Store, sets: Sequence[WorkingSet]) -> None:
    """Log what checkpoints need if the durable tier is smaller."""
    kept_bytes = sum(each.bundle_bytes + each.state_bytes for each in sets)
    name = store.tier_names[-1]
    capacity_bytes = store.stats().tiers[name].capacity_bytes
    if capacity_bytes < 2 * kept_bytes:
        log.warning(
            "a checkpoint keeps %s in %r, and beside it there has to be room for the next one; its "
            "capacity is %s. A step may find no room: raise it to %s.",
            format_bytes(kept_bytes),
            name,
            format_bytes(capacity_bytes),
            format_bytes(2 * kept_bytes),
        )


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter's state: as it is, or as that kind of optimizer will make it."""
    entries = optimizer.state.get(parameter)
    if entries:
        tensors = [value for value in entries.values() if isinstance(value, torch.Tensor) and value.dim()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    options = next(
        (group for group in optimizer.param_groups if any(each is parameter for each in group["params"])), {}
    )
    copies = next((count for kind, count in _STATE_COPIES.items() if isinstance(optimizer, kind)), _two)
    return copies(options) * parameter.numel() * parameter.element_size()


def _two(options: Mapping[str, object]) -> int:
    del options
    return 2


_STATE_COPIES: dict[type[torch.optim.Optimizer], Callable[[Mapping[str, object]], int]] = {
    torch.optim.SGD: lambda options: 1 if options.get("momentum") else 0,
    torch.optim.Adam: lambda options: 3 if options.get("amsgrad") else 2,
    torch.optim.RMSprop: lambda options: 1 + bool(options.get("momentum")) + bool(options.get("centered")),
    torch.optim.Adagrad: lambda _: 1,
    torch.optim.ASGD: lambda _: 1,
    torch.optim.Adafactor: lambda _: 1,
}
"""How many tensors of the parameter's size an optimizer keeps; others are taken to keep two."""
