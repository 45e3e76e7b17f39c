"""The page as a text: what is in it whatever a timeline says, and what is joined loses nothing."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from importlib import resources

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.timelines import GB, timeline
from tierstore.cli.page import write_page
from tierstore.cli.page.binning import bars_of, largest_of
from tierstore.errors import UsageError
from tierstore.planning import Account, Interval, Timeline

_TIMES = st.floats(0, 1e6, allow_nan=False)
_HOSTILE = "</script><script>alert(1)</script><!--\u2028\u2029\ud800&quot;\"'{{data}}"


@st.composite
def _intervals(draw: st.DrawFn) -> list[Interval]:
    spans = draw(st.lists(st.tuples(_TIMES, _TIMES, st.integers(0, 2**62)), max_size=60))
    return [Interval(b, b + s, "compute", f"m{n}", nbytes=size) for n, (b, s, size) in enumerate(spans)]


class _Reader(HTMLParser):
    """Keeps the elements of a page, and the text of its last script of each type."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.cells: list[str] = []
        self._type: str | None = None
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within = tag
        self.elements.append((tag, dict(attrs)))
        self._type = dict(attrs).get("type")

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts[self._type] = self.scripts.get(self._type, "") + data
        elif self._within in ("th", "td", "caption"):
            self.cells.append(data)


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    return reader


def _hostile() -> Timeline:
    one = timeline(key=_HOSTILE + "{}", layers=3)
    return Timeline(_HOSTILE, _HOSTILE, one.intervals, one.steps, one.account, one.charges, one.held)


@given(intervals=_intervals(), most=st.integers(1, 20))
def test_bars_are_few_and_lose_no_byte_no_second_and_no_interval(
    intervals: list[Interval], most: int
) -> None:
    bars = bars_of(intervals, most)
    assert len(bars) <= most
    assert sum(bar.nbytes for bar in bars) == sum(each.nbytes for each in intervals)
    assert sum(bar.count for bar in bars) == len(intervals)
    busy_s = math.fsum(each.end_s - each.begin_s for each in intervals)
    assert math.isclose(math.fsum(bar.busy_s for bar in bars), busy_s, abs_tol=1e-6)


@given(intervals=_intervals(), most=st.integers(1, 20))
@example(intervals=[Interval(0, 10, "compute", "long"), Interval(1, 2, "compute", "short")], most=1)
def test_bars_are_in_order_and_cover_their_intervals(intervals: list[Interval], most: int) -> None:
    bars = bars_of(intervals, most)
    assert [bar.begin_s for bar in bars] == sorted(bar.begin_s for bar in bars)
    for each in intervals:
        assert any(bar.begin_s <= each.begin_s and each.end_s <= bar.end_s for bar in bars)


@given(intervals=_intervals())
def test_as_many_intervals_as_may_be_stay_what_they_are(intervals: list[Interval]) -> None:
    bars = bars_of(intervals, len(intervals))
    assert {id(bar.longest) for bar in bars} == {id(each) for each in intervals}


@given(
    changes=st.lists(st.tuples(_TIMES, st.integers(0, 2**40)), min_size=1, max_size=60).map(sorted),
    most=st.integers(2, 10),
)
def test_fewer_changes_keep_the_peak_the_order_and_the_last(
    changes: list[tuple[float, int]], most: int
) -> None:
    kept = largest_of(changes, most, lambda each: each[0], lambda each: each[1])
    assert len(kept) <= max(2, most)
    assert max(size for _, size in kept) == max(size for _, size in changes)
    assert [at_s for at_s, _ in kept] == sorted(at_s for at_s, _ in kept)
    assert kept[-1] == changes[-1]


def test_data_comes_back_as_it_went_in() -> None:
    data = json.loads(_read(write_page([timeline()], title="run")).scripts["application/json"])
    lanes = {lane["name"]: lane for lane in data["timelines"][0]["lanes"]}
    assert list(lanes) == ["compute", "host->device", "waiting"]
    assert sum(lanes["host->device"]["nbytes"]) == 40 * GB // 10
    assert "nbytes" not in lanes["compute"]
    assert data["timelines"][0]["names"][lanes["waiting"]["cause"][0]] == "copy up"


def test_names_that_look_like_markup_stay_text() -> None:
    reader = _read(write_page([_hostile(), timeline()], title=_HOSTILE, capacities_bytes={_HOSTILE: 1}))
    plain = _read(write_page([timeline(layers=3), timeline()], title="plain"))
    assert [tag for tag, _ in reader.elements].count("script") == 2
    assert [tag for tag, _ in reader.elements if tag != "tr"][:12] == [
        tag for tag, _ in plain.elements if tag != "tr"
    ][:12]
    names = json.loads(reader.scripts["application/json"])["timelines"][0]["names"]
    assert f"{_HOSTILE}0" in names


@given(
    names=st.lists(st.text(st.characters(), max_size=12), min_size=1, max_size=6),
    title=st.text(st.characters(), max_size=12),
)
def test_any_names_come_back(names: list[str], title: str) -> None:
    intervals = tuple(Interval(n, n + 1, name, name, key=name) for n, name in enumerate(names))
    one = Timeline(title, title, intervals, (), Account(0.0, 0, {}, tuple((name, 1) for name in names)))
    page = write_page([one], title=title)
    page.encode("utf-8")
    text = page.split('id="tierstore">')[1].split("</script>")[0]
    found = json.loads(text)["timelines"][0]
    assert [lane["name"] for lane in found["lanes"]] == list(dict.fromkeys(names))
    assert found["names"] == [None, *dict.fromkeys(names)]


def test_a_hostile_page_is_utf_8_and_has_no_line_separator_and_no_end_of_an_element_in_its_data() -> None:
    page = write_page([_hostile()], title="run")
    page.encode("utf-8")
    text = page.split('id="tierstore">')[1].split("</script>")[0]
    assert "<" not in text
    assert text.isascii()


def test_a_page_names_nothing_to_be_fetched() -> None:
    page = write_page([timeline()], title="run")
    for _, attributes in _read(page).elements:
        for name in ("src", "href", "action", "srcset"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "default-src 'none'" in page
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page


def test_the_script_and_the_style_end_no_element() -> None:
    for name in ("page.js", "page.css"):
        assert "</" not in resources.files("tierstore.cli.page").joinpath(name).read_text(encoding="utf-8")


def test_tables_say_totals_of_both_and_their_ratio() -> None:
    pair = [timeline("planned"), timeline("run", "measured", pace_s=0.020)]
    cells = _read(write_page(pair, title="run", bound_s=0.05)).cells
    row = cells.index("seconds of a step")
    assert cells[row + 1 : row + 4] == ["105 ms", "210 ms", "2.000"]
    assert cells[cells.index("no placement is faster than") + 1] == "50 ms"
    assert "moved host->device" in cells
    for kind in ("parameters", "gradients", "state", "activations", "workspace"):
        assert kind in cells


def test_every_cell_of_a_row_has_a_heading() -> None:
    page = write_page([timeline(), timeline()], title="run")
    for table in page.split("<table>")[1:]:
        body = table.split("</table>")[0]
        columns = body.count('scope="col"')
        assert "<caption>" in body
        for row in body.split("<tbody>")[1].split("<tr>")[1:]:
            assert row.count('scope="row"') == 1
            assert row.count("<td>") == columns - 1


def test_more_intervals_than_a_page_takes_are_joined() -> None:
    data = json.loads(
        _read(write_page([timeline(layers=500)], title="run", most_bars=300)).scripts["application/json"]
    )
    lanes = data["timelines"][0]["lanes"]
    assert sum(len(lane["begin"]) for lane in lanes) <= 300
    assert sum(sum(lane["count"]) for lane in lanes) == len(timeline(layers=500).intervals)


def test_a_run_of_no_step_has_a_page() -> None:
    cells = _read(write_page([Timeline("none", "measured", (), (), Account(0.0, 0, {}))], title="run")).cells
    assert cells[cells.index("seconds of a step") + 1] == "–"  # noqa: RUF001


@pytest.mark.parametrize(
    ("begin_s", "end_s", "said"),
    [(math.nan, 1.0, "nan"), (0.0, math.inf, "inf"), (2.0, 1.0, "before it begins at 2.0 s")],
)
def test_a_time_that_cannot_be_drawn_is_named(begin_s: float, end_s: float, said: str) -> None:
    wrong = Timeline("w", "measured", (Interval(begin_s, end_s, "compute", "fc"),), (), Account(0.0, 0, {}))
    with pytest.raises(UsageError, match=f"fc in lane compute.*{said}"):
        write_page([wrong], title="run")


def test_no_timeline_is_no_page() -> None:
    with pytest.raises(UsageError, match="at least one timeline"):
        write_page([], title="run")
