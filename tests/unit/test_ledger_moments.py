"""What a flush is about: the keys and the bytes of one moment, whatever happens to them meanwhile."""

from __future__ import annotations

from tests.unit.test_ledger import DISK, HOST, Desk
from tests.unit.test_ledger_commits import disk_bytes, flush_keys, flushed_desk, named
from tests.unit.test_ledger_waiting import durable_desk, flush
from tierstore.core import messages as m
from tierstore.core.requests import FLUSH_ROUNDS
from tierstore.errors import BackendError


def test_a_new_name_survives_when_it_is_flushed_and_takes_the_former_one_along() -> None:
    desk = flushed_desk()
    desk.store("other", 10, HOST)
    desk.tell(m.RenameRequested({"k": "l"}, replace=False))
    flush_keys(desk, "other")
    desk.finish()
    assert set(named(desk)) == {"k", "other"}
    desk.run()
    flush_keys(desk, "l")
    assert set(named(desk)) == {"l", "other"}


def test_keys_that_changed_places_are_flushed_together() -> None:
    desk = flushed_desk()
    desk.store("l", 20, HOST)
    flush(desk)
    desk.run()
    former = {key: replica.place.replica for key, replica in desk.ledger.commits.committed.items()}
    for key, name in (("k", "x"), ("l", "k"), ("x", "l")):
        desk.tell(m.RenameRequested({key: name}, replace=False))
    flush_keys(desk, "k")
    assert named(desk) == {"k": former["l"], "l": former["k"]}


def test_a_name_that_never_had_the_bytes_does_not_survive() -> None:
    desk = durable_desk()
    desk.store("tmp", 10, HOST)
    flush(desk)
    desk.run()
    first = desk.ledger.commits.committed["tmp"]
    desk.store("slow", 10, HOST)
    number = flush(desk)
    lease = desk.lease("tmp", HOST, m.Access.WRITE)
    desk.tell(m.LeaseReleased(lease, written=True))
    desk.tell(m.RenameRequested({"tmp": "final"}, replace=False))
    desk.finish()
    assert named(desk)["tmp"] == first.place.replica
    assert "final" not in named(desk)
    desk.run()
    assert desk.answers[number] is None


def test_a_key_that_was_dropped_during_a_flush_survives_as_it_was_at_its_moment() -> None:
    desk = durable_desk()
    desk.store("a", 10, HOST)
    desk.store("b", 10, HOST)
    number = flush(desk)
    desk.tell(m.DropRequested(["a"]))
    assert set(desk.ledger) == {"b"}
    desk.run()
    assert desk.answers[number] is None
    assert set(desk.ledger.commits.committed) == {"a", "b"}
    assert disk_bytes(desk) == (20, 10)
    flush(desk)
    desk.run()
    assert disk_bytes(desk) == (10, 0)


def test_keys_that_took_others_places_during_a_flush_do_not_survive_in_part() -> None:
    desk = durable_desk()
    desk.store("p", 10, DISK)
    desk.store("m", 10, HOST)
    before = [desk.ledger.books.index[key] for key in ("p", "m")]
    flush(desk)
    desk.put("p~next", 10, HOST)
    desk.finish(1)
    desk.put("m~next", 10, DISK)
    desk.finish(1)
    desk.tell(m.RenameRequested({"p~next": "p", "m~next": "m"}, replace=True))
    desk.finish()  # "m" reaches the disk
    assert named(desk) == {entry.key: entry.replicas[DISK].place.replica for entry in before}
    desk.run()
    flush(desk)
    desk.run()
    committed = desk.ledger.commits.committed
    assert set(committed) == {"p", "m"}
    assert all(committed[key] is desk.ledger.books.index[key].replicas[DISK] for key in committed)


def test_keys_that_come_during_a_flush_do_not_hold_it_up() -> None:
    desk = durable_desk()
    desk.store("k0", 1, HOST)
    number = flush(desk)
    for index in range(1, 100):
        desk.put(f"k{index}", 1, HOST)
        desk.finish(-1)
    desk.finish()
    assert list(named(desk)) == ["k0"]
    desk.run()
    assert desk.answers[number] is None


def test_a_put_of_a_new_key_that_had_begun_is_waited_for() -> None:
    desk = durable_desk()
    desk.put("k", 10, HOST)
    numbers = [flush(desk), flush_keys(desk, "k")]
    assert not desk.commits
    desk.run()
    assert [desk.answers[number] for number in numbers] == [None, None]
    assert set(desk.ledger.commits.committed) == {"k"}
    desk.put("l", 10, HOST)
    number = flush(desk)
    desk.finish(error=BackendError("no"))
    desk.run()
    assert desk.answers[number] is None
    assert set(desk.ledger.commits.committed) == {"k"}


def test_bytes_that_have_another_key_now_do_not_survive_under_both() -> None:
    desk = flushed_desk()
    desk.store("c", 10, HOST)
    desk.tell(m.RenameRequested({"k": "l"}, replace=False))
    desk.store("k", 10, HOST)
    flush_keys(desk, "c")
    desk.finish()
    assert set(named(desk)) == {"c", "k"}
    desk.run()
    flush_keys(desk, "l")
    desk.run()
    committed = desk.ledger.commits.committed
    assert set(committed) == {"c", "k", "l"}
    assert len({replica.place for replica in committed.values()}) == 3


def test_a_key_that_is_replaced_meanwhile_survives_as_it_was() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    entry = desk.ledger.books.index["k"]
    number = flush_keys(desk, "k")
    desk.put("k", 10, HOST, replace=True)
    desk.finish(1)
    assert desk.ledger.books.index["k"] is not entry
    desk.finish()
    assert named(desk) == {"k": entry.replicas[DISK].place.replica}
    desk.run()
    assert desk.answers[number] is None
    assert disk_bytes(desk) == (10, 10)


def test_who_writes_waits_until_a_flush_has_the_bytes() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    flush(desk)
    lease = desk.lease("k", HOST, m.Access.WRITE)
    assert lease not in desk.answers
    desk.finish()
    assert desk.answers[lease] == "granted"
    desk.tell(m.LeaseReleased(lease, written=True))
    desk.run()


def test_who_writes_need_not_wait_for_a_flush_that_failed() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    number = flush(desk)
    lease = desk.lease("k", HOST, m.Access.WRITE)
    desk.finish(error=BackendError("no"))
    assert isinstance(desk.answers[number], BackendError)
    assert desk.answers[lease] == "granted"


def test_a_dropped_key_goes_when_the_flush_that_needed_it_fails() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    number = flush(desk)
    desk.tell(m.DropRequested(["k"]))
    desk.finish(error=BackendError("no"))
    desk.run()
    assert isinstance(desk.answers[number], BackendError)
    assert not desk.ledger.books.entries


def _overtaken() -> tuple[Desk, int, int]:
    """Return a desk where a flush of everything waits for "slow", and a later one of "a" has ended."""
    desk = durable_desk()
    desk.store("a", 10, HOST)
    flush(desk)
    desk.run()
    desk.store("slow", 10, HOST)
    whole = flush(desk)
    write_beside(desk, "a")
    part = flush_keys(desk, "a")
    desk.finish(1)
    desk.end_commit()
    assert desk.answers[part] is None
    assert whole not in desk.answers
    return desk, whole, part


def write_beside(desk: Desk, key: str) -> None:
    """Change a key's bytes; let nothing else go on."""
    lease = desk.lease(key, HOST, m.Access.WRITE)
    desk.tell(m.LeaseReleased(lease, written=True))


def _one_key_for_each(desk: Desk) -> set[str]:
    """Return the keys that were committed; nobody's bytes are under two."""
    committed = desk.ledger.commits.committed
    assert len({replica.place for replica in committed.values()}) == len(committed)
    return set(committed)


def _assert_as_now(desk: Desk, *keys: str) -> None:
    """Assert that keys were committed as they are now."""
    committed = desk.ledger.commits.committed
    assert all(committed[key] is desk.ledger.books.index[key].replicas[DISK] for key in keys)


def test_a_key_that_is_renamed_while_a_flush_of_it_waits_is_found_once() -> None:
    for keys in ((), ("l",)):
        desk = durable_desk()
        desk.put("k", 10, DISK)
        desk.finish()
        flush(desk)
        assert list(named(desk)) == ["k"]
        desk.tell(m.RenameRequested({"k": "l"}, replace=False))
        flush_keys(desk, *keys) if keys else flush(desk)
        desk.run()
        assert _one_key_for_each(desk) == {"l"}


def test_a_key_that_two_flushes_know_under_two_names_is_found_once() -> None:
    desk = durable_desk()
    desk.put("k", 10, DISK)
    desk.finish(error=BackendError("no"))  # the key is dirty, and not there
    numbers = [flush(desk)]
    desk.put("k", 10, DISK)
    desk.finish(0)
    numbers.append(flush(desk))  # waits for the commit under way, which is about the time before
    desk.tell(m.RenameRequested({"k": "l"}, replace=False))
    desk.end_commit()
    numbers.append(flush(desk))
    desk.run()
    assert [desk.answers[number] for number in numbers] == [None] * 3
    assert _one_key_for_each(desk) == {"l"}


def test_a_flush_that_has_ended_is_not_undone_by_an_older_one() -> None:
    desk, whole, _ = _overtaken()
    second = desk.ledger.commits.committed["a"]
    write_beside(desk, "a")
    desk.run()
    assert desk.answers[whole] is None
    committed = desk.ledger.commits.committed
    assert committed["a"] is second
    assert set(committed) == {"a", "slow"}


def test_a_flush_that_was_overtaken_is_about_what_was_written_before() -> None:
    desk = durable_desk()
    for key in ("a", "b"):
        desk.store(key, 10, HOST)
    flush(desk)
    desk.run()
    desk.store("slow", 10, HOST)
    whole = flush(desk)
    for key in ("b", "a"):
        write_beside(desk, key)
    flush_keys(desk, "a")
    desk.finish([copy.key for copy in desk.copies].index("a"))
    desk.run()
    assert desk.answers[whole] is None
    _assert_as_now(desk, "a", "b", "slow")


def test_a_flush_takes_older_ones_of_the_same_keys_along() -> None:
    desk = durable_desk()
    desk.store("k", 10, HOST)
    desk.store("slow", 10, HOST)
    part = flush_keys(desk, "k", "slow")
    desk.tell(m.DropRequested(["slow"]))
    whole = flush(desk)
    desk.finish([copy.key for copy in desk.copies].index("k"))
    desk.end_commit()
    assert (desk.answers[part], desk.answers[whole]) == (None, None)
    assert set(desk.ledger.commits.committed) == {"k"}
    desk.run()
    assert {entry.key for entry in desk.ledger.books.entries.values()} == {"k"}


def test_a_flush_waits_for_an_older_one_that_cannot_begin_again_as_somebody_writes() -> None:
    desk = durable_desk()
    for key in ("a", "b"):
        desk.store(key, 10, HOST)
    flush(desk)
    desk.run()
    desk.store("slow", 10, HOST)
    whole = flush(desk)
    write_beside(desk, "a")
    lease = desk.lease("b", HOST, m.Access.WRITE)
    part = flush_keys(desk, "a")
    desk.finish(1)
    assert not desk.commits
    desk.tell(m.LeaseReleased(lease, written=True))
    assert set(named(desk)) == {"a", "b"}
    desk.run()
    assert (desk.answers[part], desk.answers[whole]) == (None, None)


def test_a_flush_is_not_overtaken_for_ever() -> None:
    desk = durable_desk()
    desk.store("a", 10, HOST)
    flush(desk)
    desk.run()
    desk.store("slow", 10, HOST)
    whole = flush(desk)
    for _ in range(FLUSH_ROUNDS):
        write_beside(desk, "a")
        part = flush_keys(desk, "a")
        desk.finish(1)
        desk.end_commit()
        desk.free()
        assert desk.answers[part] is None
    write_beside(desk, "a")
    part = flush_keys(desk, "a")
    desk.finish(1)
    assert not desk.commits
    desk.finish()
    assert len(desk.commits) == 1
    desk.end_commit()
    assert desk.answers[whole] is None
    desk.run()
    assert desk.answers[part] is None


def test_no_moment_is_in_the_middle_of_a_rename() -> None:
    desk = durable_desk()
    desk.store("x", 10, HOST)
    for key in ("y", "x~next", "y~next"):
        desk.store(key, 10, DISK)
    desk.put("coming", 10, HOST)
    flush(desk)  # its moment comes with the end of the put
    desk.tell(m.RenameRequested({"x~next": "x", "y~next": "y"}, replace=True))
    desk.run()
    assert set(desk.ledger.commits.committed) == {"x", "y", "coming"}


def test_who_waits_for_an_older_flush_is_not_overtaken_either() -> None:
    desk = durable_desk()
    for key in ("x", "a", "other"):
        desk.store(key, 10, HOST)
    flush_keys(desk, "a")
    desk.run()
    first = flush_keys(desk, "x")  # copies
    desk.put("x", 10, DISK, replace=True)
    desk.finish(-1)
    flush_keys(desk, "other")
    desk.finish(-1)
    assert "other" in named(desk)  # a commit is under way
    second = flush_keys(desk, "x", "a")
    lease = desk.lease("x", HOST, m.Access.WRITE)
    desk.finish([copy.target.tier for copy in desk.copies].index(HOST))
    assert desk.answers[lease] == "granted"
    write_beside(desk, "a")
    third = flush_keys(desk, "a")
    desk.finish([copy.key for copy in desk.copies].index("a"))
    desk.end_commit()
    assert not desk.commits
    desk.tell(m.LeaseReleased(lease, written=False))
    desk.run()
    assert [desk.answers[number] for number in (first, second, third)] == [None] * 3
    _assert_as_now(desk, "x", "a")


def test_a_key_that_is_gone_goes_with_any_flush_even_if_an_older_one_is_still_about_it() -> None:
    desk = durable_desk()
    for key in ("k", "other"):
        desk.store(key, 10, DISK)
    flush_keys(desk, "other")
    flush(desk)  # waits for the commit under way
    desk.tell(m.DropRequested(["k"]))
    flush_keys(desk, "other")
    desk.run()
    assert set(desk.ledger.commits.committed) == {"other"}


# ---------------------------------------------------------------------- what a reader found


def _renamed_after_a_failed_flush() -> Desk:
    """Return a desk where a clean key's flush failed, and another's was committed while it was renamed."""
    desk = durable_desk()
    desk.store("x", 10, DISK)
    flush(desk)
    desk.run()
    for key in ("b", "c"):
        desk.store(key, 10, DISK)
    flush_keys(desk, "x")
    desk.end_commit(BackendError("no"))
    flush_keys(desk, "b")
    desk.tell(m.RenameRequested({"x": "y"}, replace=False))
    desk.end_commit()
    return desk


def test_a_failed_flush_of_a_clean_key_loses_nothing_of_it() -> None:
    desk = _renamed_after_a_failed_flush()
    flush_keys(desk, "c")
    desk.run()
    assert _one_key_for_each(desk) == {"b", "c", "x"}


def test_a_failed_flush_of_a_clean_key_gives_nobody_its_bytes() -> None:
    desk = _renamed_after_a_failed_flush()
    desk.store("x", 10, DISK)
    flush_keys(desk, "y")
    desk.run()
    assert _one_key_for_each(desk) == {"b", "x", "y"}


def test_a_flush_that_begins_again_is_not_refused_as_somebody_waits_to_write() -> None:
    desk = durable_desk()
    desk.ledger.scheduler.stride = 2
    for number in range(5):
        desk.store(f"k{number}", 1, HOST)
    desk.store("c", 1, DISK)
    whole = flush(desk)
    lease = desk.lease("k4", HOST, m.Access.WRITE)  # its copy has not begun
    part = flush_keys(desk, "c")
    assert whole not in desk.answers
    desk.run()
    assert (desk.answers[whole], desk.answers[part]) == (None, None)
    assert desk.answers[lease] == "granted"


def test_a_flush_waits_for_one_that_would_be_about_a_renamed_key_that_somebody_writes_to() -> None:
    desk = durable_desk()
    desk.store("a", 10, DISK)
    desk.store("c", 10, HOST)
    desk.fetch("a", HOST)
    desk.run()
    one = flush_keys(desk, "a", "c")
    desk.tell(m.RenameRequested({"a": "b"}, replace=False))
    lease = desk.lease("b", HOST, m.Access.WRITE)
    assert desk.answers[lease] == "granted"
    desk.put("c", 10, DISK, replace=True)
    desk.finish(-1)
    two = flush_keys(desk, "c")
    assert one not in desk.answers
    desk.tell(m.LeaseReleased(lease, written=True))
    desk.run()
    assert (desk.answers[one], desk.answers[two]) == (None, None)


def test_a_dropped_key_goes_even_if_a_put_of_it_is_coming() -> None:
    desk = durable_desk()
    for key in ("x", "other"):
        desk.store(key, 10, DISK)
    flush(desk)
    desk.run()
    desk.tell(m.DropRequested(["x"]))
    desk.put("x", 10, HOST)
    flush_keys(desk, "other")
    desk.end_commit()
    assert set(desk.ledger.commits.committed) == {"other"}
    desk.run()


def test_a_flush_is_about_no_key_that_took_the_place_of_one_that_is_gone() -> None:
    desk = durable_desk()
    desk.store("x", 10, DISK)
    flush(desk)
    desk.run()
    desk.store("other", 10, DISK)
    desk.tell(m.DropRequested(["x"]))
    desk.put("x", 10, HOST)
    desk.finish()
    flush_keys(desk, "x")
    desk.finish()  # a commit is under way
    desk.tell(m.RenameRequested({"x": "y"}, replace=False))
    desk.lease("y", HOST, m.Access.WRITE)
    number = flush_keys(desk, "other")
    desk.run()
    assert desk.answers[number] is None
    assert set(desk.ledger.commits.committed) == {"other", "x"}
