"""Links of a simulated machine, by seconds that were counted by hand."""

from __future__ import annotations

from tests.planned import machine_of
from tierstore.planning import Machine
from tierstore.planning.simulating.links import MachineLinks, Transit
from tierstore.planning.simulating.queue import EventQueue


def carried(machine: Machine, *copies: tuple[int, int, int]) -> list[tuple[str, float, float]]:
    """Return what becomes of copies (source, target, bytes) that are asked for at once."""
    queue = EventQueue()
    links = MachineLinks(machine, queue)
    found: list[Transit] = []
    for source, target, nbytes in copies:
        links.send(source, target, nbytes, 0.0, found.append)
    while len(queue):
        queue.run_next()
    return [(each.link, round(each.begin_s, 6), round(each.end_s, 6)) for each in found]


def test_one_link_carries_one_copy_after_another_and_latency_holds_up_none() -> None:
    machine = machine_of((1000, 1000), (100.0,), latency_s=0.5)
    assert carried(machine, (1, 0, 100), (1, 0, 200)) == [
        ("host->device", 0.0, 1.5),
        ("host->device", 1.0, 3.5),
    ]


def test_two_directions_go_on_beside_each_other_unless_they_share_a_bus() -> None:
    copies = ((1, 0, 100), (0, 1, 100))
    duplex = carried(machine_of((1000, 1000), (100.0,)), *copies)
    assert [end_s for _, _, end_s in duplex] == [1.0, 1.0]
    shared = carried(machine_of((1000, 1000), (100.0,), is_half_duplex=True), *copies)
    assert [end_s for _, _, end_s in shared] == [1.0, 2.0]


def test_where_no_link_goes_straight_a_copy_takes_those_between() -> None:
    machine = machine_of((1000, 1000, 1000), (100.0, 50.0))
    assert carried(machine, (2, 0, 100)) == [("disk->device", 0.0, 3.0)]


def test_reads_of_a_limited_drive_go_before_writes_that_wait() -> None:
    machine = machine_of((1000, 1000, 1000), (1e9, 100.0), is_half_duplex=True, burst_s=1.0)
    order = [link for link, _, _ in carried(machine, (1, 2, 100), (1, 2, 100), (2, 1, 100))]
    assert order == ["host->disk", "disk->host", "host->disk"]
