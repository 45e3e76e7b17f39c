r"""``swap_config``: which activations leave the device between forward and backward.

Rule 1: a configuration that exists is valid; one `ConfigError` lists every fault.
Rule 2: nothing is swapped unless ``swap`` is true.
Rule 3: if neither ``layer_swap`` nor ``op_swap`` is given, every layer's ``.*\.flash_attention`` is swapped
``default_prefetch`` ahead.  An empty list is given.
Rule 4: of the marks of a layer, or of one operator's name, the first that has the layer counts.
Rule 5: marks with one for all layers have to agree on the prefetch, and become that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tierstore.config import checks
from tierstore.config.checks import Check, Faults
from tierstore.errors import ConfigError
from tierstore.quoting import listed
from tierstore.training.activations.config.patterns import Pattern, pattern_text
from tierstore.training.activations.config.recompute_config import require_keys
from tierstore.training.activations.config.tables import is_index

DEFAULT_OPERATOR = r".*\.flash_attention"
"""What is swapped if nothing is named."""

_LAYERS = "accepted: a list of the layers' indices, such as [0, 3]; or true for all, false for none"
_PREFETCH = "accepted: an int of at least 1"


@dataclass(frozen=True, slots=True)
class Mark:
    """Which layers are swapped, and how far ahead of their use they come back.

    Attributes:
        backward_prefetch: in nodes of the backward graph, at least 1.
        layers: their indices; true: all; false: none.
    """

    backward_prefetch: int
    layers: bool | tuple[int, ...]

    def covers(self, layer_id: int) -> bool:
        """Say whether it is for a layer."""
        return self.layers if isinstance(self.layers, bool) else layer_id in self.layers

    def to_mapping(self) -> dict[str, object]:
        """Return it as an entry of a configuration."""
        layers = self.layers if self.layers is True else list(self.layers or ())
        return {"backward_prefetch": self.backward_prefetch, "layers": layers}


@dataclass(frozen=True, slots=True)
class LayerSwap:
    """What of one layer is swapped.

    Attributes:
        layer_id: its number.
        prefetch: of the whole layer; ``None``: it is not marked as a whole.
        operators: patterns of its operators with their prefetch, in the configuration's order; where
            several match an operator, the last counts.
    """

    layer_id: int
    prefetch: int | None = None
    operators: tuple[tuple[Pattern, int], ...] = ()


@dataclass(frozen=True)
class SwapConfig:
    """What is swapped.

    Args:
        swap: whether anything is.
        default_prefetch: how far ahead what is swapped by default comes back; used only if
            ``layer_swap`` and ``op_swap`` are ``None``, checked only if swap is on.
        layer_swap: whole layers: entries (or one) with ``layers`` and ``backward_prefetch``.  Kept as
            `Mark` each.
        op_swap: operators of layers: entries (or one) that also have ``op_name``, a pattern or a list of
            them.  Kept as each name's marks.

    Raises:
        ConfigError: lists every fault.
    """

    swap: bool = False
    default_prefetch: int = 1
    layer_swap: Sequence[Mark] | None = field(default=None, hash=False)
    op_swap: Mapping[str, Sequence[Mark]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        faults = Faults("SwapConfig")
        kept = _judge(vars(self), faults)
        faults.raise_if_any()
        for key, value in kept.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> SwapConfig:
        """Read what stands under ``swap_config``; the mapping is not changed.

        Raises:
            ConfigError: lists every fault, unknown keys among them.
        """
        return cls.from_keys(mapping, Faults("SwapConfig"))

    @classmethod
    def from_keys(cls, mapping: object, faults: Faults) -> SwapConfig:
        """As `from_mapping`; what is wrong is added to ``faults``, which are raised."""
        defaults = vars(cls())
        kept = _judge(defaults | require_keys(mapping, defaults, faults), faults)
        faults.raise_if_any()
        return cls(**cast("dict[str, Any]", kept))

    @property
    def layer_marks(self) -> tuple[Mark, ...]:
        """Marks of whole layers; none if swap is off."""
        return tuple(self.layer_swap or ()) if self.swap else ()

    @property
    def operator_marks(self) -> dict[str, tuple[Mark, ...]]:
        """Marks of each operator's pattern, the default among them; none if swap is off."""
        if not self.swap:
            return {}
        if self.layer_swap is None and self.op_swap is None:
            return {DEFAULT_OPERATOR: (Mark(self.default_prefetch, layers=True),)}
        return {text: tuple(marks) for text, marks in (self.op_swap or {}).items()}

    def decide(self, layer_id: int) -> LayerSwap:
        """Return what of a layer is swapped."""
        found = ((Pattern(text), _first(marks, layer_id)) for text, marks in self.operator_marks.items())
        operators = tuple((pattern, prefetch) for pattern, prefetch in found if prefetch is not None)
        return LayerSwap(layer_id, _first(self.layer_marks, layer_id), operators)


def _first(marks: Iterable[Mark], layer_id: int) -> int | None:
    """Return the prefetch of the first mark for a layer."""
    return next((mark.backward_prefetch for mark in marks if mark.covers(layer_id)), None)


def _judge(values: Mapping[str, object], faults: Faults) -> dict[str, object]:
    """Check every key; return what passed."""
    check = _prefetch if values["swap"] is True else _int
    known: dict[str, Check] = {
        "swap": checks.flag,
        "default_prefetch": check,
        "layer_swap": checks.optional(_layer_swap),
        "op_swap": checks.optional(_op_swap),
    }
    return faults.checked(values, known)


def _layer_swap(value: object) -> tuple[Mark, ...]:
    marks = [mark for mark, _ in _marks(value, {"layers": _layers, "backward_prefetch": _prefetch})]
    return _collapsed(marks, "layer_swap")


def _op_swap(value: object) -> dict[str, tuple[Mark, ...]]:
    """Return the marks of each operator, in the order in which they are named first."""
    if _is_kept(value):
        assert isinstance(value, Mapping)
        return {pattern_text(text): _collapsed(marks, f"'{text}'") for text, marks in value.items()}
    marks: dict[str, list[Mark]] = {}
    known: dict[str, Check] = {"op_name": _names, "layers": _layers, "backward_prefetch": _prefetch}
    for mark, names in _marks(value, known):
        for text in names:
            marks.setdefault(text, []).append(mark)
    return {text: _collapsed(each, f"'{text}'") for text, each in marks.items()}


def _is_kept(value: object) -> bool:
    """Say whether these are marks by operator already."""
    return isinstance(value, Mapping) and all(
        isinstance(marks, list | tuple) and all(isinstance(mark, Mark) for mark in marks)
        for marks in value.values()
    )


def _entries(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list | tuple):
        return value
    raise ConfigError("accepted: a list of mappings, or one mapping")


def _marks(value: object, known: Mapping[str, Check]) -> list[tuple[Mark, Sequence[str]]]:
    """Return what each entry marks, and the operators that it names.

    Raises:
        ConfigError: lists the faults of every entry.
    """
    found, wrong = [], []
    for number, entry in enumerate(_entries(value)):
        try:
            found.append(_mark(entry, known, number))
        except ConfigError as fault:
            wrong.append(str(fault))
    if wrong:
        raise ConfigError(listed(wrong, show=str, separator="\n  "))
    return found


def _mark(entry: object, known: Mapping[str, Check], number: int) -> tuple[Mark, Sequence[str]]:
    """Return what an entry marks, and the operators that it names."""
    if isinstance(entry, Mark) and "op_name" not in known:
        return entry, ()
    if not isinstance(entry, Mapping):
        raise ConfigError(f"entry {number}: accepted: a mapping with {', '.join(known)}")
    faults = Faults(f"entry {number}")
    given = require_keys(entry, known, faults)
    for key in known:
        if key not in given:
            faults.add(key, None, "missing; every entry has to give it")
    kept = cast("dict[str, Any]", faults.checked(given, {key: known[key] for key in known if key in given}))
    faults.raise_if_any()
    names = kept.pop("op_name", ())
    return Mark(**kept), names


def _names(value: object) -> tuple[str, ...]:
    """Accept a pattern, or a list of them."""
    names = value if isinstance(value, list | tuple) and value else [value]
    try:
        return tuple(map(pattern_text, names))
    except ConfigError as fault:
        raise ConfigError(f"{fault}; or a list of those") from fault


def _layers(value: object) -> bool | tuple[int, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(map(is_index, value)):
        return tuple(map(int, value))
    raise ConfigError(_LAYERS)


def _prefetch(value: object) -> int:
    try:
        return checks.positive_int(value)
    except ConfigError:
        raise ConfigError(_PREFETCH) from None


def _int(value: object) -> int:
    number = checks.whole(value)
    if number is None:
        raise ConfigError(_PREFETCH)
    return number


def _collapsed(marks: Sequence[Mark], what: str) -> tuple[Mark, ...]:
    """Return one mark for all layers if any is.

    Raises:
        ConfigError: then they do not agree.
    """
    if not any(mark.layers is True for mark in marks):
        return tuple(marks)
    ahead = list(dict.fromkeys(mark.backward_prefetch for mark in marks))
    if len(ahead) > 1:
        raise ConfigError(
            f"{what} has an entry for all layers, and entries with backward_prefetch "
            f"{listed(ahead, separator=' and ')}; accepted: the same in each, or layers instead of true"
        )
    return (Mark(ahead[0], layers=True),)
