"""What survives: which replicas a commit names, and how long their bytes stay."""

from __future__ import annotations

import pytest

from tests.unit.test_ledger import DEVICE, DISK, HOST, Desk
from tests.unit.test_ledger_waiting import durable_desk, flush
from tierstore.core import messages as m
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Tier
from tierstore.errors import BackendError, CapacityError, LeaseError, StoreClosed, UsageError

ARCHIVE = 3


def named(desk: Desk) -> dict[str, int]:
    """Return what the commit under way leaves: the keys and the numbers of their replicas."""
    (command,) = desk.commits
    former = {key: replica.place.replica for key, replica in desk.ledger.commits.committed.items()}
    named = former | {granted.key: granted.place.replica for granted in command.replicas}
    return {key: number for key, number in named.items() if key not in command.gone}


def flush_keys(desk: Desk, *keys: str) -> int:
    number = desk.next()
    desk.tell(m.FlushRequested(number, keys))
    return number


def write(desk: Desk, key: str, tier: int = HOST) -> None:
    """Change a key's bytes in place."""
    number = desk.lease(key, tier, m.Access.WRITE)
    desk.run()
    desk.tell(m.LeaseReleased(number, written=True))
    desk.run()


def flushed_desk() -> Desk:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    flush(desk)
    desk.run()
    return desk


def disk_bytes(desk: Desk) -> tuple[int, int]:
    tier_state = desk.ledger.books.tier_states[DISK]
    return tier_state.charged_bytes, tier_state.retained_bytes


def test_a_commit_speaks_of_what_changed_and_of_what_failed_ones_spoke_of() -> None:
    desk = durable_desk()
    for number in range(5):
        desk.store(f"k{number}", 1, HOST)
    flush(desk)
    desk.run()
    desk.store("new", 1, HOST)
    desk.tell(m.DropRequested(["k0"]))
    flush(desk)
    desk.finish()
    assert ([each.key for each in desk.commits[0].replicas], desk.commits[0].gone) == (["new"], ["k0"])
    desk.end_commit(BackendError("the disk is gone"))
    desk.store("other", 1, HOST)
    flush_keys(desk, "other")
    desk.finish()
    spoken = {each.key for each in desk.commits[0].replicas} | set(desk.commits[0].gone)
    assert spoken >= {"new", "k0", "other"}
    assert spoken.isdisjoint({"k1", "k2", "k3", "k4"})


def test_a_flush_ends_when_its_commit_does() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    number = flush(desk)
    desk.finish()
    assert number not in desk.answers
    assert list(named(desk)) == ["k"]
    desk.end_commit()
    assert desk.answers[number] is None


def test_a_commit_that_fails_fails_its_flushes_and_only_them() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    number = flush(desk)
    desk.finish()
    error = BackendError("no disk")
    desk.end_commit(error)
    assert desk.answers[number] is error
    assert desk.ledger.where("k") == (HOST, DISK)
    again = flush(desk)
    desk.run()
    assert desk.answers[again] is None


@pytest.mark.parametrize("change", ["drop", "replace", "write"])
def test_what_was_committed_is_not_freed_before_a_commit_without_it_has_ended(change: str) -> None:
    desk = flushed_desk()
    if change == "drop":
        desk.tell(m.DropRequested(["k"]))
    elif change == "replace":
        desk.put("k", 10, HOST, replace=True)
    else:
        write(desk, "k")
    desk.run()
    assert disk_bytes(desk) == (10, 10)
    flush(desk)
    while desk.copies:
        desk.finish()
    assert not [free for free in desk.frees if free.place.tier == DISK]
    desk.end_commit()
    assert [free.place.tier for free in desk.frees] == [DISK]
    desk.free()
    assert disk_bytes(desk) == ((0, 0) if change == "drop" else (10, 0))


def test_what_a_failed_commit_named_stays_as_well_until_one_succeeds() -> None:
    desk = flushed_desk()
    write(desk, "k")
    flush(desk)
    desk.finish()
    desk.end_commit(BackendError("perhaps it was written"))
    write(desk, "k")
    assert disk_bytes(desk) == (20, 20)
    flush(desk)
    desk.run()
    assert disk_bytes(desk) == (10, 0)


def test_commits_that_fail_again_and_again_name_no_more_than_there_is() -> None:
    desk = flushed_desk()
    (replica,) = desk.ledger.commits.committed.values()
    for _ in range(100):
        flush_keys(desk, "k")
        desk.end_commit(BackendError("perhaps it was written"))
        desk.ledger.check()
    assert list(desk.ledger.commits.doubtful.values()) == [replica]
    assert replica.promises == len(["the last good one", "those that failed"])
    write(desk, "k")
    flush(desk)
    desk.finish()
    desk.end_commit(BackendError("perhaps it was written"))
    assert len(desk.ledger.commits.doubtful) == len(["the former bytes", "the new ones"])
    assert disk_bytes(desk) == (20, 10)
    flush(desk)
    desk.run()
    assert desk.ledger.commits.doubtful == {}
    assert disk_bytes(desk) == (10, 0)


def test_bytes_that_only_a_commit_needs_can_neither_be_evicted_nor_waited_for() -> None:
    desk = Desk()
    desk.ledger = Ledger(
        [
            Tier("device", 100, 100, 100),
            Tier("host", 100, 100, 100, is_host=True),
            Tier("disk", 100, 100, 100, is_storage=True, is_durable=True),
        ],
        POLICIES["lru"],
    )
    desk.store("k", 60, HOST)
    flush(desk)
    desk.run()
    write(desk, "k")
    number = desk.evict("k")
    desk.run()
    error = desk.answers[number]
    assert isinstance(error, CapacityError)
    assert "60 B are kept there only for the last flush. Flush" in str(error)
    assert desk.ledger.where("k") == (HOST,)


def test_who_gets_no_room_above_is_told_what_a_tier_below_keeps_for_the_last_commit() -> None:
    desk = Desk()
    desk.ledger = Ledger(
        [
            Tier("host", 100, 100, 100, is_host=True),
            Tier("disk", 100, 100, 100, is_storage=True, is_durable=True),
        ],
        POLICIES["lru"],
    )
    desk.store("k", 60, 0)
    flush(desk)
    desk.run()
    write(desk, "k", 0)
    number = desk.put("new", 60, 0)
    desk.run()
    error = desk.answers[number]
    assert isinstance(error, CapacityError)
    assert "1 replicas could not be moved to a lower tier (40 B free in 'disk')" in str(error)
    assert "60 B are kept in 'disk' only for the last flush. Flush" in str(error)
    assert str(error).endswith("raise the capacity of 'host' or 'disk'.")


def test_room_that_a_commit_under_way_may_free_is_waited_for() -> None:
    desk = durable_desk()
    desk.ledger.books.tier_states[DISK].limit_bytes = 100
    desk.store("k", 60, HOST)
    flush(desk)
    desk.run()
    desk.tell(m.DropRequested(["k"]))
    desk.run()
    flush(desk)
    number = desk.put("next", 60, DISK)
    assert number not in desk.answers
    desk.run()
    assert desk.answers[number] is None
    assert desk.ledger.where("next") == (DISK,)


def test_evicting_what_is_committed_to_a_tier_below_makes_no_room() -> None:
    desk = Desk()
    desk.ledger = Ledger(
        [
            Tier("device", 100, 100, 100),
            Tier("host", 100, 100, 100, is_host=True),
            Tier("disk", 100, 100, 100, is_storage=True, is_durable=True),
            Tier("archive", 1000, 1000, 1000, is_storage=True),
        ],
        POLICIES["lru"],
    )
    desk.store("kept", 60, DISK)
    flush(desk)
    desk.run()
    number = desk.put("next", 60, DISK)
    desk.run()
    assert isinstance(desk.answers[number], CapacityError)
    assert desk.ledger.where("kept") == (DISK,)
    desk.tell(m.DropRequested(["kept"]))
    flush(desk)
    desk.run()
    desk.store("other", 60, DISK)
    assert desk.ledger.where("other") == (DISK,)


def test_a_flush_of_some_keys_leaves_the_others_as_they_survived_before() -> None:
    desk = durable_desk()
    for key in ("a", "b", "c"):
        desk.store(key, 10, HOST)
    flush(desk)
    desk.finish()
    desk.finish()
    desk.finish()
    former = named(desk)
    desk.run()
    write(desk, "a")
    write(desk, "b")
    desk.tell(m.DropRequested(["c"]))
    desk.store("new", 10, HOST)
    flush_keys(desk, "a")
    desk.finish()
    now = named(desk)
    assert set(now) == {"a", "b"}
    assert now["b"] == former["b"]
    assert now["a"] != former["a"]


def test_flushes_that_end_while_a_commit_is_under_way_share_the_next() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    numbers = [flush(desk), flush(desk)]
    desk.finish()
    numbers += [flush(desk), flush(desk)]
    assert len(desk.commits) == 1
    desk.end_commit()
    assert [number in desk.answers for number in numbers] == [True, True, False, False]
    assert len(desk.commits) == 1
    desk.end_commit()
    assert [desk.answers[number] for number in numbers] == [None] * 4
    assert not desk.commits


def test_a_version_that_a_flush_has_found_is_named_if_the_key_is_written_meanwhile() -> None:
    desk = durable_desk()
    desk.store("slow", 10, HOST)
    desk.store("quick", 10, HOST)
    number = flush(desk)
    desk.finish(1)
    found = desk.ledger.books.index["quick"].replicas[DISK]
    lease = desk.lease("quick", HOST, m.Access.WRITE)
    desk.tell(m.LeaseReleased(lease, written=True))
    desk.finish()
    assert named(desk)["quick"] == found.place.replica
    desk.run()
    assert desk.answers[number] is None
    assert disk_bytes(desk) == (20, 10)


def test_a_key_that_is_leased_for_writing_refuses_a_flush() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    desk.lease("k", HOST, m.Access.WRITE)
    with pytest.raises(LeaseError, match="cannot flush 'k'"):
        flush(desk)


def test_bytes_in_a_durable_tier_are_not_leased_for_writing() -> None:
    desk = durable_desk()
    desk.store("k", 10, DISK)
    with pytest.raises(UsageError, match="never changed in place"):
        desk.lease("k", DISK, m.Access.WRITE)


def test_a_flush_needs_a_durable_tier() -> None:
    desk = Desk()
    with pytest.raises(UsageError, match="scratch space"):
        flush(desk)


def test_resize_refuses_to_go_below_what_is_kept() -> None:
    desk = flushed_desk()
    write(desk, "k")
    with pytest.raises(CapacityError, match="kept only for the last flush"):
        desk.tell(m.ResizeRequested(desk.next(), DISK, 5, 5, 5))


def test_close_waits_for_the_commit_under_way_and_fails_the_flushes_after_it() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    first = flush(desk)
    desk.finish()
    second = flush(desk)
    closing = desk.next()
    desk.tell(m.CloseRequested(closing))
    assert isinstance(desk.answers[second], StoreClosed)
    assert closing not in desk.answers
    desk.end_commit()
    assert desk.answers[first] is None
    assert desk.answers[closing] is None


def test_what_was_recovered_is_there_and_is_kept_until_a_commit_without_it() -> None:
    desk = durable_desk()
    desk.tell(m.RecordsRecovered(desk.next(), DISK, [m.Found("k", 10, 10, "spec"), m.Found("l", 5, 5, None)]))
    assert list(desk.ledger) == ["k", "l"]
    assert desk.ledger.spec("k") == "spec"
    assert [granted.key for granted in desk.leased[1]] == ["k", "l"]
    disk = desk.ledger.books.tier_states[DISK]
    assert (disk.peak_charged_bytes, len(disk.kept), len(disk.evictable)) == (15, 2, 0)
    desk.tell(m.DropRequested(["k"]))
    desk.run()
    assert disk_bytes(desk) == (15, 10)
    flush(desk)
    desk.run()
    assert disk_bytes(desk) == (5, 0)


def test_what_was_recovered_has_to_fit_into_the_quota() -> None:
    desk = durable_desk()
    with pytest.raises(CapacityError, match=r"2 keys of .* were found in 'disk'") as caught:
        desk.tell(
            m.RecordsRecovered(
                desk.next(), DISK, [m.Found("k", 700, 700, None), m.Found("l", 800, 800, None)]
            )
        )
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (1500, 1000)
    assert not len(desk.ledger)


def test_a_device_replica_is_untouched_by_a_flush() -> None:
    desk = durable_desk()
    desk.store("k", 10, DEVICE)
    flush(desk)
    desk.run()
    assert desk.ledger.where("k")[0] == DEVICE


def test_what_a_failed_commit_was_about_is_settled_by_the_next_whatever_that_is_about() -> None:
    desk = flushed_desk()
    former = desk.ledger.commits.committed["k"]
    desk.store("other", 10, HOST)
    write(desk, "k")
    flush_keys(desk, "k")
    desk.finish()
    desk.end_commit(BackendError("perhaps it was written"))
    flush_keys(desk, "other")
    desk.finish()
    assert named(desk)["k"] == former.place.replica
    desk.run()
    assert desk.ledger.commits.doubtful == {}
    flush_keys(desk, "k")
    desk.run()
    assert desk.ledger.commits.committed["k"] is not former


def test_a_flush_that_ends_its_search_while_the_store_closes_is_told_so() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    flush(desk)
    desk.finish()  # a commit is under way
    desk.put("a", 10, HOST)
    second = flush(desk)
    closing = desk.next()
    desk.tell(m.CloseRequested(closing))
    desk.run()
    assert isinstance(desk.answers[second], StoreClosed)
    assert desk.answers[closing] is None


def test_a_request_after_the_store_began_to_close_is_refused_by_the_books() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    desk.tell(m.CloseRequested(desk.next()))
    with pytest.raises(StoreClosed):
        flush(desk)
    with pytest.raises(StoreClosed):
        desk.fetch("k", DISK)
