"""Who calls is found out without a trace in the functions of the program."""

from __future__ import annotations

import copy
import weakref

from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD


def test_what_a_function_deletes_is_gone_although_its_table_was_copied() -> None:
    table = EmbeddingTable(4, 2)
    optimizer = SGD(table.parameters(), lr=0.1)
    copy.deepcopy(table)
    seen = weakref.ref(optimizer)
    del optimizer
    assert seen() is None
    SGD(table.parameters(), lr=0.1)
