"""Scratch files against a dict: any sizes, any buffers, any order, many at a time."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.files_disk import PAGE, blank, buffer, disk_taken, finish, open_files
from tierstore.errors import CapacityError
from tierstore.units import KIB, MIB, align_up
from tierstore_backends.files.io.io_request import FileSlot

CAPACITY = 768 * KIB
SIZES = st.one_of(
    st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 16 * KIB, 64 * KIB]),
    st.integers(0, 3 * PAGE),
    st.integers(0, 200 * KIB),
)
MISALIGNMENTS = st.sampled_from([0, 0, 512, 64, 1])


class FilesMachine(RuleBasedStateMachine):
    """Batches of operations under way together; the bytes of each slot are remembered."""

    @initialize(
        direct=st.sampled_from(["auto", False]),
        enable_aio=st.sampled_from([True, True, False]),
        checksum=st.booleans(),
        threads=st.integers(1, 4),
        depth=st.sampled_from([1, 2, 1024]),
        block=st.sampled_from([PAGE, 16 * KIB, MIB]),
        segment=st.sampled_from([64 * KIB, 256 * KIB, 64 * MIB]),
    )
    def open(
        self,
        *,
        direct: object,
        enable_aio: bool,
        checksum: bool,
        threads: int,
        depth: int,
        block: int,
        segment: int,
    ) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="files-machine-"))
        self.capacity = CAPACITY
        self.files = open_files(
            self.path / "scratch",
            self.capacity,
            segment_bytes=segment,
            quiet_s=0.0,
            direct=direct,
            enable_aio=enable_aio,
            checksum=checksum,
            threads=threads,
            aio_queue_depth=depth,
            aio_block_size=block,
        )
        self.alignment = self.files.capabilities.alignment_bytes
        self.slots: dict[FileSlot, torch.Tensor | None] = {}
        self.seed = 0

    def teardown(self) -> None:
        if hasattr(self, "files"):
            self.everything_is_there()
            self.files.close()
            assert list(self.path.iterdir()) == []
            shutil.rmtree(self.path)

    def charged(self) -> int:
        return sum(align_up(slot.nbytes, self.alignment) for slot in self.slots)

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=12))
    def reserve(self, sizes: list[int]) -> None:
        for nbytes in sizes:
            fits = align_up(nbytes, self.alignment) <= self.capacity - self.charged()
            try:
                self.slots[self.files.reserve(nbytes)] = None
            except CapacityError:
                assert not fits
            else:
                assert fits

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), misalignment=MISALIGNMENTS)
    def write_and_read(self, data: st.DataObject, misalignment: int) -> None:
        """Write some slots and read others at the same time."""
        order = data.draw(st.permutations(list(self.slots)))
        under_way = []
        expected = []
        for slot in order[: data.draw(st.integers(1, len(order)))]:
            old = self.slots[slot]
            if old is not None and data.draw(st.booleans()):
                into = blank(slot.nbytes, misalignment=misalignment)
                under_way.append(self.files.read(slot, into))
                expected.append((old, into))
            else:
                self.seed += 1
                source = buffer(slot.nbytes, self.seed, misalignment=misalignment)
                self.slots[slot] = source
                under_way.append(self.files.write(slot, source))
        finish(*under_way)
        assert all(old.equal(into) for old, into in expected)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for slot in data.draw(st.lists(st.sampled_from(list(self.slots)), unique_by=id, min_size=1)):
            del self.slots[slot]
            finish(self.files.free(slot))

    @rule(capacity=st.integers(0, 2 * CAPACITY))
    def resize(self, capacity: int) -> None:
        if self.charged() <= capacity - capacity % self.alignment:
            self.files.resize(capacity)
            self.capacity = capacity - capacity % self.alignment

    @rule()
    def everything_is_there(self) -> None:
        kept = [(slot, old) for slot, old in self.slots.items() if old is not None]
        rooms = [blank(slot.nbytes) for slot, _ in kept]
        finish(*(self.files.read(slot, into) for (slot, _), into in zip(kept, rooms, strict=True)))
        assert all(old.equal(into) for (_, old), into in zip(kept, rooms, strict=True))

    @invariant()
    def the_disk_holds_no_more_than_the_capacity(self) -> None:
        if hasattr(self, "files"):
            assert disk_taken(self.path / "scratch") <= self.capacity


TestFiles = FilesMachine.TestCase


@given(
    nbytes=st.integers(0, 3 * MIB),
    block=st.integers(1, 256 * KIB),
    misalignments=st.tuples(st.integers(0, PAGE), st.integers(0, PAGE)),
)
def test_any_bytes_come_back_from_any_cut(nbytes: int, block: int, misalignments: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as path:
        files = open_files(Path(path), 4 * MIB, aio_block_size=block)
        slot = files.reserve(nbytes)
        source = buffer(nbytes, 1, misalignment=misalignments[0])
        finish(files.write(slot, source))
        into = blank(nbytes, misalignment=misalignments[1])
        finish(files.read(slot, into))
        assert into.equal(source)
        files.close()
