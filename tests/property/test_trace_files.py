"""Any timeline is read back exactly from its trace; a damaged one is refused or read."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.damaged import damaged
from tests.fuzz import see_that_it_is_short
from tests.planning_data import timelines
from tierstore.errors import ConfigError
from tierstore.planning.chrome import timeline_from_chrome, timeline_to_chrome, trace_from_chrome
from tierstore.planning.timeline import Timeline


@given(timelines(), st.none() | st.integers(0, 2**62))
def test_a_timeline_is_read_back_exactly(timeline: Timeline, base_time_ns: int | None) -> None:
    found = trace_from_chrome(timeline_to_chrome(timeline, base_time_ns=base_time_ns))
    assert (found.timeline, found.base_time_ns) == (timeline, base_time_ns)


@given(timelines())
def test_every_interval_is_a_slice_in_the_lane_of_its_name(timeline: Timeline) -> None:
    events = json.loads(timeline_to_chrome(timeline))["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    slices = [(lanes[each["tid"]], each["name"], each["ts"]) for each in events if each["ph"] == "X"]
    told = [(each.lane, each.name, round(each.begin_s * 1e6, 3)) for each in timeline.intervals]
    assert slices == told


@given(timelines(), st.data())
def test_a_damaged_trace_is_refused_with_a_short_message_or_read(
    timeline: Timeline, data: st.DataObject
) -> None:
    document = json.loads(timeline_to_chrome(timeline))
    del document["traceEvents"]
    try:
        timeline_from_chrome(json.dumps(damaged(document, data)))
    except ConfigError as refused:
        see_that_it_is_short(refused)
