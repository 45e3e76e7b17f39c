"""What a table is made with: checked before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from tierstore.errors import ConfigError
from tierstore.quoting import quoted
from tierstore.tables.philox import LARGEST_SEED

_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LARGEST_BYTES: Final = 2**63 - 1
"""What PyTorch can say of a tensor's size, whether it has bytes or not."""


@dataclass(frozen=True)
class TableArguments:
    """See `tierstore.nn.EmbeddingTable`, of whose arguments these are all but the initialiser.

    Raises:
        TypeError: one is of a wrong type.
        ConfigError: one is out of its range, or two do not go together.
    """

    num_embeddings: int
    embedding_dim: int
    target: str
    cache_rows: int
    max_norm: float | None
    mode: str | None
    sparse: bool
    dtype: torch.dtype
    seed: int | None
    out_of_range: str
    policy: str

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "embedding_dim"):
            _check_int(name, getattr(self, name), 1)
        _check_int("cache_rows", self.cache_rows, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, LARGEST_SEED)
        _check_choice("target", self.target, ("cpu", "device"))
        _check_choice("out_of_range", self.out_of_range, ("error", "zeros"))
        _check_choice("policy", self.policy, ("lfu", "lru"))
        if self.mode is not None:
            _check_choice("mode", self.mode, ("sum", "mean"), "or None")
        if not isinstance(self.sparse, bool):
            raise TypeError(f"sparse={quoted(self.sparse)}: it has to be True or False")
        self._check_max_norm()
        self._check_size()
        self._check_target()

    def _check_max_norm(self) -> None:
        if self.max_norm is None:
            return
        if isinstance(self.max_norm, bool) or not isinstance(self.max_norm, int | float):
            raise TypeError(f"max_norm={quoted(self.max_norm)}: it has to be a number above 0, or None")
        if not self.max_norm > 0:
            raise ConfigError(f"max_norm={self.max_norm!r}: it has to be a number above 0, or None")

    def _check_size(self) -> None:
        if self.dtype not in _DTYPES:
            accepted = ", ".join(str(each) for each in _DTYPES)
            raise ConfigError(f"dtype={quoted(self.dtype)}: it has to be one of {accepted}")
        nbytes = self.num_embeddings * self.embedding_dim * self.dtype.itemsize
        if nbytes > _LARGEST_BYTES:
            raise ConfigError(
                f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}: {nbytes} bytes "
                f"of {self.dtype} are more than a tensor can be said to have, {_LARGEST_BYTES}"
            )

    def _check_target(self) -> None:
        if self.target == "device":
            return
        if not self.sparse:
            raise ConfigError(
                "sparse=False: a table with target='cpu' has sparse gradients; give it target='device'"
            )
        if self.cache_rows:
            raise ConfigError(
                f"cache_rows={self.cache_rows}: rows are kept on the device only with target='device'"
            )


def lowered(target: object) -> str:
    """Return a target in small letters: the original system writes large ones.

    Raises:
        TypeError: it is no text.
    """
    if not isinstance(target, str):
        raise TypeError(f"target={quoted(target)}: it has to be 'cpu' or 'device'")
    return target.lower()


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={quoted(value)}: it has to be an int")
    if value < least or (most is not None and value > most):
        range_ = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}={value}: it has to be {range_}")


def _check_choice(name: str, value: object, choices: tuple[str, ...], more: str = "") -> None:
    accepted = " or ".join(map(repr, choices)) + (f" {more}" if more else "")
    if not isinstance(value, str):
        raise TypeError(f"{name}={quoted(value)}: it has to be {accepted}")
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: it has to be {accepted}")
