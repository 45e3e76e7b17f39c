"""The command line: what runs, what is printed, drawn and recorded; and the job files that come with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import names_a_job_file
from bench.fio import keys, outside, plots
from bench.fio.command import main, read_batches
from bench.fio.jobfile import parse, raw_jobs
from bench.fio.plan import plan
from bench.fio.terminal import short
from tests.unit.test_bench_fio_jobfile import needs_fio
from tests.unit.test_bench_fio_runner import HEAD

JOBS = Path(__file__).parents[2] / "bench" / "jobs"
ALL_JOBS = sorted(JOBS.glob("*.fio"))
RAW_JOBS = sorted(JOBS.glob("raw-*.fio"))
PNG = b"\x89PNG"


def write(path: Path, text: str, head: str = HEAD) -> str:
    (path / "j.fio").write_text(head + text)
    return str(path / "j.fio")


# ---------------------------------------------------------------------- what is printed


def test_the_summary_has_fios_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "[x]\nrw=randrw\nop=get,put\ndescription=why not\n")
    assert main([file, "--path", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    heads = ["x: (g=0): rw=randrw", "x: (groupid=0, jobs=1): err= 0: pid=", "  Description  : [why not]"]
    heads += ["  read: IOPS=", "  write: IOPS=", "    clat (", "    clat percentiles (", "     | 99.99th=["]
    heads += [
        "  cpu          : usr=",
        "  IO depths    : 1=100.0%",
        "     issued rwts: total=",
        "  tierstore    : ",
    ]
    heads += ["Run status group 0 (all jobs):", "   READ: bw=", "  WRITE: bw="]
    assert [head for head in heads if head not in printed] == []


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (5600, "5600"), (64000, "64.0k"), (10245.6, "10.2k"), (256000, "256k"), (1999999, "2000k")],
)
def test_numbers_are_shortened_as_fio_does(number: float, text: str) -> None:
    """The pairs are from fio's own output, but for the first and the last."""
    assert short(number, base=1000, prefixes=("", "k", "M")) == text


def test_json_goes_to_a_file_with_histograms_if_asked(tmp_path: Path) -> None:
    file = write(tmp_path, "[x]\nop=get\n")
    for form, has_bins in (("json", False), ("json+", True)):
        arguments = ["--path", str(tmp_path), "--output-format", form, "--output", str(tmp_path / "out")]
        assert main([file, *arguments]) == 0
        document = json.loads((tmp_path / "out").read_text())
        assert ("bins" in document["jobs"][0]["read"]["clat_ns"]) == has_bins
        assert document["global options"]["bs"] == "64k"
        assert document["jobs"][0]["job options"] == {"op": "get"}


def test_both_formats_may_be_had_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, "[x]\n"), "--path", str(tmp_path), "--output-format", "both"]) == 0
    printed = capsys.readouterr().out
    document, end = json.JSONDecoder().raw_decode(printed)
    assert document["jobs"][0]["jobname"] == "x"
    assert "Run status group" in printed[end:]


def test_an_unknown_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([write(tmp_path, "[x]\n"), "--path", str(tmp_path), "--output-format", "terse"])
    assert "accepted: normal, json, json+, both" in capsys.readouterr().err


# ---------------------------------------------------------------------- what runs


def test_a_fault_ends_it_with_2_before_anything_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path, "[x]\nbogus=1\n"), "--path", str(tmp_path / "no")]) == 2
    assert "j.fio:8: unknown key 'bogus'" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_an_error_of_a_job_ends_it_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, "[x]\nengine=none_such\n"), "--path", str(tmp_path)]) == 1
    assert "err=22" in capsys.readouterr().out


def test_sections_can_be_chosen_and_keys_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "[a]\n[b]\n[c]\n")
    chosen = ["--section", "b", "--set", "op=get", "--set", "loops=2"]
    assert main([file, *chosen, "--path", str(tmp_path), "--output-format", "json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["jobname"], job["read"]["total_ios"]) == ("b", 32)
    assert main([file, "--section", "z"]) == 2
    assert "no section z; there are: a, b, c" in capsys.readouterr().err


def test_showcmd_prints_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, "[x]\nrw=write\n"), "--showcmd", "--path", str(tmp_path / "no")]) == 0
    assert capsys.readouterr().out.startswith("fio --name=x --ioengine=tierstore --size=1m --bs=64k")
    assert not (tmp_path / "no").exists()


def test_files_are_done_one_after_the_other_and_their_faults_named_together(tmp_path: Path) -> None:
    (tmp_path / "a.fio").write_text(HEAD + "[a]\n[b]\n")
    (tmp_path / "b.fio").write_text(HEAD + "[c]\n")
    batches = read_batches([tmp_path / "a.fio", tmp_path / "b.fio"])
    assert [[each.name for each in batch] for batch in batches] == [["a", "b"], ["c"]]
    assert [each.group for batch in batches for each in batch] == [0, 0, 1]


@pytest.mark.parametrize(
    ("argv", "is_about_jobs"),
    [
        ([], False),
        (["--figure", "lease"], False),
        (["x.fio"], True),
        (["--write"], False),
        (["--showcmd"], True),
    ],
)
def test_figures_are_measured_where_no_job_file_is_named(argv: list[str], is_about_jobs: bool) -> None:
    assert names_a_job_file(argv) == is_about_jobs


def test_a_run_is_recorded_with_its_circumstances(tmp_path: Path) -> None:
    file = write(tmp_path, "[x]\n")
    arguments = ["--path", str(tmp_path), "--write", "--results", str(tmp_path / "r")]
    assert main([file, *arguments, "--output", str(tmp_path / "out")]) == 0
    recorded = json.loads((tmp_path / "r" / "j.json").read_text())
    assert recorded["circumstances"]["command"].startswith("python -m bench ")
    assert recorded["jobs"][0]["read"]["total_ios"] == 16


# ---------------------------------------------------------------------- fio itself


@needs_fio
def test_fio_runs_the_sections_that_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[ours]\nop=get\n[fios]\nstonewall\nioengine=psync\nrw=randread\nnumjobs=2\ngroup_reporting\n"
    arguments = ["--path", str(tmp_path), "--output-format", "both"]
    assert main([write(tmp_path, text), *arguments]) == 0
    printed = capsys.readouterr().out
    ours, fios = json.JSONDecoder().raw_decode(printed)[0]["jobs"]
    assert "tierstore" in ours
    assert "tierstore" not in fios
    assert (fios["groupid"], fios["read"]["total_ios"]) == (1, 32)
    assert "fios: (groupid=1, jobs=2): err= 0" in printed


def test_a_section_of_fios_is_skipped_with_a_reason_where_fio_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "PROGRAM", "no-such-program")
    assert main([write(tmp_path, "[x]\nioengine=psync\n"), "--path", str(tmp_path)]) == 0
    assert "skipped x: ioengine=psync needs fio, which is not installed" in capsys.readouterr().err


@needs_fio
def test_what_fio_refuses_is_told_in_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, "[x]\nioengine=psync\nrw=nonsense\n"), "--path", str(tmp_path)]) == 1
    assert "failed parsing rw=nonsense" in capsys.readouterr().err


def test_fio_sees_none_of_our_keys() -> None:
    (batch,) = plan(raw_jobs(parse(HEAD + "[x]\nioengine=psync\nstonewall\n")))
    (section,) = parse(outside.job_file(batch))
    assert {entry.key for entry in section.entries} == {"ioengine", "size", "bs"}


# ---------------------------------------------------------------------- pictures


def test_pictures_are_drawn_of_what_the_jobs_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    text = "[global]\nstonewall\n[a]\nop=get\n[b]\nop=get\nbs=32k\n[c]\nop=get\niodepth=2\n"
    text += "[d]\ntrace=cyclic\nhost_quota=50%\n[e]\ntrace=cyclic\nhost_quota=75%\n[f]\nrw=write\n"
    assert main([write(tmp_path, text), "--path", str(tmp_path), "--plots", str(tmp_path / "p")]) == 0
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()}
    assert set(pictures) == {
        "bandwidth-over-block-size.png",
        "bandwidth-over-depth.png",
        "latency-percentiles-read.png",
        "latency-percentiles-write.png",
        "hit-ratio-over-host-quota.png",
    }
    assert all(data.startswith(PNG) and len(data) > 10_000 for data in pictures.values())
    assert capsys.readouterr().err.count("drew ") == 5


def test_what_one_job_cannot_show_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([write(tmp_path, "[a]\n"), "--path", str(tmp_path), "--plots", str(tmp_path / "p")]) == 0
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["latency-percentiles-read.png"]


def test_without_matplotlib_the_results_are_there_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.NoMatplotlibError, match="pip install matplotlib"):
        plots.draw([], tmp_path)
    assert main([write(tmp_path, "[a]\n"), "--path", str(tmp_path), "--plots", str(tmp_path / "p")]) == 0
    printed = capsys.readouterr()
    assert "Run status group" in printed.out
    assert "--plots needs matplotlib" in printed.err


# ---------------------------------------------------------------------- the job files that come with it


@pytest.mark.parametrize("path", ALL_JOBS, ids=lambda path: path.stem)
def test_every_job_file_is_understood_and_says_why_it_is_there(path: Path) -> None:
    assert read_batches([path])
    assert path.read_text().startswith("; ")
    assert path.read_text().splitlines()[0].endswith("?")


@needs_fio
@pytest.mark.parametrize("path", RAW_JOBS, ids=lambda path: path.stem)
def test_fio_reads_a_raw_job_file_as_it_is(path: Path, tmp_path: Path) -> None:
    command = ["fio", "--parse-only", str(path)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout + said.stderr == ""


@needs_fio
@pytest.mark.slow
@pytest.mark.parametrize("path", RAW_JOBS, ids=lambda path: path.stem)
def test_fio_runs_a_raw_job_file_as_it_is(path: Path, tmp_path: Path) -> None:
    said = subprocess.run(
        ["fio", "--output-format=json", str(path)], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    jobs = [(job["jobname"], job["error"]) for job in json.loads(said[said.index("{") :])["jobs"]]
    assert jobs == [(each.name, 0) for batch in read_batches([path]) for each in batch]


@pytest.mark.parametrize("path", RAW_JOBS, ids=lambda path: path.stem)
def test_a_raw_job_file_runs_on_the_store_too(path: Path, tmp_path: Path) -> None:
    settings = [
        "ioengine=tierstore",
        "direct=0",
        "size=24m",
        "runtime=50ms",
        "host_quota=64m",
        "disk_quota=64m",
    ]
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main([str(path), *arguments, "--path", str(tmp_path), "--output", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("path", RAW_JOBS, ids=lambda path: path.stem)
def test_a_raw_job_file_has_none_of_our_keys(path: Path) -> None:
    entries = {entry.key for section in parse(path.read_text()) for entry in section.entries}
    assert [key for key in entries if not keys.is_fios(key)] == []


def test_every_key_stands_in_the_reference() -> None:
    page = (JOBS.parents[1] / "docs" / "reference" / "bench-jobs.md").read_text(encoding="utf-8")
    assert [name for name in keys.STORE_KEYS if f"`{name}`" not in page] == []


def test_every_job_file_stands_in_the_reference() -> None:
    page = (JOBS.parents[1] / "docs" / "reference" / "bench-jobs.md").read_text(encoding="utf-8")
    assert [path.name for path in ALL_JOBS if f"`{path.name}`" not in page] == []


# ---------------------------------------------------------------------- what is left behind


def test_the_directory_that_was_made_for_it_is_gone_afterwards(tmp_path: Path) -> None:
    file = write(tmp_path, "[x]\nrw=write\n")
    assert main([file, "--path", str(tmp_path / "made" / "for" / "it")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["j.fio"]


def test_a_directory_that_was_there_stays_with_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file = write(tmp_path, "[x]\nrw=write\n")
    assert main([file, "--path", str(tmp_path / "there")]) == 0
    assert list((tmp_path / "there").iterdir()) == []


def test_stores_in_a_directory_of_a_job_are_gone_afterwards(tmp_path: Path) -> None:
    file = write(tmp_path, f"[x]\nrw=write\nop=put\ndurable=1\nend_fsync=1\ndirectory={tmp_path}/own\n")
    assert main([file, "--path", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["j.fio"]


def test_a_directory_that_cannot_be_made_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "[x]\nrw=write\n")
    assert main([file, "--path", f"{file}/below"]) == 2
    err = capsys.readouterr().err
    assert f"{file}/below cannot be made" in err
    assert err.count("\n") == 1


def test_results_are_not_lost_where_they_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "[x]\nrw=write\n")
    assert main([file, "--path", str(tmp_path), "--output", str(tmp_path / "nowhere" / "x.txt")]) == 0
    printed = capsys.readouterr()
    assert "Run status group 0 (all jobs):" in printed.out
    assert f"the results are above, for {tmp_path}/nowhere/x.txt cannot be written" in printed.err


@pytest.mark.parametrize("engine", ["tierstor", "tierstores", "TierStore", "tier-store", "tiersotre"])
def test_an_engine_that_is_nearly_the_stores_is_not_left_to_fio(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "[x]\nrw=write\n")
    assert main([file, "--path", str(tmp_path), "--set", f"ioengine={engine}"]) == 2
    assert f"ioengine={engine}: did you mean 'tierstore'?" in capsys.readouterr().err


def test_an_interrupted_run_says_so_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "[x]\nrw=write\nop=put\ntime_based=1\nruntime=100\n")
    command = [sys.executable, "-m", "bench", file, "--path", str(tmp_path / "made")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "running x ...\n"
        running.send_signal(signal.SIGINT)
        err = running.stderr.read()
    assert err == "interrupted: nothing was recorded, and what was made is removed\n"
    assert running.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["j.fio"]
