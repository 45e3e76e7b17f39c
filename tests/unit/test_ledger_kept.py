"""Two moments that survive: a flush keeps what the one before has left, until one releases it."""

from __future__ import annotations

import pytest

from tests.unit.test_ledger import DISK, HOST, Desk
from tests.unit.test_ledger_commits import disk_bytes, flushed_desk, write
from tierstore.core import messages as m
from tierstore.errors import BackendError, UsageError


def flush(desk: Desk, *keys: str, keep: str = "", release: str = "") -> int:
    number = desk.next()
    desk.tell(m.FlushRequested(number, keys or None, keep, release))
    return number


def flushed(desk: Desk, *keys: str, keep: str = "", release: str = "") -> m.Commit:
    """Flush to the end; return what the medium was told."""
    number = flush(desk, *keys, keep=keep, release=release)
    while desk.copies:
        desk.finish()
    (command,) = desk.commits
    desk.end_commit()
    desk.run()
    desk.ledger.check()
    assert desk.answers[number] is None
    return command


def place_of(desk: Desk, key: str) -> m.ReplicaId:
    return desk.ledger.commits.committed[key].place


def told(command: m.Commit) -> dict[str, m.ReplicaId]:
    return {granted.key: granted.place for granted in command.replicas}


def test_what_was_found_is_found_beside_what_is_flushed_until_it_is_released() -> None:
    desk = flushed_desk()
    first = place_of(desk, "k")
    write(desk, "k")
    command = flushed(desk, "k", keep="old/")
    assert told(command) == {"k": place_of(desk, "k"), "old/k": first}
    assert not command.gone
    assert disk_bytes(desk) == (20, 10)
    desk.store("other", 10, HOST)
    command = flushed(desk, "other", release="old/")
    assert (list(told(command)), list(command.gone)) == (["other"], ["old/k"])
    assert disk_bytes(desk) == (20, 0)


def test_what_has_not_changed_is_found_once() -> None:
    desk = flushed_desk()
    desk.store("other", 10, HOST)
    command = flushed(desk, keep="old/")
    assert list(told(command)) == ["other"]
    assert not desk.ledger.commits.kept


def test_what_was_kept_first_stays_whatever_is_flushed() -> None:
    desk = flushed_desk()
    first = place_of(desk, "k")
    for keep in ("old/", "old/", ""):
        write(desk, "k")
        flushed(desk, "k", keep=keep)
        assert desk.ledger.commits.kept["old/k"].place == first
    desk.tell(m.DropRequested(["k"]))
    flushed(desk)
    assert not desk.ledger.commits.committed
    assert desk.ledger.commits.kept["old/k"].place == first
    assert disk_bytes(desk) == (10, 10)


def test_a_key_that_is_dropped_is_kept_too() -> None:
    desk = flushed_desk()
    desk.store("other", 10, HOST)
    desk.tell(m.DropRequested(["k"]))
    command = flushed(desk, "other", keep="old/")
    assert sorted(told(command)) == ["old/k", "other"]
    assert list(command.gone) == ["k"]


def test_a_commit_that_fails_keeps_nothing_and_the_next_one_says_so() -> None:
    desk = flushed_desk()
    first = place_of(desk, "k")
    write(desk, "k")
    flush(desk, "k", keep="old/")
    desk.finish()
    desk.end_commit(BackendError("perhaps it was written"))
    assert not desk.ledger.commits.kept
    desk.store("other", 10, HOST)
    command = flushed(desk, "other")
    assert told(command) == {"k": first, "other": place_of(desk, "other")}
    assert list(command.gone) == ["old/k"]
    write(desk, "k")
    command = flushed(desk, "k", keep="old/")
    assert told(command)["old/k"] == first


def test_a_release_that_fails_has_released_nothing() -> None:
    desk = flushed_desk()
    write(desk, "k")
    flushed(desk, "k", keep="old/")
    desk.store("other", 10, HOST)
    flush(desk, "other", release="old/")
    desk.finish()
    desk.end_commit(BackendError("perhaps it was written"))
    assert disk_bytes(desk) == (30, 10)
    command = flushed(desk, "other")
    assert "old/k" in told(command)
    desk.ledger.check()


def test_what_is_released_and_kept_at_once_is_what_was_found_last() -> None:
    desk = flushed_desk()
    write(desk, "k")
    flushed(desk, "k", keep="old/")
    second = place_of(desk, "k")
    write(desk, "k")
    flushed(desk, "k", keep="old/", release="old/")
    assert desk.ledger.commits.kept["old/k"].place == second
    assert disk_bytes(desk) == (20, 10)


@pytest.mark.parametrize("is_kept_first", [True, False])
def test_a_name_is_a_key_or_kept(is_kept_first: bool) -> None:
    desk = flushed_desk()
    write(desk, "k")
    if is_kept_first:
        flushed(desk, "k", keep="old/")
    desk.store("old/k", 10, HOST)
    number = flush(desk, "old/k") if is_kept_first else flush(desk, "k", keep="old/")
    desk.run()
    assert isinstance(desk.answers[number], UsageError)
    assert "cannot be flushed" in str(desk.answers[number])
    desk.ledger.check()


def test_a_key_found_by_who_opens_the_tier_again_makes_way_for_what_is_kept() -> None:
    desk = flushed_desk()
    desk.store("old/k", 10, HOST)
    flushed(desk)
    first = place_of(desk, "k")
    desk.tell(m.DropRequested(["old/k"]))
    write(desk, "k")
    command = flushed(desk, "k", keep="old/")
    assert told(command) == {"k": place_of(desk, "k"), "old/k": first}
    assert not command.gone
    assert set(desk.ledger.commits.committed) == {"k"}


def test_bytes_that_have_another_name_now_cannot_be_kept_under_the_former() -> None:
    desk = flushed_desk()
    desk.tell(m.RenameRequested({"k": "new"}, replace=False))
    desk.store("k", 10, HOST)
    number = flush(desk, "k", keep="old/")
    desk.run()
    assert isinstance(desk.answers[number], UsageError)
    write(desk, "new")  # they are nobody's now, and are only kept
    assert "old/k" in told(flushed(desk, "k", keep="old/"))
    assert desk.ledger.books.tier_states[DISK].charged_bytes == 30
