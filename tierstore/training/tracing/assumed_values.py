"""What is answered where a program asks for values, and there are none.

1. A number is taken for 1, a truth for True.  Each place in the program is noted once.  Optimizers ask
   how far they are, and divide by what is left: they get a half. A place that asks too often is an error:
   a loop that ends by values has no end here.  What is asked in backward and by
   optimizers is not noted.
2. Results whose size is a question of values get the largest that they can have: of ``nonzero`` as many rows
   as there are elements.  Where there is no largest, the trace ends with an error that names the operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.torch_private import OpOverload
from tierstore.training.tracing.places import calling_line

MOST_ASKED = 10_000
"""How often values are assumed at one place before it is taken for a loop without an end."""

Answer = Callable[[Sequence[Any], Mapping[str, Any]], object]


def _number(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    del kwargs
    dtype: torch.dtype = args[0].dtype
    if dtype is torch.bool:
        return True
    if dtype.is_complex:
        return complex(1)
    return 1.0 if dtype.is_floating_point else 1


def _true(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    del args, kwargs
    return True


def _places_of_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    del kwargs
    mask: torch.Tensor = args[0]
    return torch.empty((mask.numel(), mask.dim()), dtype=torch.int64, device=mask.device)


def _all_selected(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    del kwargs
    values, mask = args[0], args[1]
    shape = torch.broadcast_shapes(values.shape, mask.shape)
    return torch.empty((shape.numel(),), dtype=values.dtype, device=values.device)


def _each_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    del kwargs
    values: torch.Tensor = args[0]
    places = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    counts = torch.empty((values.numel(),), dtype=torch.int64, device=values.device)
    return torch.empty((values.numel(),), dtype=values.dtype, device=values.device), places, counts


_NUMBERS: Mapping[str, Answer] = {"aten::_local_scalar_dense": _number, "aten::equal": _true}
_SIZES: Mapping[str, Answer] = {
    "aten::nonzero": _places_of_all,
    "aten::masked_select": _all_selected,
    "aten::_unique2": _each_once,
}
_HALF = 0.5
_BY_MASK = frozenset(
    {
        "aten::index.Tensor",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index.Tensor",
    }
)


class AssumedValues:
    """Answers in the place of values; remembers each of them."""

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}
        self._asked: Counter[str] = Counter()

    @property
    def sentences(self) -> tuple[str, ...]:
        """What was assumed, each once and in order."""
        return tuple(self._sentences)

    def note(self, sentence: str) -> None:
        """Remember something that was assumed."""
        self._sentences.setdefault(sentence)

    def answer(
        self,
        operator: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        module: str,
        *,
        is_noted: bool,
    ) -> tuple[object] | None:
        """Return what an operator returns that would have to look at values; ``None``: it does not.

        Args:
            operator: which.
            args: that it is given.
            kwargs: likewise.
            module: that runs.
            is_noted: whether the place is remembered; it is not what a forward asks otherwise.

        Raises:
            UsageError: it was asked so often at one place that it is a loop without an end.
        """
        name = operator.name()
        answer = _NUMBERS.get(name) or _SIZES.get(name)
        if answer is None or not args[0].is_meta:
            return None
        found = answer(args, kwargs)
        if isinstance(found, float) and not is_noted:
            found = _HALF
        if is_noted:
            what = found if name in _NUMBERS else "as many as there can be"
            place = place_of(operator, module)
            self._count(place, what)
            self.note(f"assumed {what} {place}")
        return (found,)

    def _count(self, place: str, what: object) -> None:
        """Count what is asked at a place: a loop whose end is a question of values has none.

        Raises:
            UsageError: it was asked too often.
        """
        self._asked[place] += 1
        if self._asked[place] > MOST_ASKED:
            raise UsageError(
                f"{MOST_ASKED} times {what} was assumed {place}: a loop that values end has no end in a "
                "model that is nowhere. Bound how often it goes round, or trace a run instead."
            )

    def values_of(self, tensor: torch.Tensor) -> object:
        """Return what ``tolist()`` returns: ones."""
        line = calling_line()
        self.note(f"assumed that tolist() returns ones{' at ' + line if line else ''}")
        one: object = True if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
        for size in reversed(tensor.shape):
            one = [one] * size
        return one

    def without_masks(
        self, operator: OpOverload, args: tuple[Any, ...], module: str, *, is_noted: bool
    ) -> tuple[Any, ...]:
        """Return what an operator is given, with masks that choose elements as the places of all elements."""
        if operator.name() not in _BY_MASK or not any(_is_mask(each) for each in args[1]):
            return args
        if is_noted:
            self.note(f"assumed all chosen by a mask {place_of(operator, module)}")
        indices: list[torch.Tensor | None] = []
        for each in args[1]:
            if _is_mask(each):
                place = torch.empty((each.numel(),), dtype=torch.int64, device=each.device)
                indices += [place] * each.dim()
            else:
                indices.append(each)
        return (args[0], indices, *args[2:])


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.is_meta and index.dtype in (torch.bool, torch.uint8)


def place_of(operator: OpOverload, module: str) -> str:
    """Return where an operator runs, as a message says it."""
    line = calling_line()
    return f"at {module!r} ({operator.name()}{', ' + line if line else ''})"


def no_answer(operator: OpOverload, module: str, error: Exception) -> Exception:
    """Return what to raise where an operator cannot tell what its result looks like."""
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(operator.tags)
    if not depends and not isinstance(error, NotImplementedError):
        return error
    why = (
        "the size of its result depends on values" if depends else "it has no rule for tensors without values"
    )
    return UsageError(
        f"{operator.name()} cannot be traced {place_of(operator, module)}: {why}, and a model that is "
        "nowhere has none. Give its module a size that does not depend on them, or trace a run instead."
    )
