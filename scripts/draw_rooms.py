"""Draw the rooms of the library from its imports: ``docs/explanation/rooms.svg``.

A room is a package or a module that stands directly in one of the packages drawn. Rules of the picture:

1. The rows of a package are the layers of its contract in ``pyproject.toml``. A room that the contract
   leaves free stands as high as the rooms that import it let it.
2. Every arrow points down. An import that would not is an error here, unless the contracts ignore it.
3. An arrow is a direct import between two rooms, and is left out where other arrows lead there already.
4. A line bends only between rows, so that it never runs behind a room.
5. Nothing but the sources is looked at: the same sources give the same bytes.

Order and places are found as is usual for layered graphs (Sugiyama, Tagawa and Toda, 1981): the bends of long
arrows are spots in rows like rooms, rows are sorted by the mean of their neighbours, and spots draw each
other near.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "explanation" / "rooms.svg"

_SOURCES = (ROOT, ROOT / "backends")
_WIDTH_PX, _MARGIN_PX, _TITLE_PX, _HEAD_PX = 1600, 14, 64, 7
_ROOM_APART_PX, _BEND_APART_PX, _PORT_APART_PX, _PORT_INSET_PX = 20, 11, 11, 14
_BENDS_WEIGH = 6.0  # long arrows are straight before rooms are near each other
_ROUNDS = 24, 60  # of sorting and of placing: more change nothing that the eye sees
_SAYS_PX = 11
# A line that is cut does not end with these.
# fmt: off
_LITTLE_WORDS = (
    "a", "an", "and", "any", "are", "as", "at", "before", "by", "can", "for", "from", "how", "in", "into",
    "is", "it", "its", "may", "of", "on", "one", "or", "public", "that", "the", "their", "to", "was",
    "what", "when", "where", "which", "whose", "with",
)
# fmt: on

Imports = Mapping[str, Iterable[str]]
Row = tuple[str, ...]


# ------------------------------------------------------------------------------------ the imports


@dataclass(frozen=True)
class Sources:
    """The imports of the library, and what its contracts say of them.

    Attributes:
        graph: who imports what, without the imports that the contracts ignore.
        layers: for each package with a contract of layers, its rooms by rows, highest first.
    """

    graph: grimp.ImportGraph
    layers: Mapping[str, tuple[Row, ...]]

    @classmethod
    def read(cls) -> Sources:
        """Read ``pyproject.toml`` and every module that its contracts are about."""
        with (ROOT / "pyproject.toml").open("rb") as file:
            linter = tomllib.load(file)["tool"]["importlinter"]
        graph = grimp.build_graph(*linter["root_packages"], cache_dir=None)
        layers: dict[str, tuple[Row, ...]] = {}
        for contract in linter["contracts"]:
            for ignored in contract.get("ignore_imports", ()):
                importer, imported = ignored.split(" -> ")
                if graph.direct_import_exists(importer=importer, imported=imported):
                    graph.remove_import(importer=importer, imported=imported)
            if contract["type"] == "layers":
                names = [re.split(r"\s*[|:]\s*", layer) for layer in contract["layers"]]
                for package in contract["containers"]:
                    layers[package] = tuple(tuple(f"{package}.{name}" for name in row) for row in names)
        return cls(graph, layers)

    def imports(self, package: str) -> dict[str, set[str]]:
        """Return what each room of ``package`` imports from its other rooms directly."""
        rooms = sorted(self.graph.find_children(package))
        found: dict[str, set[str]] = {room: set() for room in rooms}
        for one, other in itertools.permutations(rooms, 2):
            if self.graph.direct_import_exists(importer=one, imported=other, as_packages=True):
                found[one].add(other)
        return found

    def is_package(self, name: str) -> bool:
        """Say whether ``name`` has modules of its own."""
        return bool(self.graph.find_children(name))


def first_sentence(module: str) -> str:
    """Return what the docstring of ``module`` begins with, without its full stop and quotes of code."""
    parts = Path(*module.split("."))
    places = (root / path for root in _SOURCES for path in (parts.with_suffix(".py"), parts / "__init__.py"))
    source = next(path for path in places if path.is_file()).read_text(encoding="utf-8")
    paragraph = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.replace("`", "").split()))[0]
    return sentence.removesuffix(".")


def without_detours(imports: Imports) -> dict[str, list[str]]:
    """Return ``imports`` without those that others lead to already (the transitive reduction)."""

    def beyond(room: str) -> set[str]:
        return {far for near in imports[room] for far in {near, *beyond(near)}}

    return {
        room: sorted(set(direct) - {far for near in direct for far in beyond(near)})
        for room, direct in imports.items()
    }


def in_rows(imports: Imports, layers: Sequence[Row]) -> list[list[str]]:
    """Return the rooms in rows, each as high as those that import it let it, and a layer's rooms in one row.

    Raises:
        graphlib.CycleError: an import leads up, or along a layer.
    """
    row_of = {room: (room,) for room in imports} | {room: layer for layer in layers for room in layer}
    above: dict[Row, set[Row]] = {row: set() for row in row_of.values()}
    for higher, lower in itertools.pairwise(layers):
        above[lower].add(higher)
    for room, imported in imports.items():
        for each in imported:
            above[row_of[each]].add(row_of[room])
    depth: dict[Row, int] = {}
    for row in graphlib.TopologicalSorter(above).static_order():
        depth[row] = max((depth[higher] + 1 for higher in above[row]), default=0)
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for room in sorted(imports):
        rows[depth[row_of[room]]].append(room)
    return [row for row in rows if row]


# ------------------------------------------------------------------------------------ the places


@dataclass(frozen=True)
class Spot:
    """What takes a place in a row: a room, or the bend of an arrow that passes."""

    row: int
    name: str
    is_bend: bool = False


@dataclass(frozen=True)
class Arrow:
    """An import: the spots from the importer to the imported, and the place in each row."""

    spots: tuple[Spot, ...]
    xs: tuple[float, ...]

    def steps(self) -> Iterator[tuple[int, float, float]]:
        """Yield each row that is left, with the places in it and in the next."""
        for spot, (x, next_x) in zip(self.spots, itertools.pairwise(self.xs), strict=False):
            yield spot.row, x, next_x


def _spread(
    wanted: Sequence[float],
    apart: Sequence[float],
    between: tuple[float, float],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Return places as near to ``wanted`` as they can be, in its order, ``apart`` from each other.

    Least squares by pooling adjacent violators; ``apart[n]`` is the least distance of ``n`` and ``n + 1``.

    Raises:
        ValueError: so much does not fit in between.
    """
    offsets = list(itertools.accumulate(apart, initial=0.0))
    low, high = between[0], between[1] - offsets[-1]
    if low > high + 0.01:
        raise ValueError(f"{len(wanted)} rooms and arrows side by side need {low - high:.0f} px more")
    pools: list[tuple[float, float, int]] = []  # the mean, what it weighs, how many share it
    for place, offset, weight in zip(wanted, offsets, weights or [1.0] * len(wanted), strict=True):
        mean, weighs, count = place - offset, weight, 1
        while pools and pools[-1][0] > mean:
            other, other_weighs, other_count = pools.pop()
            mean = (mean * weighs + other * other_weighs) / (weighs + other_weighs)
            weighs, count = weighs + other_weighs, count + other_count
        pools.append((mean, weighs, count))
    means = itertools.chain.from_iterable([mean] * count for mean, _, count in pools)
    return [_within(mean, (low, high)) + offset for mean, offset in zip(means, offsets, strict=True)]


def _within(x: float, between: tuple[float, float]) -> float:
    return max(between[0], min(between[1], x))


class Grid:
    """Rooms and bends in rows: first their order, then their places from left to right.

    Args:
        rows: the rooms, highest row first.
        arrows: what each room points to, in lower rows.
        widths_px: how wide each room is.
        width_px: how wide all of it may be.
    """

    def __init__(
        self, rows: Sequence[Sequence[str]], arrows: Imports, widths_px: Mapping[str, float], width_px: float
    ) -> None:
        self._widths_px, self._width_px = widths_px, width_px
        self.rows = [[Spot(number, name) for name in row] for number, row in enumerate(rows)]
        self._at = {spot.name: spot for row in self.rows for spot in row}
        self.chains = [self._chain(self._at[a], self._at[b]) for a in sorted(arrows) for b in arrows[a]]
        self._above: dict[Spot, list[Spot]] = {spot: [] for row in self.rows for spot in row}
        self._below: dict[Spot, list[Spot]] = {spot: [] for row in self.rows for spot in row}
        for upper, lower in itertools.chain.from_iterable(map(itertools.pairwise, self.chains)):
            self._below[upper].append(lower)
            self._above[lower].append(upper)
        self._sort()
        self.x: dict[Spot, float] = {}
        self._place()

    def _chain(self, start: Spot, end: Spot) -> tuple[Spot, ...]:
        """Return an arrow's spots, and put its bends into the rows that it passes."""
        bends = [Spot(row, f"{start.name} {end.name}", is_bend=True) for row in range(start.row + 1, end.row)]
        for bend in bends:
            self.rows[bend.row].append(bend)
        return (start, *bends, end)

    # -- order

    def _crossings(self, number: int) -> int:
        """Count the crossings between a row and the one below it."""
        if not 0 <= number < len(self.rows) - 1:
            return 0
        place = {spot: n for n, spot in enumerate(self.rows[number + 1])}
        ends = [sorted(place[end] for end in self._below[spot]) for spot in self.rows[number]]
        return sum(
            right < left for one, other in itertools.combinations(ends, 2) for left in one for right in other
        )

    def _sort(self) -> None:
        best, fewest = [list(row) for row in self.rows], math.inf
        for turn in range(_ROUNDS[0]):
            self._sweep(is_down=turn % 2 == 0)
            while self._switch():
                pass
            crossings = sum(map(self._crossings, range(len(self.rows))))
            if crossings < fewest:
                best, fewest = [list(row) for row in self.rows], crossings
        self.rows = best

    def _sweep(self, *, is_down: bool) -> None:
        """Sort each row by the mean place of its neighbours in the row before."""
        near = self._above if is_down else self._below
        place: dict[Spot, float] = {}
        for row in self.rows if is_down else reversed(self.rows):
            for n, spot in enumerate(row):
                known = [place[other] for other in near[spot]]
                place[spot] = math.fsum(known) / len(known) if known else n / len(row)
            row.sort(key=lambda spot: (place[spot], spot.name))
            place |= {spot: (n + 0.5) / len(row) for n, spot in enumerate(row)}

    def _switch(self) -> bool:
        """Exchange neighbours where that saves crossings; say whether any did."""
        has_switched = False
        for number, row in enumerate(self.rows):
            for n in range(len(row) - 1):
                before = self._crossings(number - 1) + self._crossings(number)
                row[n], row[n + 1] = row[n + 1], row[n]
                if self._crossings(number - 1) + self._crossings(number) < before:
                    has_switched = True
                else:
                    row[n], row[n + 1] = row[n + 1], row[n]
        return has_switched

    # -- places

    def half_px(self, spot: Spot) -> float:
        """Return how far a spot reaches to each side."""
        return 0.0 if spot.is_bend else self._widths_px[spot.name] / 2

    def _apart_px(self, one: Spot, other: Spot) -> float:
        apart = _BEND_APART_PX if one.is_bend or other.is_bend else _ROOM_APART_PX
        return self.half_px(one) + apart + self.half_px(other)

    def _settle(self, row: Sequence[Spot], wanted: Sequence[float]) -> None:
        apart = [self._apart_px(*pair) for pair in itertools.pairwise(row)]
        between = (self.half_px(row[0]), self._width_px - self.half_px(row[-1]))
        weights = [_BENDS_WEIGH if spot.is_bend else 1.0 for spot in row]
        self.x |= zip(row, _spread(wanted, apart, between, weights), strict=True)

    def _wanted(self, spot: Spot) -> float:
        near = [*self._above[spot], *self._below[spot]]
        if not near:
            return self.x[spot]
        weights = [_BENDS_WEIGH if spot.is_bend and other.is_bend else 1.0 for other in near]
        pulls = (self.x[other] * weight for other, weight in zip(near, weights, strict=True))
        return math.fsum(pulls) / math.fsum(weights)

    def _place(self) -> None:
        for row in self.rows:
            self._settle(row, [self._width_px * (n + 0.5) / len(row) for n in range(len(row))])
        for _ in range(_ROUNDS[1]):
            for row in itertools.chain(self.rows, reversed(self.rows)):
                self._settle(row, [self._wanted(spot) for spot in row])
        for chain in self.chains * 3:
            self._straighten(chain)
        left = min(self.x[row[0]] - self.half_px(row[0]) for row in self.rows)
        right = max(self.x[row[-1]] + self.half_px(row[-1]) for row in self.rows)
        self.x = {spot: x + (self._width_px - left - right) / 2 for spot, x in self.x.items()}

    def _straighten(self, chain: Sequence[Spot]) -> None:
        """Give the bends of an arrow one place, or few: as many of them as there is a common place for."""
        bends = list(chain[1:-1])
        while bends:
            low, high, run = -math.inf, math.inf, list[Spot]()
            for bend in bends:
                left, right = self._free(bend)
                if max(low, left) > min(high, right):
                    break
                low, high = max(low, left), min(high, right)
                run.append(bend)
            x = math.fsum(self.x[bend] for bend in run) / len(run)
            for end in (chain[0], chain[-1]):
                x = _within(x, self._reach(end))
            self.x |= dict.fromkeys(run, _within(x, (low, high)))
            bends = bends[len(run) :]

    def _free(self, spot: Spot) -> tuple[float, float]:
        """Return from where to where a spot may move between its neighbours in the row."""
        row = self.rows[spot.row]
        n = row.index(spot)
        left = self.x[row[n - 1]] + self._apart_px(row[n - 1], spot) if n else 0.0
        right = self.x[row[n + 1]] - self._apart_px(spot, row[n + 1]) if n + 1 < len(row) else self._width_px
        return min(left, self.x[spot]), max(right, self.x[spot])

    def _reach(self, spot: Spot) -> tuple[float, float]:
        """Return from where to where arrows may touch a spot."""
        half = max(0.0, self.half_px(spot) - _PORT_INSET_PX)
        return self.x[spot] - half, self.x[spot] + half

    # -- arrows

    def arrows(self) -> list[Arrow]:
        """Return the arrows, upright where the rooms at their ends allow it."""
        out = self._ports(self._below, {})
        into = self._ports(self._above, {(end, start): x for (start, end), x in out.items()})
        bends = {chain: [self.x[bend] for bend in chain[1:-1]] for chain in self.chains}
        return [Arrow(c, (out[c[0], c[1]], *bends[c], into[c[-1], c[-2]])) for c in self.chains]

    def _ports(
        self, near: Mapping[Spot, Sequence[Spot]], met: Mapping[tuple[Spot, Spot], float]
    ) -> dict[tuple[Spot, Spot], float]:
        """Return where arrows touch rooms on one side: by room and neighbour."""
        ports: dict[tuple[Spot, Spot], float] = {}
        for spot in filter(near.get, self._at.values()):
            wanted = {
                other: met.get((spot, other), _within(self.x[spot], self._reach(other)))
                for other in near[spot]
            }
            others = sorted(wanted, key=lambda other: (wanted[other], self.x[other], other.name))
            left, right = self._reach(spot)
            apart = min(_PORT_APART_PX, (right - left) / len(others))
            places = _spread([wanted[each] for each in others], [apart] * (len(others) - 1), (left, right))
            ports |= {(spot, other): x for other, x in zip(others, places, strict=True)}
        return ports


# ------------------------------------------------------------------------------------ the picture


def _text_px(text: str) -> float:
    """Return about how wide a line is in a wide sans-serif font, so that it fits in the others."""
    ems = dict.fromkeys("ijl.,:;'|!", 0.33) | dict.fromkeys("frt ()[]-/", 0.41) | dict.fromkeys("mwMW", 0.97)
    return _SAYS_PX * math.fsum(ems.get(letter, 0.72 if letter.isupper() else 0.605) for letter in text)


def _wrapped(text: str, width_px: float) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if _text_px(longer) <= width_px:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def shortened(sentence: str, lines: int, width_px: float) -> list[str]:
    """Return ``sentence`` in at most so many lines: whole, up to a colon, or up to a word of some weight."""
    words = sentence.split()
    longest: list[str] = []
    for count in range(len(words), 0, -1):
        is_whole = count == len(words) or (count > 3 and words[count - 1][-1] in ":;")
        if not is_whole and (longest or words[count - 1] in _LITTLE_WORDS):
            continue
        text = " ".join(words[:count]).rstrip(":;,") + ("" if is_whole else " \N{HORIZONTAL ELLIPSIS}")
        wrapped = _wrapped(text, width_px)
        if len(wrapped) <= lines and max(map(_text_px, wrapped)) <= width_px:
            if is_whole:
                return wrapped
            longest = wrapped
    return longest


@dataclass(frozen=True)
class Colours:
    """How the rooms of a band are filled and framed."""

    package: str
    module: str
    frame: str


# One band of the picture each.
_BANDS = {
    "tierstore": Colours("#d6e6fb", "#f3f8ff", "#5b84b8"),
    "tierstore.training": Colours("#d5eed9", "#f2faf3", "#559466"),
    "tierstore_backends.files": Colours("#fbe3c8", "#fff7ee", "#b98344"),
}
_INKS = ("#3b4a5c", "#8a4b2a", "#2f6f6a", "#6a4a8c", "#8c3a55", "#5d6b1f")  # tell arrows apart, no more


@dataclass(frozen=True)
class Look:
    """How big a room is: a box with a line or two, or a bar inside another room."""

    width_px: float
    height_px: float
    gap_px: float
    name_y: float
    says_at: tuple[float, float]
    says_lines: int


_BOX = Look(width_px=184, height_px=54, gap_px=28, name_y=19, says_at=(10, 34), says_lines=2)
_BAR = Look(width_px=450, height_px=24, gap_px=14, name_y=16, says_at=(128, 16), says_lines=1)
_ROOMS_SHARE = 0.87  # of the fullest row's width; the rest is for arrows that pass
_SLANT_PX = 2.0  # of height, for each line between two rows that is not upright
_STRIPE_PX = 5  # a row's background reaches so far beyond its rooms
_OPENED_PX, _OPENED_HEAD_PX = 520, 48  # a room that shows what is in it, and its name


@dataclass(frozen=True)
class Drawing:
    """Lines of SVG, and the space that they take."""

    width_px: float
    height_px: float
    lines: tuple[str, ...]

    def at(self, x: float, y: float) -> Iterator[str]:
        """Yield the lines, moved."""
        yield f'<g transform="translate({x:.1f} {y:.1f})">'
        yield from self.lines
        yield "</g>"


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _box(width_px: float, height_px: float, fill: str, frame: str) -> str:
    return f'<rect width="{width_px:g}" height="{height_px:g}" rx="5" fill="{fill}" stroke="{frame}"/>'


def _room(sources: Sources, module: str, look: Look, colours: Colours) -> Drawing:
    """Draw one room; what is in it is drawn as well where a contract gives it layers and no band shows it."""
    is_opened = module in sources.layers and module not in _BANDS
    inside = _rooms(sources, module, _BAR, _OPENED_PX, colours) if is_opened else None
    width = inside.width_px if inside else look.width_px
    height = inside.height_px + _OPENED_HEAD_PX + _MARGIN_PX if inside else look.height_px
    own = _BANDS.get(module, colours)
    sentence, (x, y) = first_sentence(module), look.says_at
    says = shortened(sentence, 1 if inside else look.says_lines, width - x - 8)
    lines = [
        f'<g id="{module}">',
        f"<title>{module}: {escape(sentence)}</title>",
        _box(width, height, own.package if sources.is_package(module) else own.module, own.frame),
        _text(10, look.name_y, "name", module.rsplit(".", 1)[1]),
        *(_text(x, y + 13 * n, "says", line) for n, line in enumerate(says)),
        *(inside.at(0, _OPENED_HEAD_PX) if inside else ()),
        "</g>",
    ]
    return Drawing(width, height, tuple(lines))


def _rooms(sources: Sources, package: str, look: Look, width_px: float, colours: Colours) -> Drawing:
    """Draw the rooms of ``package`` in rows, and the arrows between them."""
    imports = sources.imports(package)
    rows = in_rows(imports, sources.layers[package])
    look = replace(look, width_px=min(look.width_px, _ROOMS_SHARE * width_px // max(map(len, rows))))
    rooms = {name: _room(sources, name, look, colours) for name in imports}
    widths = {name: room.width_px for name, room in rooms.items()}
    grid = Grid(rows, without_detours(imports), widths, width_px)
    arrows = grid.arrows()
    levels = _levels([max(rooms[name].height_px for name in row) for row in rows], look.gap_px, arrows)
    lines = [_stripe(level, width_px) for level in levels if package in _BANDS]
    tops = {
        name: (top + bottom - rooms[name].height_px) / 2
        for row, (top, bottom) in zip(rows, levels, strict=True)
        for name in row
    }
    for n, arrow in enumerate(arrows):
        start, end = arrow.spots[0].name, arrow.spots[-1].name
        lines += _line(
            arrow, levels, (tops[start] + rooms[start].height_px, tops[end]), _INKS[n % len(_INKS)]
        )
    for spot, x in grid.x.items():
        if not spot.is_bend:
            lines += rooms[spot.name].at(x - grid.half_px(spot), tops[spot.name])
    return Drawing(width_px, levels[-1][1], tuple(lines))


def _levels(heights_px: Sequence[float], gap_px: float, arrows: Iterable[Arrow]) -> list[tuple[float, float]]:
    """Return the top and the bottom of each row, with more between them where more lines are slanted."""
    slanted = Counter(row for arrow in arrows for row, x, next_x in arrow.steps() if abs(x - next_x) > 1)
    levels: list[tuple[float, float]] = []
    top = 0.0
    for row, height in enumerate(heights_px):
        levels.append((top, top + height))
        top += height + gap_px + _SLANT_PX * slanted[row]
    return levels


def _stripe(level: tuple[float, float], width_px: float) -> str:
    top, height = level[0] - _STRIPE_PX, level[1] - level[0] + 2 * _STRIPE_PX
    return f'<rect y="{top:g}" width="{width_px:g}" height="{height:g}" class="row"/>'


def _line(
    arrow: Arrow, levels: Sequence[tuple[float, float]], ends: tuple[float, float], ink: str
) -> Iterator[str]:
    """Yield a line that passes rows upright and bends between them, and its head."""
    path = f"M{arrow.xs[0]:.1f} {ends[0]:.1f}"
    for row, x, next_x in arrow.steps():
        upper, lower = levels[row][1], levels[row + 1][0] - _HEAD_PX
        middle = (upper + lower) / 2
        if abs(x - next_x) > 0.05:
            path += f"V{upper:.1f}C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {lower:.1f}"
    neck = ends[1] - _HEAD_PX
    yield f'<path d="{path}V{neck:.1f}" stroke="{ink}" class="line"/>'
    yield f'<path d="M{arrow.xs[-1] - 3.5:.1f} {neck:.1f}h7l-3.5 {_HEAD_PX}z" fill="{ink}"/>'


_STYLE = f"""<style>
text {{ font-family: "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1c2733; }}
.title {{ font-size: 19px; font-weight: bold; }}
.name {{ font-size: 13px; font-weight: bold; }}
.says, .key {{ font-size: {_SAYS_PX}px; fill: #465362; }}
.key {{ text-anchor: middle; }}
.subtitle {{ font-size: 12.5px; fill: #465362; }}
.row {{ fill: #f4f5f7; }}
.line {{ fill: none; stroke-width: 1.2; }}
</style>"""


def _key(colours: Colours) -> Drawing:
    """Draw what the shades and the arrow mean."""
    lines: list[str] = []
    for n, (fill, text) in enumerate([(colours.package, "a package"), (colours.module, "a module")]):
        box = (_box(76, 24, fill, colours.frame), _text(38, 16, "key", text))
        lines += Drawing(76, 24, box).at(86 * n, 0)
    lines += (
        f'<path d="M186 0V{24 - _HEAD_PX}" stroke="{_INKS[0]}" class="line"/>',
        f'<path d="M182.5 {24 - _HEAD_PX}h7l-3.5 {_HEAD_PX}z" fill="{_INKS[0]}"/>',
        _text(218, 16, "key", "imports"),
    )
    return Drawing(240, 24, tuple(lines))


def draw() -> str:
    """Return the picture as SVG, from the imports as they are."""
    sources = Sources.read()
    key = _key(next(iter(_BANDS.values())))
    lines = [*key.at(_WIDTH_PX - _MARGIN_PX - key.width_px, 24)]
    y = _MARGIN_PX
    for package, colours in _BANDS.items():
        rooms = _rooms(sources, package, _BOX, _WIDTH_PX - 2 * _MARGIN_PX, colours)
        lines += (
            _text(_MARGIN_PX, y + 22, "title", package),
            _text(_MARGIN_PX, y + 42, "subtitle", first_sentence(package)),
            *rooms.at(_MARGIN_PX, y + _TITLE_PX),
        )
        y += math.ceil(_TITLE_PX + rooms.height_px + 3 * _MARGIN_PX)
    size = f'width="{_WIDTH_PX}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH_PX} {y}">'
    return "\n".join([head, _STYLE, f'<rect {size} fill="#ffffff"/>', *lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
