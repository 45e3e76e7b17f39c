"""Which layers are in which cell: pipeline stages by interleaves, pure arithmetic.

A *cell* (i, j) is what stage j has in interleave i; a *table* has a number for each, rows being
interleaves.  Layers are numbered along interleave 0 over all stages, then along interleave 1, and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.config.checks import Faults, positive_int, whole
from tierstore.errors import ConfigError

_MOST_CELLS = 2**16  # a table has an entry for each

Table = list[list[int]]
Offset = int | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many layers each cell has.  Made by `lay_out`.

    Attributes:
        layers: of each cell, a row an interleave.
    """

    layers: tuple[tuple[int, ...], ...]

    @property
    def interleaves(self) -> int:
        """How many rows a table has."""
        return len(self.layers)

    @property
    def stages(self) -> int:
        """How many columns a table has."""
        return len(self.layers[0])

    @property
    def num_layers(self) -> int:
        """How many layers there are in all cells."""
        return sum(map(sum, self.layers))

    @property
    def ends(self) -> Table:
        """For each cell the number behind its last layer."""
        sums = list(itertools.accumulate(itertools.chain(*self.layers)))
        return [sums[row : row + self.stages] for row in range(0, len(sums), self.stages)]

    @property
    def starts(self) -> Table:
        """For each cell the number of its first layer."""
        ends = zip(self.ends, self.layers, strict=True)
        return [[end - count for end, count in zip(*rows, strict=True)] for rows in ends]

    def cell_of(self, layer_id: int) -> tuple[int, int]:
        """Return the interleave and the stage of a layer.

        Raises:
            IndexError: there is no such layer.
        """
        if layer_id >= 0:
            for i, row in enumerate(self.ends):
                for j, end in enumerate(row):
                    if layer_id < end:
                        return i, j
        raise IndexError(f"layer {layer_id}: there are {self.num_layers}")

    def covers(self, table: Sequence[Sequence[int]], layer_id: int) -> bool:
        """Say whether a layer is among the first of its cell that a table counts."""
        i, j = self.cell_of(layer_id)
        return layer_id - self.starts[i][j] < table[i][j]


def lay_out(
    num_layers: int, pipeline_stage: int = 1, pp_interleave_num: int = 1, offset: Offset = 0
) -> Geometry:
    """Spread layers over cells evenly, and add the offset.

    Args:
        num_layers: of the model.
        pipeline_stage: how many stages there are.
        pp_interleave_num: how many interleaves there are.
        offset: what a cell has more than the even share: an int for all, a list with one a stage, or
            a list of those, one an interleave.

    Raises:
        ConfigError: a count is not greater than 0, the offset has another shape, its sum is not what
            the even shares leave, or a cell would have less than no layer.
    """
    faults = Faults("layers in stages")
    given = {
        "num_layers": num_layers,
        "pipeline_stage": pipeline_stage,
        "pp_interleave_num": pp_interleave_num,
    }
    faults.checked(given, dict.fromkeys(given, positive_int))
    faults.raise_if_any()
    try:
        return Geometry(_layers(int(num_layers), int(pipeline_stage), int(pp_interleave_num), offset))
    except ConfigError as fault:
        faults.add("offset", offset, str(fault))
        faults.raise_if_any()
        raise


def _layers(num_layers: int, stages: int, interleaves: int, offset: object) -> tuple[tuple[int, ...], ...]:
    if stages * interleaves > _MOST_CELLS:
        raise ConfigError(f"{stages} stages and {interleaves} interleaves are more than {_MOST_CELLS} cells")
    share, rest = divmod(num_layers, stages * interleaves)
    rows = _broadcast(offset, stages, interleaves)
    total = sum(map(sum, rows))
    if total != rest:
        raise ConfigError(
            f"its sum over {stages} stages and {interleaves} interleaves is {total}; accepted: a sum of "
            f"{rest}, what {num_layers} layers leave when each cell has {share}"
        )
    if any(share + each < 0 for row in rows for each in row):
        raise ConfigError(
            f"accepted: at least {-share}, because a cell has {share} layers before it is added"
        )
    return tuple(tuple(share + each for each in row) for row in rows)


def _broadcast(offset: object, stages: int, interleaves: int) -> list[list[int]]:
    """Return an offset for each cell."""
    if _is_int(offset):
        return [[_int(offset)] * stages for _ in range(interleaves)]
    accepted = ConfigError(
        f"accepted: an int, a list of {stages} ints (one a stage), or {interleaves} of those "
        "(one an interleave)"
    )
    if not isinstance(offset, list | tuple):
        raise accepted
    rows = [offset] * interleaves if all(map(_is_int, offset)) else list(offset)
    if len(rows) != interleaves:
        raise accepted
    for row in rows:
        if not isinstance(row, list | tuple) or len(row) != stages or not all(map(_is_int, row)):
            raise accepted
    return [[_int(each) for each in row] for row in rows]


def _is_int(value: object) -> bool:
    return whole(value) is not None


def _int(value: object) -> int:
    number = whole(value)
    assert number is not None
    return number
