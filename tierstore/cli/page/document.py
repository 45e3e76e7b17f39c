"""The page as a text: a template, its style and its script, and the data between them."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources

from tierstore.cli.page.drawn import drawn
from tierstore.cli.page.tables import KIND_TITLES, account_table, assumptions_list, steps_table, totals_table
from tierstore.errors import UsageError
from tierstore.planning import Timeline

PAGE_VERSION = 1

MOST_BARS = 200_000
"""How many bars a page has at most, if it has not thousands of lanes: about 12 MB."""

_PLACE = re.compile(r"\{\{([a-z]+)\}\}")


def write_page(
    timelines: Sequence[Timeline],
    *,
    title: str,
    bound_s: float | None = None,
    rates_bytes_per_s: Mapping[str, float] | None = None,
    capacities_bytes: Mapping[str, int] | None = None,
    most_bars: int = MOST_BARS,
) -> str:
    """Return one HTML page that shows timelines and needs nothing else.

    Args:
        timelines: one, or several to be laid over each other: the first is what the others are compared with.
        title: of the page; any text.
        bound_s: seconds of a step that no placement is faster than; ``None``: not known.
        rates_bytes_per_s: by link's name, what it can carry: its load is drawn as a share of that.  Without
            it, of the most that it carried.
        capacities_bytes: by tier, the first tier first, drawn as a line above what it holds.
        most_bars: intervals beyond that many, in all lanes together, are joined.

    Returns:
        The text; write it as UTF-8.

    Raises:
        UsageError: there is no timeline, or one has a time that is no finite number.
    """
    if not timelines:
        raise UsageError("a page shows at least one timeline; none was given")
    data = {
        "version": PAGE_VERSION,
        "timelines": drawn(timelines, most_bars),
        "kinds": {kind.value: name for kind, name in KIND_TITLES.items()},
        "rates": {link: rate for link, rate in (rates_bytes_per_s or {}).items() if math.isfinite(rate)},
        "capacities": dict(capacities_bytes or {}),
    }
    tables = [totals_table(timelines, bound_s), account_table(timelines), steps_table(timelines)]
    contents = {
        "title": html.escape(title),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "tables": "\n".join(tables) + assumptions_list(timelines),
        "data": _as_data(data),
    }
    page = _PLACE.sub(lambda place: contents[place[1]], _file("page.html"))
    return page.encode("utf-8", "backslashreplace").decode("utf-8")  # halves of surrogate pairs are no UTF-8


def _as_data(value: object) -> str:
    """Return JSON that ends no element of HTML, whatever is in it, and is one line to every reader.

    All but ASCII is escaped, so that U+2028 and halves of surrogate pairs are, too.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _file(name: str) -> str:
    return resources.files("tierstore.cli.page").joinpath(name).read_text(encoding="utf-8")
