"""Job files: their form, their values as fio itself reads them, and what is wrong with them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fio import values
from bench.fio.jobfile import Entry, JobFileError, Section, parse, print_file, raw_jobs, read
from bench.fio.values import ValueFaultError

FIO = shutil.which("fio")
needs_fio = pytest.mark.skipif(FIO is None, reason="fio is not installed")

_keys = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(lambda key: key != "include")
_values = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S"), exclude_characters=";#$["), max_size=20
)
_names = st.from_regex(r"[A-Za-z0-9_.,:-]{1,20}", fullmatch=True)


def _entry(key: str, value: str | None) -> Entry:
    return Entry(key, value or "", has_value=value is not None)


_sections = st.lists(
    st.builds(
        lambda name, entries: Section(name, tuple(entries)),
        _names,
        st.lists(st.builds(_entry, _keys, st.none() | _values), max_size=8),
    ),
    max_size=6,
)


@given(_sections)
def test_what_is_printed_is_read_back_the_same(sections: list[Section]) -> None:
    assert parse(print_file(sections), environment={}) == sections


def test_a_job_inherits_from_the_globals_above_it_only() -> None:
    text = "[global]\na=1\nb=1\n[first]\nb=2\n[global]\nc=3\n[second]\n"
    first, second = raw_jobs(parse(text))
    assert {key: entry.value for key, entry in first.entries().items()} == {"a": "1", "b": "2"}
    assert {key: entry.value for key, entry in second.entries().items()} == {"a": "1", "b": "1", "c": "3"}


def test_comments_go_from_a_semicolon_or_hash_to_the_end_of_the_line() -> None:
    (section,) = parse("; all\n# of it\n[x]\nbs=4k ; the block\nrw=read# too\n")
    assert [str(entry) for entry in section.entries] == ["bs=4k", "rw=read"]


def test_variables_come_from_the_environment() -> None:
    (section,) = parse("[x]\nsize=${SIZE}m\n", environment={"SIZE": "3"})
    assert section.entries[0].value == "3m"


def test_an_included_file_stands_where_it_is_included(tmp_path: Path) -> None:
    (tmp_path / "more.fio").write_text("bs=8k\n[y]\n")
    (tmp_path / "job.fio").write_text("[x]\ninclude more.fio\nrw=read\n")
    # An included file begins anew: a key before its first section belongs to the one above.
    first, second = read(tmp_path / "job.fio")
    assert [str(entry) for entry in first.entries] == ["bs=8k"]
    assert [str(entry) for entry in second.entries] == ["rw=read"]


def test_a_file_that_includes_itself_ends_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "job.fio").write_text("[x]\ninclude job.fio\n")
    with pytest.raises(JobFileError, match="16 files deep"):
        read(tmp_path / "job.fio")


def test_every_fault_of_a_file_is_named_with_its_line() -> None:
    text = "a=1\n[x\n[y]\nbs= 4k\n=3\nsize=${NOWHERE}\n"
    with pytest.raises(JobFileError) as caught:
        parse(text, "j.fio", environment={})
    places = [fault.split(" ")[0] for fault in caught.value.faults]
    assert places == ["j.fio:1:", "j.fio:2:", "j.fio:4:", "j.fio:5:", "j.fio:6:"]


def test_a_file_that_is_not_there_is_an_error_of_the_job_file(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"none\.fio: cannot be read"):
        read(tmp_path / "none.fio")


# ---------------------------------------------------------------------- values


def _as_fio_reads(key: str, text: str, path: Path) -> int:
    """Ask fio itself."""
    path.write_text(f"[x]\n{key}={text}\n")
    said = subprocess.run(
        ["fio", "--parse-only", "--debug=parse", str(path)], capture_output=True, text=True, check=False
    )
    found = re.search(r"ret=0, out=(\d+)", said.stdout)
    assert found, said.stdout + said.stderr
    return int(found[1])


@needs_fio
@pytest.mark.parametrize(
    "text", ["4096", "4k", "4K", "4kb", "1m", "1mb", "1mi", "0x1000", "3g", "2t", "1p", "512b"]
)
def test_a_size_is_what_fio_reads(text: str, tmp_path: Path) -> None:
    assert values.size(text) == _as_fio_reads("io_size", text, tmp_path / "x.fio")


@needs_fio
@pytest.mark.parametrize("text", ["10", "10s", "100ms", "2m", "1h", "500us", "7msec", "1d"])
def test_a_time_is_what_fio_reads(text: str, tmp_path: Path) -> None:
    assert values.seconds(text) * 1e6 == _as_fio_reads("runtime", text, tmp_path / "x.fio")


@pytest.mark.parametrize(
    "text", ["", "4q", "1.5m", "-1", "4kk", "(4k*2)", "k", " 4k", "1kib", "1MiB", "1ib", "i"]
)
def test_what_fio_would_read_otherwise_or_in_part_is_refused(text: str) -> None:
    with pytest.raises(ValueFaultError, match="accepted"):
        values.size(text)


@pytest.mark.parametrize("text", ["", "1.5", "3sec", "3 s", "-1", "s"])
def test_a_time_that_fio_would_read_otherwise_is_refused(text: str) -> None:
    """As microseconds, in the case of 3sec."""
    with pytest.raises(ValueFaultError, match="accepted"):
        values.seconds(text)


@given(st.integers(0, 2**60))
def test_a_printed_size_is_read_back(nbytes: int) -> None:
    assert values.size(values.print_size(nbytes)) == nbytes


@given(
    st.one_of(
        st.builds(values.Amount, st.integers(0, 2**60)),
        st.builds(lambda p: values.Amount(0, p), st.integers(0, 999)),
    )
)
def test_a_printed_amount_is_read_back(amount: values.Amount) -> None:
    assert values.amount(str(amount)) == amount


@given(
    st.sampled_from(
        [
            *(values.Spreading(values.Shape.ZIPF, theta) for theta in (0.5, 0.99, 1.2)),
            values.Spreading(),
            values.Spreading(values.Shape.PARETO, 0.3),
            values.Spreading(values.Shape.NORMAL, 15.0),
        ]
    )
)
def test_a_printed_distribution_is_read_back(spread: values.Spreading) -> None:
    assert values.spreading(str(spread)) == spread


@pytest.mark.parametrize(
    "text", ["zipf:1", "zipf:-1", "pareto:1", "normal:0", "normal", "random:1", "zoned:50/50", "zipf:x"]
)
def test_a_distribution_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(ValueFaultError, match="accepted"):
        values.spreading(text)


def test_a_split_shares_what_is_left_among_those_without_a_percentage() -> None:
    assert values.block_split("4k/50:8k/:16k/").parts == ((4096, 50.0), (8192, 25.0), (16384, 25.0))


@pytest.mark.parametrize("text", ["4k/60:8k/60", "4k/10:8k/10", "4k/x", "4k/101"])
def test_a_split_that_does_not_sum_to_100_is_refused(text: str) -> None:
    with pytest.raises(ValueFaultError, match="accepted"):
        values.block_split(text)


def test_a_range_holds_the_multiples_of_its_low_end() -> None:
    assert [nbytes for nbytes, _ in values.block_range("4k-16k").parts] == [4096, 8192, 12288, 16384]
    assert values.block_range("16k-4k") == values.block_range("4k:16k")


def test_one_value_of_a_pair_holds_for_both() -> None:
    assert values.pair(values.size)("4k") == values.Pair(4096, 4096)
    assert values.pair(values.size)("4k,8k") == values.Pair(4096, 8192)
    with pytest.raises(ValueFaultError, match="trim"):
        values.pair(values.size)("1,2,3")
