"""Durable files against a dict, over a disk that forgets what was not synced."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.files_disk import PAGE, PowerKernel, blank, buffer, failing, finish, open_durable, outcome
from tierstore.errors import BackendError, CapacityError
from tierstore.spi import Completion, Record
from tierstore_backends.files import DurableFiles
from tierstore_backends.files.io.io_request import FileSlot

SEGMENT = 64 * 1024
CAPACITY = 6 * SEGMENT
NAMES = st.sampled_from("abcdefgh")
SIZES = st.sampled_from([0, 1, PAGE, PAGE + 1, 5 * PAGE, SEGMENT, SEGMENT + 1, 2 * SEGMENT])

Kept = dict[str, tuple[int, int]]
"""What must be found: by name, the seed of the bytes and how many."""


class DurableMachine(RuleBasedStateMachine):
    """The engine above, played by the rules: it frees nothing that the last commits named."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.turn = 0
        self.path = Path(self.scratch.name) / "0"
        self.kernel = PowerKernel(self.path)
        self.capacity = CAPACITY
        self.checksum = True
        self.files = self.open()
        assert list(self.files.recovered()) == []
        self.records: dict[str, Record] = {}
        self.left: dict[str, Record] = {}  # by the last commit that ended well
        self.doubtful: set[str] = set()  # names that those spoke of which failed since
        self.here: Kept = {}
        self.kept: list[Kept] = [{}]  # what may be found: one, and after a commit that failed two
        self.retired: list[FileSlot] = []  # freed once a commit without them has succeeded

    def open(self) -> DurableFiles:
        return open_durable(
            self.path,
            self.capacity,
            syscalls=self.kernel,
            segment_bytes=SEGMENT,
            stride_bytes=PAGE,
            options={"aio_block_size": 2 * PAGE if self.turn % 2 else 16 * PAGE, "checksum": self.checksum},
        )

    def teardown(self) -> None:
        self.files.close()
        self.scratch.cleanup()

    @rule(name=NAMES, nbytes=SIZES)
    def put(self, name: str, nbytes: int) -> None:
        try:
            slot = self.files.reserve(nbytes)
        except CapacityError:
            return
        self.turn += 1
        finish(self.files.write(slot, buffer(nbytes, self.turn)))
        self.drop(name)
        self.records[name] = Record(name, f"{self.turn}", slot)
        self.here[name] = (self.turn, nbytes)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        record = self.records.pop(name, None)
        if record is not None:
            assert isinstance(record.slot, FileSlot)
            self.retired.append(record.slot)
            del self.here[name]

    @rule(old=NAMES, new=NAMES)
    def rename(self, old: str, new: str) -> None:
        if old in self.records and old != new:
            self.drop(new)
            slot, self.here[new] = self.records.pop(old).slot, self.here.pop(old)
            self.records[new] = Record(new, str(self.here[new][0]), slot)

    def begin_commit(self, is_whole: bool) -> Completion:
        """Name everything, or what differs from the last good commit or was named by a failed one since."""
        if is_whole:
            return self.files.commit(list(self.records.values()))
        names = self.left.keys() | self.doubtful
        changed = [
            record
            for name, record in self.records.items()
            if name in self.doubtful or self.left.get(name) != record
        ]
        return self.files.commit(changed, names - self.records.keys())

    @rule(is_whole=st.booleans())
    def commit(self, is_whole: bool) -> None:
        finish(self.begin_commit(is_whole))
        self.left, self.doubtful = dict(self.records), set()
        self.kept = [dict(self.here)]
        for slot in self.retired:
            finish(self.files.free(slot))
        self.retired = []

    @precondition(lambda self: self.checksum)
    @rule(is_whole=st.booleans())
    def fail_to_commit(self, is_whole: bool) -> None:
        fail = failing(errno.EIO)
        self.kernel.twist = lambda kind, offset, nbytes: fail(0) if kind.startswith("sync") else None
        error = outcome(self.begin_commit(is_whole))
        self.kernel.twist = None
        assert error is None or isinstance(error, BackendError)
        if error is None:
            self.left, self.doubtful = dict(self.records), set()
            self.kept = [dict(self.here)]
        else:
            self.doubtful |= self.left.keys() | self.records.keys()
            self.kept = [*self.kept, dict(self.here)]

    @rule()
    def lose_power(self) -> None:
        self.turn += 1
        self.path = Path(self.scratch.name) / f"after {self.turn}"
        self.kernel = self.kernel.lose_power(self.path)
        self.files.close()
        self.go_on()

    @rule()
    def close(self) -> None:
        self.files.close()
        self.turn += 1
        self.kernel = PowerKernel(self.path)
        self.go_on()

    def go_on(self) -> None:
        self.files = self.open()
        self.records = {record.name: record for record in self.files.recovered()}
        self.left, self.doubtful = dict(self.records), set()
        self.retired = []
        found = {name: (int(record.note), record.slot.nbytes) for name, record in self.records.items()}
        assert found in self.kept
        self.here = found
        self.kept = [dict(found)]

    @invariant()
    def every_byte_is_right(self) -> None:
        for name, (seed, nbytes) in self.here.items():
            into = blank(nbytes)
            finish(self.files.read(self.records[name].slot, into))
            assert into.equal(buffer(nbytes, seed))


TestDurable = DurableMachine.TestCase
