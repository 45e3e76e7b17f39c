"""What happens to scratch files in a test of faults: a story that is told again for every call that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from tests.files_disk import PAGE, Nth, ScriptedKernel, blank, buffer, finish, open_files, outcome
from tierstore.spi import Completion
from tierstore.units import KIB, MIB
from tierstore_backends.files import FilesBackend
from tierstore_backends.files.io.io_request import FileSlot

BLOCK = 16 * KIB
SIZES = (1, PAGE + 1, 3 * BLOCK + 7, BLOCK, 300)
MISALIGNMENTS = (0, 64, 0, 1, 0)


class Story:
    """Slots of many kinds, written, read, freed and written again; every error is kept."""

    def __init__(self, files: FilesBackend) -> None:
        self._files = files
        self.errors: list[BaseException] = []
        self.slots: dict[FileSlot, int] = {}  # the seed of the bytes that were written
        self._seeds = itertools.count(1)

    def run(self) -> None:
        for _ in range(2):
            slots = [self._files.reserve(nbytes) for nbytes in SIZES]
            self.write(slots)
            self.read()
            for slot in slots[::2]:
                self.slots.pop(slot, None)
                finish(self._files.free(slot))

    def write(self, slots: list[FileSlot]) -> None:
        seeds = [next(self._seeds) for _ in slots]
        under_way = [
            self._files.write(slot, buffer(slot.nbytes, seed, misalignment=misalignment))
            for slot, seed, misalignment in zip(slots, seeds, MISALIGNMENTS, strict=False)
        ]
        for slot, seed, completion in zip(slots, seeds, under_way, strict=True):
            if self._went_well(completion):
                self.slots[slot] = seed
            else:
                self.slots.pop(slot, None)

    def read(self) -> None:
        rooms = {slot: blank(slot.nbytes) for slot in self.slots}
        under_way = {slot: self._files.read(slot, into) for slot, into in rooms.items()}
        for slot, completion in under_way.items():
            if self._went_well(completion):
                assert rooms[slot].equal(buffer(slot.nbytes, self.slots[slot]))

    def _went_well(self, completion: Completion) -> bool:
        error = outcome(completion)
        if error is not None:
            self.errors.append(error)
        return error is None


def at_every_call(
    tmp_path: Path,
    what: Callable[[int], int | None],
    *kinds: str,
    check: Callable[[Story], None],
    **options: object,
) -> int:
    """Run the story with ``what`` at the n-th call for every n; return how many calls there are."""
    for n in itertools.count(1):
        kernel = ScriptedKernel()
        files = open_files(
            tmp_path,
            MIB,
            syscalls=kernel,
            segment_bytes=64 * KIB,
            aio_block_size=BLOCK,
            threads=2,
            **options,  # type: ignore[arg-type]  # those of the backend, which checks them
        )
        twist = Nth(n, what, *kinds)
        kernel.twist = twist
        story = Story(files)
        story.run()
        kernel.twist = None
        check(story)
        story.errors.clear()
        story.read()
        story.write(list(story.slots))
        story.read()
        assert story.errors == []  # whatever happened is over
        files.close()
        assert list(tmp_path.iterdir()) == []
        if not twist.has_struck:
            return n - 1
    raise AssertionError


def no_error(story: Story) -> None:
    assert story.errors == []
