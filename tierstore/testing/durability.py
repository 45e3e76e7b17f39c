"""The suite that every durable backend passes, beside `tierstore.testing.conformance`: rules 11 to 15.

To run it against a backend of yours, say how to open its medium, and how to lose power::

    class TestMyDurability(DurableBackendSuite):
        def open(self, capacity_bytes: int) -> DurableBackend:
            return open_backend(capacity_bytes=capacity_bytes, options={"path": self.path})

        def lose_power(self, backend: DurableBackend) -> None:
            copy(self.path, elsewhere)  # what a disk would have now
            backend.close()
            self.path = elsewhere

`open` is called again and again within a test: each time the medium is as the last one left it.
Needs pytest.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from tierstore.errors import BackendError, CapacityError, StoreClosed
from tierstore.spi import Completion, DurableBackend, Record, Slot, held_bytes
from tierstore.testing.conformance import (
    CAPACITY_BYTES,
    SIZES,
    TIMEOUT_S,
    charge,
    contents,
    finish,
    pattern,
    refusal,
    stored,
    succeed,
)
from tierstore.units import MIB

NAMES = (
    "",
    "a",
    "layers.0.weight",
    "ä/ö ü",
    "two\nlines",
    "nul\0byte",
    "\ud800 alone",
    "'; --",
    "long" * 500,
)
"""Any text is a name, and any text is a note."""


def named(backend: DurableBackend, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Record]:
    """Write a pattern of its own for each name; return what a commit of all of them would name."""
    return {
        name: Record(name, f"{seed} of {name}", stored(backend, pattern(nbytes, seed)))
        for name, nbytes in sizes.items()
    }


def commit(backend: DurableBackend, records: Mapping[str, Record]) -> None:
    """Commit, and raise what it failed with."""
    succeed(backend.commit(list(records.values())))


def found(backend: DurableBackend) -> dict[str, Record]:
    """Return what is recovered, by name."""
    records = backend.recovered()
    by_name = {record.name: record for record in records}
    assert len(by_name) == len(records), "a name was recovered twice"
    return by_name


class DurableBackendSuite:
    """Subclass it, name the subclass ``Test...``, and define `open` and `lose_power`."""

    def open(self, capacity_bytes: int) -> DurableBackend:
        """Open the medium as it is."""
        raise NotImplementedError

    def lose_power(self, backend: DurableBackend) -> None:
        """Leave the medium as a power loss at this moment would; end ``backend`` without harm to that."""
        raise NotImplementedError

    def failing_commits(self) -> contextlib.AbstractContextManager[None]:
        """Let every commit fail within.  The tests that need it are skipped where nobody says how."""
        pytest.skip("nobody says how a commit of this backend fails")

    @pytest.fixture
    def opened(self) -> Iterator[Callable[[], DurableBackend]]:
        """Open the medium; what is open at the end of the test is closed."""
        backends: list[DurableBackend] = []

        def open_it() -> DurableBackend:
            backends.append(self.open(CAPACITY_BYTES))
            return backends[-1]

        yield open_it
        for backend in backends:
            backend.close()

    @pytest.fixture(params=["close", "power loss"])
    def end(self, request: pytest.FixtureRequest) -> Callable[[DurableBackend], None]:
        """End a backend in either way: what is found later is the same (rule 15)."""
        if request.param == "power loss":
            return self.lose_power
        return lambda backend: backend.close()

    # ------------------------------------------------------------------------------------ what is found

    def test_it_says_that_it_is_durable(self, opened: Callable[[], DurableBackend]) -> None:
        """In its capabilities."""
        assert opened().capabilities.is_durable

    def test_a_new_medium_holds_nothing(self, opened: Callable[[], DurableBackend]) -> None:
        """Not even after it was opened before."""
        backend = opened()
        assert list(backend.recovered()) == []
        backend.close()
        assert list(opened().recovered()) == []

    def test_what_was_committed_is_found(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """Of every size, with name and note, and ready to be read."""
        backend = opened()
        records = {
            str(nbytes): Record(str(nbytes), "n", stored(backend, pattern(nbytes, 1))) for nbytes in SIZES
        }
        commit(backend, records)
        end(backend)
        backend = opened()
        recovered = found(backend)
        assert {record.note for record in recovered.values()} == {"n"}
        assert recovered.keys() == records.keys()
        for name, record in recovered.items():
            assert record.slot.nbytes == int(name)
            assert torch.equal(contents(backend, record.slot), pattern(int(name), 1))

    def test_any_text_is_a_name_and_a_note(self, opened: Callable[[], DurableBackend]) -> None:
        """They come back as they were."""
        backend = opened()
        slots = {name: stored(backend, pattern(10, i)) for i, name in enumerate(NAMES)}
        succeed(backend.commit([Record(name, name[::-1], slot) for name, slot in slots.items()]))
        backend.close()
        assert {(name, record.note) for name, record in found(opened()).items()} == {
            (name, name[::-1]) for name in NAMES
        }

    def test_what_was_not_committed_is_gone_and_its_room_is_free(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """However often."""
        for _ in range(3):
            backend = opened()
            assert found(backend) == {}
            named(backend, dict.fromkeys("abcdefgh", CAPACITY_BYTES // 8))
            end(backend)

    def test_recovered_slots_hold_their_room(self, opened: Callable[[], DurableBackend]) -> None:
        """Rule 13: what they hold and what can be reserved is the capacity."""
        backend = opened()
        commit(backend, named(backend, {"a": 5_000, "b": MIB + 3, "c": 0}))
        backend.close()
        backend = opened()
        held = sum(held_bytes(record.slot, backend.capabilities) for record in found(backend).values())
        rest = CAPACITY_BYTES - held
        with pytest.raises(CapacityError):
            backend.reserve(rest + 1)
        source = pattern(rest, 3)
        assert torch.equal(contents(backend, stored(backend, source)), source)

    def test_a_capacity_below_what_is_kept_is_refused_and_harms_nothing(
        self, opened: Callable[[], DurableBackend]
    ) -> None:
        """With both numbers."""
        backend = opened()
        records = named(backend, {"a": MIB, "b": MIB})
        commit(backend, records)
        alignment_bytes = backend.capabilities.alignment_bytes
        kept_bytes = sum(held_bytes(record.slot, backend.capabilities) for record in records.values())
        backend.close()
        with pytest.raises(CapacityError) as caught:
            self.open(kept_bytes // 2)
        assert caught.value.needed_bytes == kept_bytes
        assert caught.value.free_bytes == kept_bytes // 2 // alignment_bytes * alignment_bytes
        backend = opened()
        for record in found(backend).values():
            assert torch.equal(contents(backend, record.slot), pattern(MIB, 0))

    # ------------------------------------------------------------------------------------ commits

    def test_a_commit_names_everything_that_stays(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """What it does not name is dropped; what it names with other bytes is replaced."""
        backend = opened()
        records = named(backend, {"kept": 5_000, "replaced": 5_000, "dropped": 5_000})
        commit(backend, records)
        old = [records.pop("dropped").slot, records["replaced"].slot]
        records |= named(backend, {"replaced": 70_000, "new": 1}, seed=1)
        commit(backend, records)
        for slot in old:
            succeed(backend.free(slot))
        end(backend)
        backend = opened()
        recovered = found(backend)
        assert {name: record.slot.nbytes for name, record in recovered.items()} == {
            "kept": 5_000,
            "replaced": 70_000,
            "new": 1,
        }
        assert recovered["replaced"].note == "1 of replaced"
        assert torch.equal(contents(backend, recovered["replaced"].slot), pattern(70_000, 1))
        assert torch.equal(contents(backend, recovered["kept"].slot), pattern(5_000, 0))

    def test_until_the_next_commit_the_last_one_counts(self, opened: Callable[[], DurableBackend]) -> None:
        """Whatever was written since."""
        backend = opened()
        records = named(backend, {"a": 5_000})
        commit(backend, records)
        named(backend, {"a": 9_000, "b": 10}, seed=1)
        self.lose_power(backend)
        backend = opened()
        recovered = found(backend)
        assert recovered.keys() == {"a"}
        assert torch.equal(contents(backend, recovered["a"].slot), pattern(5_000, 0))

    def test_a_name_or_a_note_can_change_while_the_bytes_stay(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """Also two names can change places."""
        backend = opened()
        records = named(backend, {"a": 100, "b": 200, "c": 300})
        commit(backend, records)
        a, b, c = (records[name].slot for name in "abc")
        succeed(backend.commit([Record("a", "was b", b), Record("b", "was a", a), Record("d", "was c", c)]))
        end(backend)
        recovered = found(opened())
        assert {(record.name, record.note, record.slot.nbytes) for record in recovered.values()} == {
            ("a", "was b", 200),
            ("b", "was a", 100),
            ("d", "was c", 300),
        }

    def test_a_commit_that_says_what_is_gone_leaves_the_others(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """Names move, bytes are replaced by fewer and by more, and what was never there may be gone."""
        backend = opened()
        sizes = {"kept": 5_000, "fewer": MIB, "more": 10, "moved": MIB, "dropped": 9_000}
        records = named(backend, sizes)
        commit(backend, records)
        changed = named(backend, {"fewer": 7, "more": MIB + 1, "new": 1}, seed=1)
        moved = Record("elsewhere", records["moved"].note, records["moved"].slot)
        gone = ["moved", "dropped", "never there"]
        succeed(backend.commit([*changed.values(), moved], gone))
        for name in ("fewer", "more", "dropped"):
            succeed(backend.free(records[name].slot))
        succeed(backend.commit([], []))
        end(backend)
        backend = opened()
        recovered = found(backend)
        expected = {name: (nbytes, 1) for name, nbytes in {"fewer": 7, "more": MIB + 1, "new": 1}.items()}
        expected |= {"kept": (5_000, 0), "elsewhere": (MIB, 0)}
        assert recovered.keys() == expected.keys()
        for name, (nbytes, seed) in expected.items():
            assert torch.equal(contents(backend, recovered[name].slot), pattern(nbytes, seed))
        succeed(backend.commit([], list(recovered)))
        end(backend)
        assert found(opened()) == {}

    def test_a_commit_of_nothing_leaves_nothing(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """It is a commit like any other."""
        backend = opened()
        commit(backend, named(backend, {"a": 5_000}))
        commit(backend, {})
        end(backend)
        assert found(opened()) == {}

    def test_what_was_recovered_can_be_committed_replaced_and_dropped(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """Over many generations: a recovered slot is a slot."""
        backend = opened()
        commit(backend, named(backend, {str(n): 1_000 + n for n in range(8)}))
        for generation in range(8):
            end(backend)
            backend = opened()
            records = found(backend)
            assert records.keys() == {str(n) for n in range(generation, generation + 8)}
            dropped = records.pop(str(generation))
            records |= named(backend, {str(generation + 8): 1_008 + generation})
            commit(backend, records)
            succeed(backend.free(dropped.slot))
            for name, record in records.items():
                assert torch.equal(contents(backend, record.slot), pattern(1_000 + int(name), 0))

    def test_freed_room_of_a_dropped_slot_is_used_again(self, opened: Callable[[], DurableBackend]) -> None:
        """Many times the capacity goes through."""
        backend = opened()
        records: dict[str, Record] = {}
        for generation in range(12):
            old = list(records.values())
            records = named(backend, {"a": CAPACITY_BYTES // 2 - MIB}, seed=generation)
            commit(backend, records)
            for record in old:
                succeed(backend.free(record.slot))
        self.lose_power(backend)
        backend = opened()
        assert torch.equal(
            contents(backend, found(backend)["a"].slot), pattern(CAPACITY_BYTES // 2 - MIB, 11)
        )

    def test_bytes_move_while_a_commit_is_under_way(self, opened: Callable[[], DurableBackend]) -> None:
        """Nobody waits for it but who asked for it (rule 6)."""
        backend = opened()
        records = named(backend, {str(n): 20_000 for n in range(8)})
        under_way: list[Completion] = [backend.commit(list(records.values()))]
        slots = [backend.reserve(30_000) for _ in range(8)]
        under_way += [backend.write(slot, pattern(30_000, i)) for i, slot in enumerate(slots)]
        buffers = [torch.empty(20_000, dtype=torch.uint8) for _ in records]
        under_way += [
            backend.read(record.slot, into) for record, into in zip(records.values(), buffers, strict=True)
        ]
        for completion in under_way:
            succeed(completion)
        assert all(torch.equal(into, pattern(20_000, 0)) for into in buffers)
        self.lose_power(backend)
        backend = opened()
        for record in found(backend).values():
            assert torch.equal(contents(backend, record.slot), pattern(20_000, 0))

    def test_the_callback_of_a_commit_may_call_the_backend(
        self, opened: Callable[[], DurableBackend]
    ) -> None:
        """The next commit too: the engine may have one waiting."""
        backend = opened()
        first = named(backend, {"a": 1_000})
        second = first | named(backend, {"b": 2_000})
        commits: list[Completion] = []
        has_begun = threading.Event()

        def go_on(_error: BaseException | None) -> None:
            commits.append(backend.commit(list(second.values())))
            has_begun.set()

        backend.commit(list(first.values())).add_done_callback(go_on)
        assert has_begun.wait(TIMEOUT_S)
        succeed(commits[0])
        self.lose_power(backend)
        assert found(opened()).keys() == {"a", "b"}

    def test_a_closed_backend_refuses_a_commit(self, opened: Callable[[], DurableBackend]) -> None:
        """And what was committed stays."""
        backend = opened()
        records = named(backend, {"a": 1_000})
        commit(backend, records)
        backend.close()
        assert isinstance(refusal(lambda: backend.commit([])), BackendError | StoreClosed)
        assert found(opened()).keys() == {"a"}

    # ------------------------------------------------------------------------------------ failures

    def test_a_commit_that_fails_leaves_one_or_the_other(self, opened: Callable[[], DurableBackend]) -> None:
        """Rule 14: and nothing between."""
        backend = opened()
        first = named(backend, {"a": 1_000, "b": 2_000})
        commit(backend, first)
        second = named(backend, {"a": 3_000, "c": 4_000}, seed=1)
        with self.failing_commits():
            assert isinstance(finish(backend.commit(list(second.values()))), BackendError)
        for record in (*first.values(), *second.values()):
            contents(backend, record.slot)
        self.lose_power(backend)
        sizes = {name: record.slot.nbytes for name, record in found(opened()).items()}
        assert sizes in ({"a": 1_000, "b": 2_000}, {"a": 3_000, "c": 4_000})

    def test_after_a_commit_that_failed_the_next_one_counts(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """Whichever of the two it resembles."""
        backend = opened()
        first = named(backend, {"a": 1_000, "b": 2_000})
        commit(backend, first)
        second = named(backend, {"a": 3_000, "c": 4_000}, seed=1)
        other = named(backend, {"a": 5_000, "d": 6_000}, seed=2)
        for later in (first, second, first | second):
            with self.failing_commits():
                assert isinstance(finish(backend.commit(list(other.values()))), BackendError)
            commit(backend, later)
        end(backend)
        backend = opened()
        recovered = found(backend)
        assert {name: record.slot.nbytes for name, record in recovered.items()} == {
            "a": 3_000,
            "b": 2_000,
            "c": 4_000,
        }
        assert torch.equal(contents(backend, recovered["a"].slot), pattern(3_000, 1))

    def test_after_one_that_failed_the_next_says_again_what_is_to_be_there(
        self, opened: Callable[[], DurableBackend], end: Callable[[DurableBackend], None]
    ) -> None:
        """Rule 12: whichever of the two is on the medium, nothing of the failed one is left."""
        backend = opened()
        first = named(backend, {"a": 1_000, "b": MIB, "untouched": 3})
        commit(backend, first)
        second = named(backend, {"a": MIB, "c": MIB}, seed=1)
        with self.failing_commits():
            assert isinstance(finish(backend.commit(list(second.values()), ["b"])), BackendError)
        succeed(backend.commit([first["a"], first["b"]], ["c"]))
        end(backend)
        backend = opened()
        recovered = found(backend)
        assert recovered.keys() == first.keys()
        for name, record in first.items():
            assert torch.equal(contents(backend, recovered[name].slot), pattern(record.slot.nbytes, 0))

    # ------------------------------------------------------------------------------------ in all

    def test_a_long_random_life_keeps_what_was_committed(self, opened: Callable[[], DurableBackend]) -> None:
        """Write, commit, lose power, open again by chance; a dict knows what must be found."""
        chance = random.Random(7)
        backend = opened()
        life = _BackendLife(backend)
        for turn in range(150):
            life.write(chance.choice("abcdefghij"), chance.choice((0, 1, 511, 5_000, 100_001)), turn)
            if chance.random() < 0.3:
                life.drop(chance.choice("abcdefghij"))
            if chance.random() < 0.3:
                life.commit(is_whole=chance.random() < 0.3)
            if chance.random() < 0.1:
                chance.choice((self.lose_power, lambda each: each.close()))(life.backend)
                life.go_on(opened())
        life.check()


class _BackendLife:
    """A backend, what it holds, and what it must find again."""

    def __init__(self, backend: DurableBackend) -> None:
        self.backend = backend
        self._records: dict[str, Record] = {}
        self._left: dict[str, Record] = {}  # by the last commit
        self._seeds: dict[str, int] = {}
        self._committed: dict[str, int] = {}  # seeds, by name
        self._unused: list[Slot] = []  # neither here nor in the last commit any more, once there is a next

    def write(self, name: str, nbytes: int, seed: int) -> None:
        self.drop(name)
        if self._charged() + charge(self.backend.capabilities, nbytes) > CAPACITY_BYTES // 2:
            self.commit()
        self._records[name] = Record(name, str(seed), stored(self.backend, pattern(nbytes, seed)))
        self._seeds[name] = seed

    def drop(self, name: str) -> None:
        record = self._records.pop(name, None)
        if record is not None:
            self._unused.append(record.slot)
            del self._seeds[name]

    def commit(self, *, is_whole: bool = True) -> None:
        if is_whole:
            commit(self.backend, self._records)
        else:
            changed = [each for name, each in self._records.items() if self._left.get(name) != each]
            succeed(self.backend.commit(changed, self._left.keys() - self._records.keys()))
        self._left = dict(self._records)
        for slot in self._unused:
            succeed(self.backend.free(slot))
        self._unused = []
        self._committed = dict(self._seeds)

    def go_on(self, backend: DurableBackend) -> None:
        """Look at what another process would find, and go on with it."""
        self.backend = backend
        self._records = found(backend)
        self._left = dict(self._records)
        self._seeds = dict(self._committed)
        self._unused = []
        self.check()

    def check(self) -> None:
        assert {name: int(record.note) for name, record in self._records.items()} == self._seeds
        for name, record in self._records.items():
            assert torch.equal(
                contents(self.backend, record.slot), pattern(record.slot.nbytes, self._seeds[name])
            )

    def _charged(self) -> int:
        slots = [record.slot for record in self._records.values()] + self._unused
        return sum(charge(self.backend.capabilities, slot.nbytes) for slot in slots)
