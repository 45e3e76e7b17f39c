"""The page in a real browser: what people do with it, and what they see then."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.browser import Browser, browser, chromium
from tests.timelines import GB, timeline
from tierstore.cli.page import MOST_BARS, write_page
from tierstore.planning import Timeline

_LEFT = 190  # pixels of the lanes' names
_HOSTILE = "</script><img src=x onerror=alert(1)><b>{}"


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def opened(tab: Browser, tmp_path: Path) -> Browser:
    return _open(tab, tmp_path, timeline())


def _open(tab: Browser, folder: Path, *timelines: Timeline, most_bars: int = MOST_BARS) -> Browser:
    path = folder / "plan.html"
    page = write_page(
        timelines,
        title="A run",
        rates_bytes_per_s={"host->device": 25 * GB},
        capacities_bytes={"device": 4 * GB},
        most_bars=most_bars,
    )
    path.write_text(page, encoding="utf-8")
    tab.open(path)
    return tab


def _view(tab: Browser) -> dict[str, object]:
    return cast(dict[str, object], tab.evaluate("tierstorePage.view"))


def _span(tab: Browser) -> tuple[float, float]:
    view = _view(tab)
    return cast(float, view["begin_s"]), cast(float, view["end_s"])


def _place(tab: Browser, row: int, share: float) -> tuple[float, float]:
    """Return where in the window the middle of a row is, at a share of the time that is seen."""
    left, top, width = cast(
        list[float],
        tab.evaluate(
            "(() => { const c = document.getElementById('canvas'); c.scrollIntoView();"
            " const b = c.getBoundingClientRect(); return [b.left, b.top, c.clientWidth] })()"
        ),
    )
    rows = cast(list[dict[str, float]], _view(tab)["rows"])
    return left + _LEFT + share * (width - _LEFT), top + rows[row]["top"] + rows[row]["height"] / 2


def _colors(png: bytes) -> set[tuple[int, int, int]]:
    """Return the colours in a PNG of 8 bits a channel that is not interlaced."""
    width, height, depth, kind, *_ = struct.unpack(">IIBBBBB", png[16:29])
    channels = {2: 3, 6: 4}[kind]
    assert depth == 8
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        packed += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    raw, stride = zlib.decompress(packed), width * channels
    above, found = bytearray(stride), set()
    for row in range(height):
        start = row * (stride + 1)
        above = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, channels)
        found |= set(zip(*(above[channel::channels] for channel in range(3)), strict=True))
    return found


def _unfiltered(sort: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    if sort == 2 and not any(line):
        return above
    for i in range(len(line) if sort else 0):
        left = line[i - channels] if i >= channels else 0
        corner = above[i - channels] if i >= channels else 0
        expected = (0, left, above[i], (left + above[i]) // 2, _paeth(left, above[i], corner))[sort]
        line[i] = (line[i] + expected) & 255
    return line


def _paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    return min((left, above, corner), key=lambda each: abs(guess - each))


def test_the_page_asks_for_itself_alone_and_complains_of_nothing(opened: Browser) -> None:
    assert [url.rsplit("/", 1)[1] for url in opened.asked_for() if not url.startswith("data:")] == [
        "plan.html"
    ]
    assert opened.complaints() == []
    assert cast(int, _view(opened)["frames"]) >= 1


def test_all_is_seen_at_first(opened: Browser) -> None:
    assert _span(opened) == pytest.approx((0.0, timeline().steps[-1].end_s))
    assert _view(opened)["lanes"] == ["compute", "host->device", "waiting"]


def test_the_wheel_zooms_to_where_the_pointer_is(opened: Browser) -> None:
    begin_s, end_s = _span(opened)
    x, y = _place(opened, 0, 0.25)
    opened.mouse("Wheel", x, y, deltaX=0, deltaY=-400)
    nearer = _span(opened)
    assert nearer[1] - nearer[0] == pytest.approx((end_s - begin_s) / 2.71828, rel=0.01)
    pointed_s = begin_s + 0.25 * (end_s - begin_s)
    assert nearer[0] + 0.25 * (nearer[1] - nearer[0]) == pytest.approx(pointed_s, rel=0.01)
    opened.mouse("Wheel", x, y, deltaX=0, deltaY=4000)
    assert _span(opened) == pytest.approx((begin_s, end_s))


def test_dragging_moves_what_is_seen(opened: Browser) -> None:
    opened.evaluate("tierstorePage.look(0.1, 0.2)")
    x, y = _place(opened, 0, 0.5)
    to, _ = _place(opened, 0, 0.25)
    opened.mouse("Pressed", x, y, button="left", clickCount=1)
    opened.mouse("Moved", to, y, button="left", buttons=1)
    opened.mouse("Released", to, y, button="left", clickCount=1)
    assert _span(opened) == pytest.approx((0.125, 0.225), rel=0.01)


def test_what_is_marked_is_zoomed_to(opened: Browser) -> None:
    opened.evaluate("tierstorePage.look(0.1, 0.2)")
    x, y = _place(opened, 0, 0.25)
    to, _ = _place(opened, 0, 0.75)
    opened.mouse("Pressed", x, y, button="left", clickCount=1, modifiers=8)
    opened.mouse("Moved", to, y, button="left", buttons=1, modifiers=8)
    opened.mouse("Released", to, y, button="left", clickCount=1, modifiers=8)
    assert _span(opened) == pytest.approx((0.125, 0.175), rel=0.01)


def test_keys_zoom_and_move(opened: Browser) -> None:
    begin_s, end_s = _span(opened)
    opened.evaluate("document.getElementById('canvas').focus()")
    opened.press("+")
    nearer = _span(opened)
    assert nearer[1] - nearer[0] == pytest.approx((end_s - begin_s) / 2)
    opened.press("ArrowRight")
    assert _span(opened)[0] > nearer[0]
    opened.press("]")
    step = timeline().steps[3]
    assert _span(opened) == pytest.approx((step.begin_s, step.end_s))
    opened.press("0")
    assert _span(opened) == pytest.approx((begin_s, end_s))


def test_nobody_can_look_beyond_the_run(opened: Browser) -> None:
    begin_s, end_s = _span(opened)
    opened.evaluate("tierstorePage.look(-5, 5)")
    assert _span(opened) == pytest.approx((begin_s, end_s))
    opened.evaluate("tierstorePage.look(0.1, 0.1)")
    seen = _span(opened)
    assert 0 < seen[1] - seen[0] < 1e-7


def test_the_pointer_names_the_key_below_it(opened: Browser) -> None:
    opened.evaluate("tierstorePage.look(0, 0.01)")
    opened.mouse("Moved", *_place(opened, 1, 0.2))
    text = cast(str, opened.evaluate("document.getElementById('hover').textContent"))
    assert "layers.0.weight" in text
    assert "95.4 MiB" in text
    hovered = cast(dict[str, object], _view(opened)["hovered"])
    assert (hovered["key"], hovered["lane"]) == ("layers.0.weight", "host->device")
    opened.mouse("Moved", *_place(opened, 1, 0.8))  # the link rests in the second half
    assert _view(opened)["hovered"] is None


def test_the_pointer_says_how_much_of_its_capacity_a_link_carries(opened: Browser) -> None:
    opened.evaluate("tierstorePage.look(0, 0.01)")
    rows = cast(list[dict[str, object]], _view(opened)["rows"])
    load = next(number for number, row in enumerate(rows) if row["kind"] == "load")
    opened.mouse("Moved", *_place(opened, load, 0.25))  # 0.1 GB in 5 ms: 20 of 25 GB/s
    assert "80.0 %" in cast(str, opened.evaluate("document.getElementById('hover').textContent"))
    opened.mouse("Moved", *_place(opened, load, 0.75))
    assert "0.0 %" in cast(str, opened.evaluate("document.getElementById('hover').textContent"))


def test_the_pointer_says_who_holds_the_memory(opened: Browser) -> None:
    rows = cast(list[dict[str, object]], _view(opened)["rows"])
    memory = next(number for number, row in enumerate(rows) if row["kind"] == "memory")
    opened.evaluate("tierstorePage.look(0, 0.01)")
    opened.mouse("Moved", *_place(opened, memory, 0.5))
    text = cast(str, opened.evaluate("document.getElementById('hover').textContent"))
    assert "parameters: 953.7 MiB" in text
    assert "activations: 95.4 MiB" in text


def test_a_second_timeline_adds_its_lanes_and_can_be_hidden(tab: Browser, tmp_path: Path) -> None:
    _open(tab, tmp_path, timeline(), timeline("run", "measured", pace_s=0.02))
    lanes = cast(list[str], _view(tab)["lanes"])
    assert lanes[:2] == ["compute · planned (simulated)", "compute · run (measured)"]
    assert len(lanes) == 6
    assert _span(tab)[1] == pytest.approx(timeline(pace_s=0.02).steps[-1].end_s)
    tab.evaluate("document.querySelectorAll('#controls input')[1].click()")
    tab.settle()
    assert len(cast(list[str], _view(tab)["lanes"])) == 3
    assert _span(tab)[1] == pytest.approx(timeline().steps[-1].end_s)


def test_last_steps_can_begin_together(tab: Browser, tmp_path: Path) -> None:
    planned, measured = timeline(), timeline("run", "measured", steps=9)
    _open(tab, tmp_path, planned, measured)
    tab.evaluate("document.querySelectorAll('#controls input')[2].click()")
    tab.settle()
    by_s = planned.steps[-1].begin_s - measured.steps[-1].begin_s
    assert _span(tab) == pytest.approx((by_s, planned.steps[-1].end_s))


def test_what_the_wheel_brings_below_the_pointer_is_named(opened: Browser) -> None:
    x, y = _place(opened, 0, 0.5)
    opened.mouse("Moved", x, y)
    before = cast(dict[str, object], _view(opened)["hovered"])
    opened.mouse("Wheel", x, y, deltaX=800, deltaY=0)  # all is seen: there is nothing to move to
    assert _view(opened)["hovered"] == before
    opened.evaluate("tierstorePage.look(0, 0.04)")
    opened.mouse("Wheel", x, y, deltaX=250, deltaY=0)  # by a quarter of it, one layer
    assert _span(opened) == pytest.approx((0.01, 0.05))
    assert cast(dict[str, object], _view(opened)["hovered"])["name"] == "layers.2"


def test_a_title_that_is_cut_off_is_shown_in_full(tab: Browser, tmp_path: Path) -> None:
    _open(tab, tmp_path, timeline("a name that is much longer than its place"), timeline())
    x, y = _place(tab, 0, 0.0)
    tab.mouse("Moved", x - 20, y)
    assert tab.evaluate("document.getElementById('hover').textContent") == (
        "compute · a name that is much longer than its place (simulated)"
    )


def test_a_joined_bar_says_how_many_it_is(tab: Browser, tmp_path: Path) -> None:
    _open(tab, tmp_path, timeline(layers=1000), most_bars=300)
    tab.mouse("Moved", *_place(tab, 0, 0.5))
    text = cast(str, tab.evaluate("document.getElementById('hover').textContent"))
    assert "40 intervals, the longest: layers." in text
    assert "busy for 400 ms" in text


def test_hostile_names_stay_text(tab: Browser, tmp_path: Path) -> None:
    _open(tab, tmp_path, timeline(key=_HOSTILE), timeline(_HOSTILE, _HOSTILE))
    tab.evaluate("tierstorePage.look(0, 0.01)")
    tab.mouse("Moved", *_place(tab, 2, 0.2))
    assert _HOSTILE.format(0) in cast(str, tab.evaluate("document.getElementById('hover').textContent"))
    assert tab.evaluate("document.querySelectorAll('img, b, script').length") == 2
    assert tab.complaints() == []


def test_a_hundred_thousand_intervals_are_drawn_at_once(tab: Browser, tmp_path: Path) -> None:
    large = timeline(layers=10_000)
    assert len(large.intervals) == 100_000
    _open(tab, tmp_path, large)
    before = cast(int, _view(tab)["frames"])
    tab.evaluate("tierstorePage.look(0, 100)")
    tab.settle()
    view = _view(tab)
    assert cast(int, view["frames"]) > before
    assert cast(float, view["drawn_ms"]) < 2000
    assert tab.complaints() == []


def test_pictures_have_their_colours_in_light_and_in_dark(opened: Browser) -> None:
    rows = cast(list[dict[str, object]], _view(opened)["rows"])
    memory = next(number for number, row in enumerate(rows) if row["kind"] == "memory")
    for scheme, ground, compute, copies, held in (
        ("light", (255, 255, 255), (0x3B, 0x78, 0xC2), (0x1F, 0x9E, 0x9A), (0xD9, 0x53, 0x4F)),
        ("dark", (0x14, 0x18, 0x1D), (0x5B, 0x9B, 0xE6), (0x3F, 0xC1, 0xBC), (0xF0, 0x7B, 0x77)),
    ):
        opened.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        opened.settle()
        seen = [_colors_of_row(opened, number) for number in (0, 1, memory)]
        assert compute in seen[0]
        assert copies in seen[1]
        assert held in seen[2]
        assert ground in seen[1]  # where the link rests
        assert held not in seen[0]
    opened.call("Emulation.setEmulatedMedia", features=[])


def _colors_of_row(tab: Browser, row: int) -> set[tuple[int, int, int]]:
    x, y = _place(tab, row, 0.5)
    rows = cast(list[dict[str, int]], _view(tab)["rows"])
    scrolled = cast(float, tab.evaluate("window.scrollY"))
    return _colors(tab.screenshot(x, y + scrolled - rows[row]["height"] // 2, 120, rows[row]["height"]))


def test_no_lane_is_wider_than_a_narrow_window(opened: Browser) -> None:
    opened.call(
        "Emulation.setDeviceMetricsOverride", width=500, height=800, deviceScaleFactor=2, mobile=False
    )
    opened.settle()
    try:
        assert opened.evaluate("document.getElementById('canvas').clientWidth <= 500")
        assert opened.evaluate("document.getElementById('canvas').width") == 2 * cast(
            int, opened.evaluate("document.getElementById('canvas').clientWidth")
        )
    finally:
        opened.call("Emulation.clearDeviceMetricsOverride")


def test_without_a_browser_tests_are_skipped_and_fail_where_one_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TIERSTORE_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium-headless-shell"):
        chromium()
    monkeypatch.setenv("TIERSTORE_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="TIERSTORE_REQUIRE_BROWSER=1"):
        chromium()
