"""Every call of the liburing package that `ring` makes, once: for a process of its own, which may die of it.

See `tierstore.alone`.  Imports nothing of ours.  That a call raises is no matter here: `ring` meets it, too.
"""

from __future__ import annotations

import importlib
import os


def use() -> None:
    """Let a ring do nothing, and look at how it went."""
    uring = importlib.import_module("liburing")
    ring = uring.Ring()
    uring.io_uring_queue_init(2, ring)
    signal = os.eventfd(0, os.EFD_CLOEXEC)
    uring.io_uring_register_eventfd(ring, signal)
    entry = uring.io_uring_get_sqe(ring)
    uring.io_uring_prep_nop(entry)
    uring.io_uring_sqe_set_data64(entry, 1)
    uring.io_uring_submit(ring)
    ended = uring.Cqe()
    for _ in range(uring.io_uring_cq_ready(ring)):  # doing nothing is done when it is submitted
        uring.io_uring_peek_cqe(ring, ended)
        for result in ("user_data", "res"):
            getattr(ended[0], result)
        uring.io_uring_cq_advance(ring, 1)
    uring.io_uring_queue_exit(ring)
    os.close(signal)


use()
