"""What must not happen as a loader is asked for a batch ahead: refused by name, before a step goes wrong.

1. It draws from a generator that the program draws from, too: PyTorch's, the accelerator's, Python's or
   NumPy's.  The generator is set back.
2. It writes to tensors or arrays of batches that it has given before and that are still to be handed out.
   What PyTorch counts is seen to the last byte; of memory that is written past it, the first and the last
   half megabyte of each tensor are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from tierstore.errors import UsageError
from tierstore.torch_private import tree_flatten

_COMPARED_BYTES: Final = 1 << 19


class BatchWatch:
    """Watches a loader that is asked for a batch.

    Args:
        waiting: batches that were asked for before, and are still to be handed out: if there are none, the
            one that is asked for is due, and the loader may do what it likes.
    """

    def __init__(self, waiting: Sequence[object]) -> None:
        self._waiting = waiting
        self._generators = list(_generators()) if waiting else []
        self._marks = [_marks_of(batch) for batch in waiting]

    def end(self) -> None:
        """Compare.

        Raises:
            UsageError: see above.
        """
        _require_undrawn(self._generators)
        if self._marks != [_marks_of(batch) for batch in self._waiting]:
            raise UsageError(
                "the loader writes to a batch that it has given before, as it makes the next one: lookahead "
                "asks for batches ahead, and the program would be given what is in the one after. Let the "
                "loader give tensors of its own for each batch (clone())."
            )


# ---------------------------------------------------------------------- random numbers


class _Generator(NamedTuple):
    """One of the generators that all of a process draws from.

    Attributes:
        name: of the module.
        state: what it was.
        read: returns what it is.
        restore: sets it.
    """

    name: str
    state: object
    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _generators() -> Iterator[_Generator]:
    yield _Generator("torch", _of_torch(), _of_torch, lambda state: torch.set_rng_state(_to_torch(state)))
    yield _Generator("random", random.getstate(), random.getstate, random.setstate)
    yield _Generator("numpy.random", _of_numpy(), _of_numpy, np.random.set_state)
    if torch.cuda.is_initialized():
        yield _Generator(
            "torch.cuda", _of_cuda(), _of_cuda, lambda state: torch.cuda.set_rng_state(_to_torch(state))
        )


def _of_torch() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _of_cuda() -> bytes:
    return torch.cuda.get_rng_state().numpy().tobytes()


def _to_torch(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _of_numpy() -> tuple[object, ...]:
    state: tuple[Any, ...] = tuple(np.random.get_state(legacy=True))
    return tuple(each.tolist() if isinstance(each, np.ndarray) else each for each in state)


def _require_undrawn(generators: Iterable[_Generator]) -> None:
    drawn = [each for each in generators if each.read() != each.state]
    for each in drawn:
        each.restore(each.state)
    if drawn:
        names = " and ".join(each.name for each in drawn)
        raise UsageError(
            f"the loader draws random numbers from {names}'s generator as it makes a batch: lookahead asks "
            "for batches ahead, and the steps before would draw others than beside the bare loader. Give it "
            "a generator of its own (DataLoader(generator=...), torch.randint(generator=...)), or let worker "
            "processes draw (DataLoader(num_workers=1))."
        )


# ---------------------------------------------------------------------- batches that are written to


def _marks_of(batch: object) -> list[object]:
    """Return what changes as somebody writes to a batch."""
    leaves, _ = tree_flatten(batch)
    return [_mark(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]


def _mark(leaf: torch.Tensor | np.ndarray[Any, Any]) -> object:
    if isinstance(leaf, np.ndarray):
        return _hash_of(leaf) if leaf.dtype != object else None
    version = None if leaf.is_inference() else leaf._version  # noqa: SLF001 - there is no public name for it
    is_plain = leaf.device.type == "cpu" and leaf.layout is torch.strided and type(leaf) is torch.Tensor
    if not is_plain or leaf.is_quantized:
        return version
    return version, _hash_of(leaf.detach().reshape(-1).view(torch.uint8).numpy())


def _hash_of(array: np.ndarray[Any, Any]) -> int:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    ends = (
        raw
        if raw.nbytes <= 2 * _COMPARED_BYTES
        else np.concatenate([raw[:_COMPARED_BYTES], raw[-_COMPARED_BYTES:]])
    )
    return xxhash.xxh3_64_intdigest(ends.data)
