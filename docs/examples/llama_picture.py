"""The picture of a run of `train_llama`, as SVG: what fits where, the losses, the device's memory.

Written by hand, as the same record has to give the same bytes everywhere.  Draw one again with::

    python docs/examples/llama_picture.py docs/examples/pictures/train_llama.json picture.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from llama_record import RunRecord, TierRecord, read_record

_MIB = 1024**2
_WIDTH, _HEIGHT = 960, 330
_TOP, _BOTTOM = 78, 270
_INK, _PALE, _OURS, _BUDGET = "#1f2933", "#7b8794", "#00798c", "#d1495b"
_PLAIN = "#f2b134"
_STATE = (("parameters", 1, "#00798c"), ("gradients", 1, "#66a5ad"), ("AdamW's moments", 2, "#c4dfe6"))
_TIERS = {"device": _BUDGET, "host": "#edae49", "disk": "#66a182"}


def draw(record: RunRecord) -> str:
    """Return the picture of a record."""
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="{_INK}" role="img">',
        f"<title>{escape(_summary(record))}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
        _text(20, 28, _summary(record), "font-size='14' font-weight='600'"),
        *_fits(record, 20, 320),
        *_losses(record, 385, 640),
        *_memory(record, 705, 940),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write_picture(record: RunRecord, path: Path) -> None:
    """Write a record's picture; one that there was before is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(record), encoding="utf-8")


def _summary(record: RunRecord) -> str:
    times = record.state_bytes / record.budget_bytes
    begin = f"{record.model[:1].upper()}{record.model[1:]} trains on a device of"
    return f"{begin} {_size(record.budget_bytes)}: {times:.1f} times less than it needs"


# ---------------------------------------------------------------------- what fits where


def _fits(record: RunRecord, left: float, right: float) -> Iterator[str]:
    yield _text(left, 58, "what fits where", "font-weight='600'")
    scale = (right - left) / max(record.state_bytes, *(tier.peak_bytes for tier in record.tiers))
    yield _text(left, _TOP + 8, f"needed: {_size(record.state_bytes)}")
    x, unit = left, record.state_bytes / sum(share for _, share, _ in _STATE)
    for _, share, colour in _STATE:
        width = share * unit * scale
        yield _rect(x, _TOP + 14, width, 20, colour)
        x += width
    yield _text(left, _TOP + 47, ", ".join(name for name, *_ in _STATE), f"font-size='10' fill='{_PALE}'")
    for number, tier in enumerate(record.tiers):
        yield from _tier(tier, left, _TOP + 78 + number * 42, scale, right)


def _tier(tier: TierRecord, left: float, top: float, scale: float, right: float) -> Iterator[str]:
    said = f"{tier.name}: {_size(tier.peak_bytes)} at most, of {_size(tier.quota_bytes)}"
    yield _text(left, top - 5, said)
    colour = _TIERS.get(tier.name, _PALE)
    quota = min(right - left, tier.quota_bytes * scale)
    yield _rect(left, top, quota, 16, "none", f' stroke="{colour}"')
    yield _rect(left, top, tier.peak_bytes * scale, 16, colour)


# ---------------------------------------------------------------------- losses, memory


def _losses(record: RunRecord, left: float, right: float) -> Iterator[str]:
    both = [*record.offloaded, *record.unlimited]
    least, most = min(both), max(both)
    yield _text(left, 58, "loss, step by step", "font-weight='600'")
    yield from _axes(left, right, f"{most:.2f}", f"{least:.2f}", len(record.offloaded))
    for losses, style in (
        (record.unlimited, f"stroke='{_PLAIN}' stroke-width='7' stroke-linecap='round'"),
        (record.offloaded, f"stroke='{_OURS}' stroke-width='2'"),
    ):
        points = [
            (_along(left, right, step, len(losses) - 1), _down(loss - least, most - least))
            for step, loss in enumerate(losses)
        ]
        yield _line(points, style)
    equal = "equal, bit for bit" if record.is_equal else "DIFFERENT"
    yield _key(left, _PLAIN, "plain PyTorch, all the memory it likes")
    yield _key(left, _OURS, f"with tierstore: {equal}", row=1)


def _memory(record: RunRecord, left: float, right: float) -> Iterator[str]:
    steps, most = len(record.offloaded), record.budget_bytes * 1.15
    yield _text(left, 58, "memory on the device", "font-weight='600'")
    yield from _axes(left, right, "", "0", steps)
    points = [(_along(left, right, at, steps), _down(nbytes, most)) for at, nbytes in record.memory]
    if points:
        area = [(points[0][0], float(_BOTTOM)), *points, (points[-1][0], float(_BOTTOM))]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in area)
        yield f'<polygon points="{shape}" fill="{_OURS}" fill-opacity="0.15"/>'
        yield _line(points, f"stroke='{_OURS}' stroke-width='1.2'")
    budget = _down(record.budget_bytes, most)
    yield _line(
        [(left, budget), (right, budget)], f"stroke='{_BUDGET}' stroke-width='2' stroke-dasharray='6 4'"
    )
    yield _text(left + 4, budget - 6, f"budget {_size(record.budget_bytes)}", f"fill='{_BUDGET}'")
    yield _key(left, _OURS, f"with tierstore: {_size(record.peak_bytes)} at most")
    if record.ended_by is not None:
        yield _key(left, _BUDGET, "without: out of memory", row=1)


def _axes(left: float, right: float, high: str, low: str, steps: int) -> Iterator[str]:
    yield _line([(left, _TOP), (left, _BOTTOM), (right, _BOTTOM)], f"stroke='{_PALE}'")
    for y, said in ((_TOP + 4, high), (_BOTTOM, low)):
        yield _text(left - 5, y, said, f"text-anchor='end' font-size='10' fill='{_PALE}'")
    yield _text(right, _BOTTOM + 14, f"{steps} steps", f"text-anchor='end' font-size='10' fill='{_PALE}'")


def _key(left: float, colour: str, said: str, row: int = 0) -> str:
    y = _BOTTOM + 32 + 17 * row
    return _rect(left, y - 8, 14, 5, colour) + _text(left + 20, y, said)


def _along(left: float, right: float, at: float, whole: float) -> float:
    return left + (right - left) * at / max(whole, 1)


def _down(value: float, whole: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * value / (whole or 1)


# ---------------------------------------------------------------------- shapes


def _text(x: float, y: float, said: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(said)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str, style: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"{style}/>'


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{shape}" fill="none" {style}/>'


def _size(nbytes: float) -> str:
    return f"{nbytes / _MIB:,.0f} MiB"


if __name__ == "__main__":
    write_picture(read_record(Path(sys.argv[1])), Path(sys.argv[2]))
