"""What a checkpoint's document says, and how two things to train differ.

The document is one key of a durable store: small tensors and JSON, packed as a safetensors file is.  The
JSON names every bundle with what lies where in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tierstore.training.bundles.grouping import Content
from tierstore.training.bundles.layout import TensorLayout, span_bytes
from tierstore.training.bundles.tensor_slots import part_here

DOCUMENT = "training/checkpoint"
"""The key of the document."""

KEPT = "training/kept/"
"""What keys of the former checkpoint begin with, while it is not known that all processes have the last."""

METADATA = "tierstore"
PARTS = "parts"
"""What the document calls where parts begin: those that a process has of tensors that several share."""
TABLE_KEYS = "table keys"
"""What the document calls the keys that hold the rows of tables, and say where they are."""
FORMAT = 1


class HeldTensor(NamedTuple):
    """One tensor of a bundle.

    Attributes:
        parameter: its name, or that of the parameter whose state it is.
        entry: the name of the state; "": it is the parameter itself, or a buffer.
        place: where it lies in the bundle.
    """

    parameter: str
    entry: str
    place: TensorLayout

    def to_json(self) -> list[object]:
        """Return it as a document holds it."""
        place = self.place
        dtype = str(place.dtype).removeprefix("torch.")
        lazy = [name for name, applies in (("conj", place.is_conj), ("neg", place.is_neg)) if applies]
        described = [self.parameter, self.entry, dtype, list(place.shape), list(place.stride), place.offset]
        return [*described, lazy] if lazy else described

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> HeldTensor:
        """Return what `to_json` was called on."""
        parameter, entry, dtype_name, sizes, steps, offset, *rest = value
        lazy = rest[0] if rest else ()
        dtype: torch.dtype = getattr(torch, dtype_name)
        shape = torch.Size(sizes)
        name = f"the optimizer's {entry!r} of {parameter!r}" if entry else parameter
        stride = tuple(steps)
        nbytes = span_bytes(shape, stride, dtype.itemsize)
        place = TensorLayout(name, shape, dtype, stride, offset, nbytes, "conj" in lazy, "neg" in lazy)
        return cls(parameter, entry, place)


Bundles = dict[str, list[HeldTensor]]


def names_of(bundles: Bundles) -> dict[str, str]:
    """Return the key of each tensor in bundles, by what messages call the tensor."""
    return {held.place.name: key for key, each in bundles.items() for held in each}


def unfinished() -> torch.Tensor:
    """Return the document of state that changes: nobody can go on from it."""
    return torch.frombuffer(bytearray(b"between checkpoints"), dtype=torch.uint8)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what an optimizer is."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def buffer_name(name: str) -> str:
    """Return what the document calls a buffer's values."""
    return f"buffer/{name}"


def parameter_name(name: str) -> str:
    """Return what the document calls the values of a parameter that was ignored."""
    return f"parameter/{name}"


def is_of_parameters(key: str) -> bool:
    """Say whether a key is of a bundle of parameters."""
    return key.startswith(f"{Content.PARAMETERS.value}/")


def owner_of(key: str) -> int | None:
    """Return whose bundle a key is of: the index of an optimizer, or ``None`` for what a model has."""
    kind, _, rest = key.partition("/")
    return int(rest.partition("/")[0]) if kind == "state" else None


def look_of(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return what a tensor looks like, as text."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def looks(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return what each tensor looks like."""
    return {name: look_of(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def parts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return where the part of each tensor begins of which this process has a part."""
    parts = {name: part_here(tensor) for name, tensor in tensors.items()}
    return {name: [begin for begin, _ in part] for name, part in parts.items() if part is not None}


def with_parts(looks_of: Mapping[str, str], parts: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return what tensors look like, with where those begin that are parts."""
    return {
        name: f"{look}, the part at {list(parts[name])}" if name in parts else look
        for name, look in looks_of.items()
    }


def differences(what: str, saved: Mapping[str, str], mine: Mapping[str, str]) -> Iterator[str]:
    """Say what tensors are only here or there, or look different.

    Args:
        what: they are.
        saved: what each looks like in the checkpoint, by name.
        mine: what each looks like now.
    """
    for name, look in saved.items():
        if name not in mine:
            yield f"there is no {what} {name} ({look})"
        elif mine[name] != look:
            yield f"the {what} {name} is {mine[name]}, saved was {look}"
    for name, look in mine.items():
        if name not in saved:
            yield f"the {what} {name} ({look}) was not saved"


def group_differences(index: int, saved: Sequence[list[str]], mine: Sequence[list[str]]) -> Iterator[str]:
    """Say how the parameter groups of one optimizer differ.

    Args:
        index: of the optimizer.
        saved: the names in each group in the checkpoint.
        mine: the names in each group now.
    """
    if len(saved) != len(mine):
        yield f"optimizer {index} has {len(mine)} parameter groups, saved were {len(saved)}"
        return
    for number, (former, now) in enumerate(zip(saved, mine, strict=True)):
        if former == now:
            continue
        gone, new = ([n for n in a if n not in b] for a, b in ((former, now), (now, former)))
        what = [f"{sign} {', '.join(names)}" for sign, names in (("without", gone), ("with", new)) if names]
        yield f"group {number} of optimizer {index} is {' and '.join(what) or 'in another order'}"
