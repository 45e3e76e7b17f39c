"""The picture at the beginning of the README: of a run that is kept beside it, and drawn anew to the byte."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_job import command_line, read_job
from llama_picture import draw
from llama_record import RunRecord, TierRecord, by_step, read_record
from tests.docs.blocks import ROOT
from tests.docs.test_examples import TINY
from train_llama import main

_RECORD = ROOT / "docs" / "examples" / "pictures" / "train_llama.json"
_PICTURE = _RECORD.with_suffix(".svg")

_SIZES = st.integers(1, 2**50)
_RECORDS = st.builds(
    RunRecord,
    model=st.text(max_size=20),
    parameters=_SIZES,
    state_bytes=_SIZES,
    budget_bytes=_SIZES,
    ended_by=st.none() | st.text(max_size=20),
    offloaded=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
    unlimited=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
    is_equal=st.booleans(),
    peak_bytes=_SIZES,
    tiers=st.lists(st.builds(TierRecord, st.text(max_size=5), _SIZES, _SIZES), min_size=1, max_size=3),
    memory=st.lists(st.tuples(st.floats(0, 5), _SIZES), max_size=5),
)


def test_the_picture_is_that_of_the_run_that_is_kept() -> None:
    assert _PICTURE.read_bytes() == draw(read_record(_RECORD)).encode()


def test_the_readme_begins_with_it() -> None:
    beginning = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", beginning)
    assert shown == [str(_PICTURE.relative_to(ROOT))]


def test_what_is_kept_is_a_run_of_the_job_that_make_run_does(tmp_path: Path) -> None:
    job, record = (
        read_job(command_line().parse_args(["--device", "emulated"]), tmp_path),
        read_record(_RECORD),
    )
    assert (record.state_bytes, record.budget_bytes) == (job.state_bytes, job.budget_bytes)
    assert record.parameters == job.shape.parameters
    assert len(record.offloaded) == len(job.batches)
    quotas = {tier.name: tier.capacity_bytes for tier in job.config.store_config().tiers}
    assert {tier.name: tier.quota_bytes for tier in record.tiers} == quotas


def test_what_is_kept_is_as_it_was_promised() -> None:
    record = read_record(_RECORD)
    assert record.is_equal
    assert list(record.offloaded) == list(record.unlimited)
    assert record.ended_by is not None
    assert max(nbytes for _, nbytes in record.memory) <= record.peak_bytes <= record.budget_bytes
    assert len(record.memory) > 5 * len(record.offloaded)


def test_the_example_writes_and_draws_what_came_of_it(tmp_path: Path) -> None:
    record, picture = tmp_path / "new" / "run.json", tmp_path / "new" / "run.svg"
    assert main([*TINY, "--record", str(record), "--picture", str(picture)]) == 0
    found = read_record(record)
    assert picture.read_text(encoding="utf-8") == draw(found)
    assert found.is_equal
    assert len(found.offloaded) == 3
    assert [tier.name for tier in found.tiers] == ["device", "host", "disk"]


@given(_RECORDS)
def test_a_picture_is_svg_whatever_came_of_a_run(record: RunRecord) -> None:
    printable = "".join(each for each in record.model if each.isprintable())
    text = draw(
        replace(record, model=printable, tiers=[replace(tier, name="device") for tier in record.tiers])
    )
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    numbers = [float(each) for each in re.findall(r'(?:x|y|width|height)="(-?[\d.]+)"', text)]
    assert all(-1 <= number <= 961 for number in numbers)


def test_another_bit_is_another_picture() -> None:
    record = read_record(_RECORD)
    other = replace(record, is_equal=False)
    assert draw(other) != draw(record)
    assert "DIFFERENT" in draw(other)


@pytest.mark.parametrize(
    ("samples", "step_s", "found"),
    [
        ([], [1.0], []),
        ([(0.0, 5), (0.001, 7), (0.5, 3)], [1.0], [(0.5 / 24, 7), (12.5 / 24, 3)]),
        ([(0.0, 5), (1.5, 9), (9.0, 1)], [1.0, 1.0], [(0.5 / 24, 5), (24 * 1.5 / 24 + 0.5 / 24, 9)]),
    ],
)
def test_samples_are_the_largest_of_each_part_of_a_step(
    samples: list[tuple[float, int]], step_s: list[float], found: list[tuple[float, int]]
) -> None:
    by = by_step(samples, step_s)
    assert [at for at, _ in by] == pytest.approx([at for at, _ in found])
    assert [nbytes for _, nbytes in by] == [nbytes for _, nbytes in found]
