"""The log of a table: pages that were written, in blocks that are never changed.

Rule 1: a block is put whole, under a name that no block had before, and is dropped when no page in it is
current and no snapshot counts on it.
Rule 2: a page's place changes when the block that holds its new bytes has been put, so a put that fails
loses nothing. Rule 3: a page is compared with its check when it is read; the medium checks blocks, if
anything. Rule 4: blocks that a snapshot named stay until a later one is `keep`t, so what was flushed can be
read back, whatever was written and flushed after it.

Puts and reads may be called from other threads; the books are kept in the caller's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
import xxhash

from tierstore.errors import IntegrityError, TierStoreError
from tierstore.tables.layout import PAGE_BYTES, Column, Indices, PageLayout
from tierstore.tables.page_map import NOWHERE, Checks, Logged, PageMap
from tierstore.tables.page_numbers import Numbers, Pages
from tierstore.units import MIB

BLOCK_BYTES: Final = 4 * MIB

NO_NUMBERS: Final[Numbers] = np.zeros(0, dtype=np.int64)

_BLOCKS_AT_A_TIME: Final = 16  # that a compaction empties: it looks at the whole map
_INDEX_BITS: Final = 20  # a place is a block's number, and in so many bits which of its pages
_LAST_INDEX: Final = (1 << _INDEX_BITS) - 1
_SPARE: Final = "spare"
_VERSION: Final = 1  # of what a snapshot is as a tensor
_HEAD: Final = 5  # numbers before its arrays
_BLOCKS_WITHOUT_SPARE: Final = 4


class BlockMedium(Protocol):
    """What keeps blocks: bytes under names.  Any method may be called in any thread."""

    def put(self, name: str, block: torch.Tensor) -> None:
        """Keep ``block``, uint8, under a name that nothing is under.  Blocks.

        Raises:
            CapacityError: there is no room.
            BackendError: the medium failed.  In either case nothing is under the name.
        """
        ...

    def read(self, parts: Mapping[str, Indices], into: torch.Tensor) -> None:
        """Read parts of blocks, all of one length.  Blocks.

        Args:
            parts: for each block, where in it parts begin: multiples of 4096.
            into: uint8 ``[parts, nbytes]``, contiguous, the parts in their order; ``nbytes`` is a multiple of
                4096.

        Raises:
            BackendError: the medium failed; what is in ``into`` is whatever.
        """
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Forget blocks."""
        ...

    def drop_others(self, prefix: str, names: Collection[str]) -> None:
        """Forget what is under names that begin with ``prefix``, but for ``names``."""
        ...

    def room(self) -> str:
        """Say for a message how much is free of how much."""
        ...

    def close(self) -> None:
        """Hold nothing any more; the blocks stay.  Idempotent."""
        ...


@dataclass(frozen=True)
class PageBlock:
    """Pages on their way to the log.

    Attributes:
        number: of the block.
        name: on the medium.
        content: uint8 ``[pages, stored bytes]``.
        pages: those in it.
        checks: of each.
    """

    number: int
    name: str
    content: torch.Tensor
    pages: Pages
    checks: Checks


@dataclass(frozen=True)
class Snapshot:
    """A table as its log has it: what has to be kept beside the blocks for it to be found again.

    Attributes:
        num_rows: of the table.
        columns: of the table.
        blocks: the names of the blocks that it counts on.
        numbers: int64 ``[blocks]``, of the same blocks.
        sizes: int64 ``[blocks]``, pages in each.
        pages: int64 ``[n]``, those that were ever written, ascending.
        places: int64 ``[n]``, where each is.
        checks: int64 ``[n]``, of the bytes of each.
        next_block: the number of the block that comes next.
    """

    num_rows: int
    columns: tuple[Column, ...]
    blocks: tuple[str, ...]
    numbers: torch.Tensor
    sizes: torch.Tensor
    pages: torch.Tensor
    places: torch.Tensor
    checks: torch.Tensor
    next_block: int

    def as_tensor(self) -> torch.Tensor:
        """Return all of it but columns and names in one tensor, int64; see `from_tensor`."""
        head = torch.tensor(
            [_VERSION, self.num_rows, self.next_block, len(self.numbers), len(self.pages)], device="cpu"
        )
        return torch.cat([head, self.numbers, self.sizes, self.pages, self.places, self.checks])

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, prefix: str, columns: Sequence[Column]) -> Snapshot:
        """Return what `as_tensor` has put into a tensor.

        Args:
            tensor: that was kept.
            prefix: of the names of the log's blocks.
            columns: of the table.

        Raises:
            IntegrityError: it is not such a tensor.
        """
        head = tensor[:_HEAD].tolist()
        if len(head) < _HEAD or head[0] != _VERSION or len(tensor) != _HEAD + 2 * head[3] + 3 * head[4]:
            raise IntegrityError(f"the map of {prefix!r} is not one: it begins with {head}, of {len(tensor)}")
        _, num_rows, next_block, blocks, pages = head
        parts = tensor[_HEAD:].split([blocks, blocks, pages, pages, pages])
        names = tuple(f"{prefix}{number}" for number in parts[0].tolist())
        numbers, sizes, written, places, checks = parts
        return cls(num_rows, tuple(columns), names, numbers, sizes, written, places, checks, next_block)


@dataclass(frozen=True)
class LogPlace:
    """Where the log of a table is to lie.

    Attributes:
        medium: that keeps blocks; of this table alone, which closes it in its end.
        prefix: of the names of blocks; nothing else on the medium begins with it.
        block_bytes: of a full block; at least one page is in it.
    """

    medium: BlockMedium
    prefix: str
    block_bytes: int = BLOCK_BYTES


class PageLog:
    """See the module.

    Args:
        place: where it lies.
        layout: of a page.
        page_map: that has the place of each page.
        before: a log before this one; if it lay in the same place, its numbers are not given again, and its
            blocks that snapshots count on are dropped when these do not any more.

    Attributes:
        next: the number of the next block.
        pages_per_block: of a full one.
        bytes_read: from the medium; padding counts.
        bytes_written: likewise.
        pages_compacted: that were copied from block to block.
    """

    def __init__(
        self, place: LogPlace, layout: PageLayout, page_map: PageMap, before: PageLog | None = None
    ) -> None:
        self.place = place
        self.next = 0
        self.stored_bytes = -(-layout.page_bytes // PAGE_BYTES) * PAGE_BYTES
        self.pages_per_block = min(max(1, place.block_bytes // self.stored_bytes), 1 << _INDEX_BITS)
        self.bytes_read = 0
        self.bytes_written = 0
        self.pages_compacted = 0
        self._layout = layout
        self._map = page_map
        # By number of a block.  While a block is there, it has pages, some of which are current.
        self._sizes = np.zeros(0, dtype=np.int64)
        self._current = np.zeros(0, dtype=np.int64)
        self._kept = NO_NUMBERS  # by snapshots
        self._asked = NO_NUMBERS  # by a snapshot that is not kept yet
        self._has_spare = False
        if before is not None and (before.place.medium, before.place.prefix) == (place.medium, place.prefix):
            self._go_on_from(before)

    def _go_on_from(self, before: PageLog) -> None:
        self.next = before.next
        self._make_room(self.next)
        self._kept = before._counted_on()
        self._sizes[self._kept] = 1  # none of their pages is current here

    # --- what was written ----------------------------------------------------------------------

    @property
    def current_pages(self) -> int:
        """How many pages are in the log, of each the newest."""
        return int(self._current.sum())

    @property
    def dead_pages(self) -> int:
        """How many pages in blocks that are there have newer ones."""
        return int(self._sizes.sum() - self._current.sum())

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return int(np.count_nonzero(self._sizes))

    def read(self, logged: Logged) -> torch.Tensor:
        """Return the bytes of pages: uint8 ``[n, page_bytes]``.  Blocks; in any thread.

        Pages are in the order of their places.  The caller counts them, as `bytes_read`.

        Raises:
            BackendError: the medium failed; `IntegrityError` if a page came back different.
        """
        numbers, begins = logged.places >> _INDEX_BITS, (logged.places & _LAST_INDEX) * self.stored_bytes
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        names = [self._name(number) for number in numbers[firsts].tolist()]
        parts = dict(zip(names, np.split(begins, firsts[1:]), strict=True))
        stored = torch.empty(len(begins), self.stored_bytes, dtype=torch.uint8, device="cpu")
        self.place.medium.read(parts, stored)
        contents = stored[:, : self._layout.page_bytes].contiguous()
        wrong = np.flatnonzero(_checks_of(contents) != logged.checks)
        if len(wrong):
            first = wrong[0]
            name = self._name(int(numbers[first]))
            raise IntegrityError(
                f"page {logged.pages[first]} in {name!r} at byte {begins[first]} is not what was written; "
                f"likewise {len(wrong)} of {len(begins)} pages",
                key=name,
            )
        return contents

    # --- writing -------------------------------------------------------------------------------

    def pack(self, pages: Pages, contents: torch.Tensor) -> PageBlock:
        """Return a block of pages, at most `pages_per_block`.

        Args:
            pages: distinct.
            contents: of them, uint8 ``[n, page_bytes]``, contiguous.
        """
        stored = torch.zeros(len(pages), self.stored_bytes, dtype=torch.uint8, device="cpu")
        stored[:, : self._layout.page_bytes] = contents
        number = self.next
        self.next += 1
        return PageBlock(number, self._name(number), stored, pages, _checks_of(contents))

    def put(self, block: PageBlock) -> None:
        """Write a block.  Blocks; in any thread.

        Raises:
            CapacityError: there is no room.
            BackendError: the medium failed.  In either case nothing is where the block would have been.
        """
        self.place.medium.put(block.name, block.content.reshape(-1))

    def record(self, block: PageBlock) -> None:
        """Let the pages of a block that has been put be the current ones."""
        self._make_room(block.number + 1)
        before = self._map.places_of(block.pages)
        numbers, counts = np.unique(before[before != NOWHERE] >> _INDEX_BITS, return_counts=True)
        self._current[numbers] -= counts
        self._sizes[block.number] = self._current[block.number] = len(block.pages)
        places = (block.number << _INDEX_BITS) + np.arange(len(block.pages))
        self._map.set_logged(Logged(block.pages, places, block.checks))
        self.bytes_written += block.content.numel()

    def drop_dead(self) -> None:
        """Drop the blocks that nobody needs any more."""
        dead = np.flatnonzero((self._current == 0) & (self._sizes > 0))
        dead = dead[~np.isin(dead, self._counted_on())]
        if len(dead):
            self._sizes[dead] = 0
            self.place.medium.drop([self._name(number) for number in dead.tolist()])

    def drop_all(self) -> None:
        """Drop all blocks but those that a snapshot counts on: nobody asks for the pages any more."""
        self._current[:] = 0
        self.drop_dead()
        self._drop_spare()

    # --- room ----------------------------------------------------------------------------------

    @property
    def is_wasteful(self) -> bool:
        """Whether more than half of the pages, and more than a block of them, is dead and could go."""
        there = self._sizes.copy()
        there[self._counted_on()] = 0
        dead = int(np.where(there > 0, there - self._current, 0).sum())
        return dead > self.pages_per_block and dead * 2 > int(self._sizes.sum())

    def compact(self) -> int:
        """Copy what is current of the emptiest blocks to new ones, and drop those.  Blocks.

        Returns:
            how many dead pages went.

        Raises:
            CapacityError: there is no room for the copy.
            BackendError: the medium failed.  In either case no page is lost.
        """
        before = self.dead_pages
        for logged in self._in_emptiest_blocks():
            block = self.pack(logged.pages, self.read(logged))
            self.bytes_read += len(logged.pages) * self.stored_bytes
            self.put(block)
            self.record(block)
            self.drop_dead()
            self.pages_compacted += len(logged.pages)
        return before - self.dead_pages

    def make_room(self) -> int:
        """Compact where the medium is full, with the room that was put by for it; see `compact`."""
        self._drop_spare()
        try:
            return self.compact()
        finally:
            self.put_by()

    def put_by(self) -> None:
        """Take room for one more block, with which a full medium can be compacted; not for a small log."""
        if not self._has_spare and self._sizes.sum() >= _BLOCKS_WITHOUT_SPARE * self.pages_per_block:
            spare = torch.zeros(self.pages_per_block * self.stored_bytes, dtype=torch.uint8, device="cpu")
            with contextlib.suppress(TierStoreError):  # then it cannot
                self.place.medium.put(self._name(_SPARE), spare)
                self._has_spare = True

    def _drop_spare(self) -> None:
        if self._has_spare:
            self._has_spare = False
            self.place.medium.drop([self._name(_SPARE)])

    def _in_emptiest_blocks(self) -> Iterator[Logged]:
        """Yield what is current in the emptiest blocks, a block of pages at a time."""
        waste = self._sizes - self._current
        waste[self._counted_on()] = 0
        wasteful = np.flatnonzero(waste)
        share = self._current[wasteful] / self._sizes[wasteful]
        chosen = wasteful[np.argsort(share, kind="stable")][:_BLOCKS_AT_A_TIME]
        logged = self._map.logged()
        numbers = logged.places >> _INDEX_BITS
        rank = np.full(len(self._sizes), len(chosen))
        rank[chosen] = np.arange(len(chosen))
        moving = np.flatnonzero(rank[numbers] < len(chosen))
        moving = moving[np.argsort(rank[numbers[moving]], kind="stable")]
        for begin in range(0, len(moving), self.pages_per_block):
            part = moving[begin : begin + self.pages_per_block]
            yield logged.only(part[np.argsort(logged.places[part])])

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self, num_rows: int) -> Snapshot:
        """Return what the log has now; its blocks stay until another snapshot is `keep`t."""
        logged = self._map.logged()
        numbers = np.unique(logged.places >> _INDEX_BITS)
        self._asked = numbers
        return Snapshot(
            num_rows,
            self._layout.columns,
            tuple(self._name(number) for number in numbers.tolist()),
            torch.from_numpy(numbers),
            torch.from_numpy(self._sizes[numbers]),
            torch.from_numpy(logged.pages),
            torch.from_numpy(logged.places),
            torch.from_numpy(logged.checks.astype(np.int64)),
            self.next,
        )

    def keep(self, snapshot: Snapshot) -> None:
        """Let blocks stay that ``snapshot`` counts on, and no others for the sake of snapshots."""
        self._kept, self._asked = snapshot.numbers.numpy(), NO_NUMBERS
        self.drop_dead()

    def restore(self, snapshot: Snapshot) -> None:
        """Let the map, which is empty, and the log be those of ``snapshot``, which is kept."""
        numbers, places = snapshot.numbers.numpy(), snapshot.places.numpy()
        self.next = snapshot.next_block
        self._make_room(self.next)
        self._sizes[numbers] = snapshot.sizes.numpy()
        held, counts = np.unique(places >> _INDEX_BITS, return_counts=True)
        self._current[held] = counts
        self._kept = numbers
        self._map.set_logged(
            Logged(snapshot.pages.numpy(), places, snapshot.checks.numpy().astype(np.uint32))
        )

    def _counted_on(self) -> Numbers:
        return np.union1d(self._kept, self._asked)

    def _name(self, number: int | str) -> str:
        return f"{self.place.prefix}{number}"

    def _make_room(self, blocks: int) -> None:
        if blocks > len(self._sizes):
            self._sizes = np.concatenate([self._sizes, np.zeros(blocks, dtype=np.int64)])
            self._current = np.concatenate([self._current, np.zeros(blocks, dtype=np.int64)])


def _checks_of(contents: torch.Tensor) -> Checks:
    """Return the checks of pages, uint8 ``[n, page_bytes]``."""
    checks = np.fromiter(map(xxhash.xxh3_64_intdigest, contents.numpy()), np.uint64, len(contents))
    return checks.astype(np.uint32)  # the lower half
