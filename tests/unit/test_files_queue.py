"""Which fragments of scratch transfers move together, and in what order."""

from __future__ import annotations

import torch

from tests.files_disk import PAGE
from tierstore_backends.files.engines.fragment_queue import BATCH_PIECES, FragmentQueue, FragmentQueues
from tierstore_backends.files.io.io_request import Direction, FileSlot, Fragment, IoRequest, cut

FAR = 1 << 40


def fragment(page: int, pages: int = 1, direction: Direction = Direction.READ) -> Fragment:
    """Return a fragment that lies at ``page``."""
    nbytes = pages * PAGE
    slot = FileSlot(nbytes, ((page * PAGE, page * PAGE + nbytes),), None, nbytes)
    transfer = IoRequest(direction, [slot], [torch.zeros(nbytes, dtype=torch.uint8)])
    (whole,) = cut(transfer, segment_bytes=FAR)
    return whole


def filled(*fragments: Fragment, batch_pages: int = 1000, segment_pages: int = 1 << 28) -> FragmentQueue:
    queue = FragmentQueue(batch_pages * PAGE, segment_pages * PAGE)
    for each in fragments:
        queue.put(each)
    return queue


def pages(batch: list[Fragment]) -> list[int]:
    return [each.address // PAGE for each in batch]


def drained(queue: FragmentQueue, most: int = 1000) -> list[list[int]]:
    """Take everything; return the pages of each batch."""
    batches = []
    while queue:
        batches.append(pages(queue.take(most)))
    assert queue.take(most) == []
    return batches


def test_strangers_go_one_by_one_in_the_order_they_came() -> None:
    assert drained(filled(fragment(9), fragment(1), fragment(5))) == [[9], [1], [5]]


def test_neighbours_go_together_in_file_order_whatever_the_order_they_came_in() -> None:
    assert drained(filled(fragment(5), fragment(9), fragment(4), fragment(6), fragment(3))) == [
        [3, 4, 5, 6],
        [9],
    ]


def test_a_batch_is_at_most_a_block_long() -> None:
    queue = filled(fragment(4), fragment(5, 2), fragment(7), fragment(3), fragment(2), batch_pages=4)
    assert drained(queue) == [[4, 5, 7], [2, 3]]
    assert drained(filled(fragment(4, 5), fragment(9), batch_pages=4)) == [[4], [9]]


def test_a_batch_has_at_most_as_many_fragments_as_may_be_handed_out() -> None:
    queue = filled(*(fragment(page) for page in range(7)))
    assert drained(queue, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    queue = filled(*(fragment(page) for page in reversed(range(7))))
    assert drained(queue, 3) == [[4, 5, 6], [1, 2, 3], [0]]
    assert drained(filled(fragment(2), fragment(1), fragment(3)), 2) == [[2, 3], [1]]


def test_a_batch_has_at_most_as_many_fragments_as_the_kernel_takes() -> None:
    queue = filled(*(fragment(page) for page in range(BATCH_PIECES + 1)))
    assert len(queue.take(10_000)) == BATCH_PIECES


def test_a_batch_lies_in_one_file() -> None:
    queue = filled(fragment(3), fragment(4), fragment(2), fragment(5), segment_pages=4)
    assert drained(queue) == [[2, 3], [4, 5]]


def test_two_reads_of_one_slot_both_come() -> None:
    first, second, neighbour = fragment(1), fragment(1), fragment(2)
    queue = filled(first, second, neighbour)
    assert queue.take(10) == [first, neighbour]
    assert queue.take(10) == [second]
    assert len(queue) == 0


def test_what_was_taken_along_does_not_come_again_and_may_be_put_again() -> None:
    first, along = fragment(1), fragment(2)
    queue = filled(first, along)
    assert queue.take(10) == [first, along]
    queue.put(along)
    assert queue.take(10) == [along]
    assert len(queue) == 0


def test_a_read_goes_before_a_write_that_came_earlier() -> None:
    queues = FragmentQueues(1000 * PAGE, FAR)
    assert not queues
    queues.put([fragment(1, direction=Direction.WRITE)])
    assert queues
    queues.put([fragment(8), fragment(9)])
    assert pages(queues.take(1)) == [8]
    assert pages(queues.take(5)) == [9]
    assert pages(queues.take(5)) == [1]
    assert not queues
    queues.put([fragment(3)])
    assert queues
    assert pages(queues.take(5)) == [3]
    assert queues.take(5) == []
