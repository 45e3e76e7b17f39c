"""The peers of tables: the same rows from each, and what a step of theirs is held against."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.peers import command, table_peers, tables
from bench.peers.table_peers import ADAGRAD, ADAM, FBGEMM, OURS, PEERS, PLAIN, Work
from bench.peers.tables import CLOSE, Stepped, TableSettings, compare_rows
from bench.peers.turns import Turns
from bench.peers.usage import Usage
from bench.peers.workers import Absent
from bench.record import Verdict
from tests.sampling import too_long_for_ci

WORK = Work(rows=5000, width=8, ids=256, exponent=1.05, optimizer=ADAM)


def _stepped(seconds: float = 1.0, *, touched: int = 3, digest: str = "a", value: float = 0.0) -> Stepped:
    return Stepped(Turns(1, [Usage(seconds, seconds, 0, 0)], 0, 0), touched, digest, [[value, 1.0]])


def _stepped_rows(name: str, optimizer: str) -> torch.Tensor:
    work = replace(WORK, optimizer=optimizer)
    table = PEERS[name](work)
    batches = work.batches()
    for _ in range(3):
        table.step(*next(batches))
    return table.rows(torch.arange(work.rows))


# ---------------------------------------------------------------------- the peers


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [ADAM, ADAGRAD])
def test_ours_and_pytorch_end_with_the_same_rows_and_have_changed_some(optimizer: str) -> None:
    ours, plain = (_stepped_rows(name, optimizer) for name in (OURS, PLAIN))
    assert torch.equal(ours, plain)
    first = WORK.table().rows(torch.arange(WORK.rows))
    changed = (ours != first).any(1).sum()
    assert 100 < changed < WORK.rows / 2


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="fbgemm is not installed")
def test_fbgemm_ends_with_rows_that_are_as_close_as_rounding() -> None:
    assert torch.allclose(_stepped_rows(FBGEMM, ADAGRAD), _stepped_rows(PLAIN, ADAGRAD), rtol=0, atol=CLOSE)


def test_fbgemm_has_no_adam_on_the_cpu() -> None:
    with pytest.raises(Absent, match="no adam on the CPU"):
        PEERS[FBGEMM](WORK)


@pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is not None, reason="fbgemm is installed")
def test_fbgemm_that_is_not_there_says_what_would_help() -> None:
    with pytest.raises(Absent, match="pip install --no-deps fbgemm-gpu-cpu"):
        PEERS[FBGEMM](replace(WORK, optimizer=ADAGRAD))


def test_every_peer_is_asked_for_the_same_batches_whose_ids_are_skewed() -> None:
    first, again = WORK.batches(), WORK.batches()
    for _ in range(3):
        (ids, gradient), (same_ids, same_gradient) = next(first), next(again)
        assert torch.equal(ids, same_ids)
        assert torch.equal(gradient, same_gradient)
        assert ids.shape == (16, table_peers.BAG)
        assert 0 <= ids.min() <= ids.max() < WORK.rows
    counts = np.bincount(torch.cat([next(first)[0].flatten() for _ in range(20)]), minlength=WORK.rows)
    assert counts.max() > 20 * counts.mean()


def test_a_peer_tells_the_rows_that_it_touched() -> None:
    steps = table_peers.open_subject(OURS)
    steps("prepare", TableSettings(Path(), rows=5000, width=8, ids=256).job(ADAM))
    assert steps("turn", {"steps": 2})["steps"] == 2
    end = steps("finish", {})
    touched = len(
        torch.cat([ids.flatten() for (ids, _), _ in zip(WORK.batches(), range(2), strict=False)]).unique()
    )
    assert end["touched"] == touched


# ---------------------------------------------------------------------- what it comes to


def test_rows_of_ours_and_pytorch_have_to_be_equal_in_every_bit() -> None:
    compare_rows({OURS: _stepped(), PLAIN: _stepped()})
    with pytest.raises(AssertionError, match="tierstore and pytorch differ"):
        compare_rows({OURS: _stepped(), PLAIN: _stepped(digest="b")})


def test_rows_of_another_library_may_round_otherwise_but_not_differ() -> None:
    compare_rows({PLAIN: _stepped(), FBGEMM: _stepped(digest="b", value=CLOSE / 2)})
    for value in (2 * CLOSE, float("nan")):
        with pytest.raises(AssertionError, match="a row of fbgemm differs"):
            compare_rows({PLAIN: _stepped(), FBGEMM: _stepped(digest="b", value=value)})


def test_whoever_touched_other_rows_did_other_work() -> None:
    with pytest.raises(AssertionError, match="not all touched the same rows"):
        compare_rows({OURS: _stepped(), PLAIN: _stepped(touched=4)})


def test_a_step_is_held_against_pytorch_with_adam_and_fbgemm_with_adagrad() -> None:
    found = {
        ADAM: {OURS: _stepped(0.9), PLAIN: _stepped(1.0)},
        ADAGRAD: {OURS: _stepped(3.2), PLAIN: _stepped(1.0), FBGEMM: _stepped(2.0)},
    }
    pytorch, fbgemm = tables.figures(found)
    assert (pytorch.name, pytorch.reached, pytorch.verdict) == ("peers-table-pytorch", 0.9, Verdict.BAR)
    assert (fbgemm.name, fbgemm.reached, fbgemm.verdict) == ("peers-table-fbgemm", 1.6, Verdict.MISSED)
    assert [figure.name for figure in tables.figures({ADAM: found[ADAM], ADAGRAD: {}})] == [pytorch.name]


def test_ids_that_fill_no_bags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a multiple of that, not 100"):
        TableSettings(tmp_path, ids=100)


@too_long_for_ci
def test_all_of_it_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tables", "--peers", f"{OURS},{PLAIN}", "--repeats", "1", "--warmups", "0", "--steps", "1"]
    words += ["--rows", "5000", "--ids", "256", "--path", str(tmp_path)]
    assert command.main(words) in (0, 1)  # a bar may be missed at this size
    text = capsys.readouterr().out
    assert "a step, adam" in text
    assert "a step, adagrad" in text
    assert "peers-table-pytorch" in text
