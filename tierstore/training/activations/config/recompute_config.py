r"""``recompute_config``: which layers and operators are computed again in backward.

Rule 1: a configuration that exists is valid; one `ConfigError` lists every fault.
Rule 2: without swap, a number counts layers of a pipeline stage, from its first; with swap on, a number *is*
a layer (`tierstore.training.activations.config.tables`).
Rule 3: a whole layer needs no operators.  What is excluded is taken out last, of whole layers too; a selected
operator whose pattern equals an exclusion's (`Pattern.equals`) is not selected anywhere.  With swap on
nothing is excluded.

What the reference implementation does by accident is not copied: tuples are accepted wherever lists are, the
user's lists are never changed, and tables hold plain ints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tierstore.config import checks
from tierstore.config.checks import Check, Faults
from tierstore.errors import ConfigError
from tierstore.training.activations.config import tables
from tierstore.training.activations.config.geometry import Geometry, Offset, Table, lay_out
from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.config.tables import Selection, Value

OPERATORS = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
"""What ``select_recompute`` selects if it names nothing."""

COMMUNICATION = (r".*\.norm",)
"""What ``select_comm_recompute`` selects if it names nothing."""

_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "select_recompute": OPERATORS,
    "select_comm_recompute": COMMUNICATION,
    "select_recompute_exclude": (),
    "select_comm_recompute_exclude": (),
}

_EXCLUDED_FROM = {
    "select_recompute": "select_recompute_exclude",
    "select_comm_recompute": "select_comm_recompute_exclude",
}


@dataclass(frozen=True, slots=True)
class LayerRecompute:
    """What of one layer is computed again.

    Attributes:
        layer_id: its number.
        is_whole: all of it; then no operators are selected.
        slice_activation: whether ``recompute_slice_activation`` goes with that (only if ``recompute`` is
            true for all layers).
        operators: patterns of operators that are computed again.
        comm: patterns of operators whose communication is done again.
        exclude: patterns of operators that are kept after all, of a whole layer too.
        comm_exclude: patterns of operators whose communication is not done again.
    """

    layer_id: int
    is_whole: bool = False
    slice_activation: bool = False
    operators: tuple[Pattern, ...] = ()
    comm: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()
    comm_exclude: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class RecomputeConfig:
    """What is computed again in backward instead of being kept.

    Args:
        recompute: whole layers.
        select_recompute: operators of layers.
        select_comm_recompute: communication next to operators of layers.
        parallel_optimizer_comm_recompute: whether parameters gathered by a parallel optimizer are gathered
            again.
        mp_comm_recompute: whether communication of tensor parallelism is done again.
        recompute_slice_activation: whether what a recomputed layer keeps is sliced over ranks.
        select_recompute_exclude: operators that are kept after all.
        select_comm_recompute_exclude: operators whose communication is not done again after all.
        swap: whether swap is on: numbers are then layers.  Not a key of ``recompute_config``.

    Raises:
        ConfigError: lists every fault.
    """

    recompute: Value = False
    select_recompute: Selection = field(default=False, hash=False)
    select_comm_recompute: Selection = field(default=False, hash=False)
    parallel_optimizer_comm_recompute: bool = False
    mp_comm_recompute: bool = True
    recompute_slice_activation: bool = False
    select_recompute_exclude: Selection = field(default=False, hash=False)
    select_comm_recompute_exclude: Selection = field(default=False, hash=False)
    swap: bool = False

    def __post_init__(self) -> None:
        faults = Faults("RecomputeConfig")
        kept = faults.checked(vars(self), _checks(self.swap is True) | {"swap": checks.flag})
        faults.raise_if_any()
        for key, value in kept.items():
            object.__setattr__(self, key, value)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], *, swap: bool = False) -> RecomputeConfig:
        """Read what stands under ``recompute_config``; the mapping is not changed.

        Args:
            mapping: of keys to values.
            swap: whether swap is on (`SwapConfig.swap`): numbers are then layers, not counts.

        Raises:
            ConfigError: lists every fault, unknown keys among them.
        """
        return cls.from_keys(mapping, Faults("RecomputeConfig"), swap=swap)

    @classmethod
    def from_keys(cls, mapping: object, faults: Faults, *, swap: bool) -> RecomputeConfig:
        """As `from_mapping`; what is wrong is added to ``faults``, which are raised."""
        known = _checks(swap)
        given = require_keys(mapping, known, faults)
        defaults = {key: value for key, value in vars(cls()).items() if key in known}
        kept = faults.checked(defaults | given, known)
        faults.raise_if_any()
        return cls(**cast("dict[str, Any]", kept), swap=swap)

    def with_swap(self, *, on: bool) -> RecomputeConfig:
        """Return the same configuration, its numbers read as they are when swap is on, or off.

        Raises:
            ConfigError: a value is not accepted then.
        """
        return self if self.swap == on else replace(self, swap=on)

    def tables(
        self,
        num_layers: int,
        pipeline_stage: int = 1,
        pp_interleave_num: int = 1,
        offset: Offset = 0,
    ) -> dict[str, object]:
        """Return the normalised tables: lists of plain ints, rows being interleaves, columns stages.

        ``recompute`` is a table; ``select_recompute`` and ``select_comm_recompute``, and the two
        exclusions if given, are dicts of pattern to table.  With swap on, a list of layers or true stands
        for a table, except in exclusions.

        Args:
            num_layers: of the model.
            pipeline_stage: how many stages there are.
            pp_interleave_num: how many interleaves there are.
            offset: as `lay_out` takes it.

        Raises:
            ConfigError: the layers cannot be laid out so, or a list is longer than there are stages.
        """
        return self.tables_on(lay_out(num_layers, pipeline_stage, pp_interleave_num, offset))

    def tables_on(self, geometry: Geometry) -> dict[str, object]:
        """As `tables`, for layers that are laid out already."""
        faults = Faults("RecomputeConfig")
        found: dict[str, object] = {}
        try:
            found["recompute"] = self._normal(self.recompute, geometry)
        except ConfigError as fault:
            faults.add("recompute", self.recompute, str(fault))
        for key in _DEFAULTS:
            given: Selection = getattr(self, key)
            if key in _EXCLUDED_FROM or given is not False:
                try:
                    found[key] = self._normal_each(key, given, geometry)
                except ConfigError as fault:
                    faults.add(key, given, str(fault))
        faults.raise_if_any()
        if not self.swap:
            for key, exclusion in _EXCLUDED_FROM.items():
                found[key] = _without(found[key], found.get(exclusion, {}))
        return found

    def decide(
        self,
        layer_id: int,
        num_layers: int,
        pipeline_stage: int = 1,
        pp_interleave_num: int = 1,
        offset: Offset = 0,
    ) -> LayerRecompute:
        """Return what of a layer is computed again.  For all layers, `decide_all` is quicker.

        Raises:
            ConfigError: as `tables`.
            IndexError: there is no such layer.
        """
        geometry = lay_out(num_layers, pipeline_stage, pp_interleave_num, offset)
        geometry.cell_of(layer_id)
        return self.decide_all(geometry)[layer_id]

    def decide_all(self, geometry: Geometry) -> tuple[LayerRecompute, ...]:
        """Return what of each layer is computed again."""
        found = self.tables_on(geometry)
        return tuple(self._decide(layer_id, found, geometry) for layer_id in range(geometry.num_layers))

    def _decide(self, layer_id: int, found: Mapping[str, object], geometry: Geometry) -> LayerRecompute:
        is_whole = _covers(found["recompute"], layer_id, geometry)

        def selected(key: str) -> tuple[Pattern, ...]:
            each = found.get(key, {})
            assert isinstance(each, dict)
            return tuple(Pattern(text) for text, table in each.items() if _covers(table, layer_id, geometry))

        return LayerRecompute(
            layer_id,
            is_whole,
            slice_activation=self.recompute is True and self.recompute_slice_activation,
            operators=() if is_whole else selected("select_recompute"),
            comm=() if is_whole else selected("select_comm_recompute"),
            exclude=() if self.swap else selected("select_recompute_exclude"),
            comm_exclude=() if self.swap else selected("select_comm_recompute_exclude"),
        )

    def _normal(self, value: Value, geometry: Geometry) -> bool | list[int] | Table:
        return tables.indices_of(value) if self.swap else tables.table_of(value, geometry)

    def _normal_each(self, key: str, given: Selection, geometry: Geometry) -> dict[str, object]:
        """Return a table for each pattern."""
        values = _by_text(given, _DEFAULTS[key])
        if key in _EXCLUDED_FROM:
            return {text: self._normal(value, geometry) for text, value in values.items()}
        return {text: tables.table_of(value, geometry) for text, value in values.items()}


def require_keys(mapping: object, known: Mapping[str, object], faults: Faults) -> dict[str, object]:
    """Return a mapping's known keys with their values; note the others.

    Raises:
        ConfigError: it is no mapping.
    """
    if not isinstance(mapping, Mapping):
        faults.add("the configuration", mapping, "accepted: a mapping of keys to values")
        faults.raise_if_any()
        return {}
    for key, value in mapping.items():
        if key not in known:
            faults.add_unknown(key, value, tuple(known))
    return {key: value for key, value in mapping.items() if key in known}


def _checks(swap: bool) -> dict[str, Check]:
    """Return the check of each key."""
    value = tables.by_index if swap else tables.by_stage
    return {
        "recompute": value,
        "select_recompute": tables.selection(value),
        "select_comm_recompute": tables.selection(value),
        "parallel_optimizer_comm_recompute": checks.flag,
        "mp_comm_recompute": checks.flag,
        "recompute_slice_activation": checks.flag,
        "select_recompute_exclude": tables.selection(tables.by_stage),
        "select_comm_recompute_exclude": tables.selection(tables.by_stage),
    }


def _by_text(given: Selection, defaults: tuple[str, ...]) -> dict[str, Value]:
    """Return a value for each pattern's text."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, bool) and given and isinstance(given[0], str):
        return dict.fromkeys(given, True)
    return dict.fromkeys(defaults, cast("Value", given))


def _without(selected: object, excluded: object) -> dict[str, object]:
    """Return the tables of patterns that no exclusion which excludes something equals."""
    assert isinstance(selected, dict)
    assert isinstance(excluded, dict)
    out = [Pattern(text) for text, table in excluded.items() if any(map(any, table))]
    return {
        text: table
        for text, table in selected.items()
        if not any(Pattern(text).equals(pattern) for pattern in out)
    }


def _covers(table: object, layer_id: int, geometry: Geometry) -> bool:
    """Say whether a table, a list of layers, or true means a layer."""
    if isinstance(table, bool):
        return table
    assert isinstance(table, list)
    if table and isinstance(table[0], list):
        return geometry.covers(table, layer_id)
    return layer_id in table
