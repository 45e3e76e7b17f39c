"""Where pages are, against dicts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.tables.page_map import NOWHERE, Logged, PageMap
from tierstore.tables.page_numbers import MOST_DENSE

_sizes = st.sampled_from([1, 50, MOST_DENSE, MOST_DENSE + 1, 2**40])


@settings(max_examples=30)
@given(st.data(), st.lists(_sizes, min_size=1, max_size=3).map(sorted))
def test_a_map_says_what_it_was_told(data: st.DataObject, sizes: list[int]) -> None:
    page_map = PageMap(sizes[0])
    frames, logged = dict[int, int](), dict[int, tuple[int, int]]()
    for size in sizes:
        page_map.grow(size)
        near = st.integers(0, min(size, 40) - 1) | st.integers(0, size - 1)
        for _ in range(data.draw(st.integers(0, 4))):
            pages = data.draw(st.lists(near, unique=True, max_size=8))
            values = data.draw(st.lists(st.integers(0, 2**31 - 2), min_size=len(pages), max_size=len(pages)))
            match data.draw(st.sampled_from(["frames", "nowhere", "log"])):
                case "frames":
                    page_map.set_frames(np.array(pages, dtype=np.int64), np.array(values, dtype=np.int64))
                    frames.update(zip(pages, values, strict=True))
                case "nowhere":
                    page_map.set_frames(np.array(pages, dtype=np.int64), NOWHERE)
                    frames.update(dict.fromkeys(pages, NOWHERE))
                case "log":
                    places, checks = np.array(values, dtype=np.int64) << 20, np.array(values, dtype=np.uint32)
                    page_map.set_logged(Logged(np.array(pages, dtype=np.int64), places, checks))
                    logged.update({p: (v << 20, v) for p, v in zip(pages, values, strict=True)})
        asked = [*frames, *logged, *data.draw(st.lists(near, max_size=8))]
        every = np.array(asked, dtype=np.int64)
        assert page_map.frames_of(every).tolist() == [frames.get(page, -1) for page in asked]
        assert page_map.places_of(every).tolist() == [logged.get(page, (-1, 0))[0] for page in asked]
        told = page_map.logged()
        assert told.pages.tolist() == sorted(logged)
        assert list(zip(told.places.tolist(), told.checks.tolist(), strict=True)) == [
            logged[page] for page in sorted(logged)
        ]
        assert page_map.checks_of(told.pages).tolist() == told.checks.tolist()
