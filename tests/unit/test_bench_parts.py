"""Pages that readers bring, at a small scale: that the figure can be measured, and sees wrong bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierstore as ts
from bench.command import Question, Settings
from bench.parts import BLOCK_BYTES, QUESTIONS, block, key_of, load, verify


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_each_question_yields_its_figure_with_details(question: Question, tmp_path: Path) -> None:
    figure = question(Settings(tmp_path, repeats=1, warmups=0, scale=0.005))
    assert QUESTIONS[figure.name] is question
    assert figure.reached > 0
    assert "preadv (pages/s)" in figure.details


def test_a_page_of_another_block_is_seen(tmp_path: Path) -> None:
    settings = Settings(tmp_path, repeats=1, warmups=0, scale=0.001)
    what = load(settings)
    with ts.Store(ts.StoreConfig([ts.TierConfig("disk", "memory", 8 * BLOCK_BYTES)])) as store:
        for number in range(what.blocks):
            store.put(key_of(number), block(number))
        with store.reader() as reader:
            reader.add(*store.keys())
            verify(reader, what)
        store.put(key_of(1), block(2), replace=True)
        with store.reader() as reader:
            reader.add(*store.keys())
            with pytest.raises(RuntimeError, match=r"of 'table/rows/log/1' is not what was put there"):
                verify(reader, what)
