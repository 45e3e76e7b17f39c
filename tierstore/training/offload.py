"""The one entry: ``offload(model, optimizer, config)``.

An unchanged PyTorch loop then trains with parameters, gradients and optimizer state in a tiered store,
bit for bit as without.  The model and the optimizer stay the user's own objects; leaving the context
makes everything ordinary again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.stats import StoreStats
from tierstore.store import Store
from tierstore.training.follow import Follower, Window
from tierstore.training.groups import SMALL_BYTES, ParameterGroup, group_parameters
from tierstore.training.optimizer import refuse_unsupported
from tierstore.training.session import Session
from tierstore.training.tiers import Placements

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Config = OffloadConfig | Mapping[str, object] | str | Path | None


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run did so far.

    Attributes:
        store: the store's own counts; ``None`` if nothing is offloaded.
        forward_s: seconds in the model's forward.
        backward_s: seconds from there to the last gradient.
        optimizer_s: seconds in the optimizers' steps.
        stall_s: how long all of these waited for bytes.
    """

    store: StoreStats | None
    forward_s: float
    backward_s: float
    optimizer_s: float
    stall_s: float


class Offload:
    """An offloaded model.  A context manager; `close` does the same.

    Made by `offload`.
    """

    def __init__(self, session: Session | None, parameters: Sequence[nn.Parameter]) -> None:
        self._session = session
        self._parameters = tuple(parameters)
        self._is_closed = False

    @property
    def store(self) -> Store:
        """The store that everything is in.

        Raises:
            UsageError: ``memory_offload`` is OFF: there is none.
        """
        if self._session is None:
            raise UsageError("memory_offload is OFF: there is no store. Set it to ON.")
        return self._session.store

    def stats(self) -> RunStats:
        """Return what the run did so far."""
        session = self._session
        if session is None:
            return RunStats(None, 0.0, 0.0, 0.0, 0.0)
        store = session.store.stats()
        optimizer_s = sum(steps.seconds for steps in session.steps)
        clock = session.clock
        return RunStats(store, clock.forward_s, clock.backward_s, optimizer_s, store.stall_seconds)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return what it was.

        The same as ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``.
        """
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type)

    def close(self) -> None:
        """Make parameters, gradients and state ordinary tensors again, and close the store.  Idempotent."""
        if self._is_closed or self._session is None:
            return
        self._is_closed = True
        session = self._session
        try:
            session.restore()
        finally:
            session.remove_hooks()
            session.store.close()

    def __enter__(self) -> Self:
        """Return the run itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def offload(model: nn.Module, optimizer: Optimizers = None, config: Config = None) -> Offload:
    """Train ``model`` with its parameters, gradients and optimizer state in a tiered store.

    Args:
        model: any module.
        optimizer: the optimizers that train it: one, several, or none for inference.
        config: an `OffloadConfig`, a mapping of its keys, or the path of a YAML file.

    Raises:
        ConfigError: the configuration is wrong or does not fit this machine.
        UsageError: a parameter cannot be offloaded; the message names it.
        CapacityError: the tiers together cannot hold it, or one module does not fit on the device.
    """
    settings = read_config(config)
    optimizers = _as_tuple(optimizer)
    parameters = list(model.parameters())
    if not settings.is_on:
        return Offload(None, parameters)
    for each in optimizers:
        refuse_unsupported(each)
    _refuse_odd_parameters(model)
    store = Store(settings.store_config())
    session: Session | None = None
    try:
        session = _open(model, optimizers, settings, store)
    except BaseException:
        store.close()
        raise
    return Offload(session, parameters)


def read_config(config: Config) -> OffloadConfig:
    """Return the configuration, whatever form it came in."""
    if config is None:
        return OffloadConfig()
    if isinstance(config, OffloadConfig):
        return config
    if isinstance(config, str | Path):
        return OffloadConfig.from_yaml(config)
    return OffloadConfig.from_mapping(config)


def _as_tuple(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def _refuse_odd_parameters(model: nn.Module) -> None:
    """Raise for what has no plain bytes."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(f"{name!r} is on the meta device and has no values; pass weights=...", key=name)


def _open(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: OffloadConfig, store: Store
) -> Session:
    fastest_bytes = store.stats().tiers[store.tier_names[0]].capacity_bytes
    groups = group_parameters(model, optimizers, min(SMALL_BYTES, fastest_bytes // 64))
    placements = Placements.of(config, store)
    nbytes: dict[str, int] = {}
    fits = _needed_bytes(groups) <= fastest_bytes
    windows = [] if fits else [Window(store.tier_names[0], fastest_bytes // 4)]
    follower = Follower(store, windows, lambda key: nbytes.get(key, 0), len(optimizers))
    session = Session(model, optimizers, store, placements, follower)
    nbytes = session.adopter.nbytes
    session.gradients.is_stashing = not fits or config.offload_grad is not None
    session.adopt(groups)
    session.watch(groups)
    return session


def _needed_bytes(groups: Iterable[ParameterGroup]) -> int:
    return sum(4 * group.nbytes for group in groups)
