"""Figures, verdicts, and the pages that are written of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.command import FIGURES_PAGE, Settings, UnmeasurableError, main
from bench.record import (
    Better,
    Circumstances,
    Figure,
    Verdict,
    as_markdown,
    as_text,
    read,
    summary,
    write,
    write_page,
)


def figure(reached: float, better: Better = Better.LOWER, name: str = "lease") -> Figure:
    bar, aim = (2.0, 1.0) if better is Better.LOWER else (1.0, 2.0)
    return Figure(name, "what it is", reached, "x", bar, aim, better, {"peer": "3 (2-4, n=5)"})


@pytest.mark.parametrize(
    ("reached", "better", "verdict"),
    [
        (1.0, Better.LOWER, Verdict.AIM),
        (1.5, Better.LOWER, Verdict.BAR),
        (2.1, Better.LOWER, Verdict.MISSED),
        (2.0, Better.HIGHER, Verdict.AIM),
        (1.0, Better.HIGHER, Verdict.BAR),
        (0.9, Better.HIGHER, Verdict.MISSED),
    ],
)
def test_a_verdict_says_which_mark_was_reached(reached: float, better: Better, verdict: Verdict) -> None:
    assert figure(reached, better).verdict is verdict


def test_a_figure_without_a_number_reaches_nothing() -> None:
    assert figure(float("nan")).verdict is Verdict.MISSED


def test_the_summary_says_which_way_each_mark_counts() -> None:
    rows = summary([figure(3.0), figure(3.0, Better.HIGHER)])
    assert rows[1] == ["lease", "3 x", "at most 2 x", "at most 1 x", "MISSED"]
    assert rows[2] == ["lease", "3 x", "at least 1 x", "at least 2 x", "aim reached"]


def test_tables_line_up_as_text_and_as_markdown() -> None:
    rows = [["a", "b"], ["long", "c"]]
    assert as_text(rows) == "a     b\nlong  c"
    assert as_markdown(rows) == "| a | b |\n| --- | --- |\n| long | c |"


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    circumstances = Circumstances.now("python -m bench", tmp_path)
    path = write(figure(1.5, Better.HIGHER), circumstances, tmp_path)
    assert read(path) == (figure(1.5, Better.HIGHER), circumstances)


def test_circumstances_name_machine_versions_commit_and_load(tmp_path: Path) -> None:
    circumstances = Circumstances.now("python -m bench --figure lease", tmp_path)
    assert "cores" in circumstances.machine
    assert "torch 2." in circumstances.versions
    assert circumstances.commit
    assert len(circumstances.load_before.split()) == 3
    assert circumstances.scratch != "unknown"


def test_a_page_lists_recorded_figures_in_their_order_and_no_others(tmp_path: Path) -> None:
    circumstances = Circumstances.now("python -m bench", tmp_path)
    for name in ("growth", "stranger", "lease"):
        write(figure(1.0, name=name), circumstances, tmp_path)
    text = write_page(tmp_path, FIGURES_PAGE).read_text()
    assert text.index("## lease") < text.index("## growth")
    assert "stranger" not in text
    assert "- command: `python -m bench`" in text
    assert "`swap-save-on-cpu`" in text.split("## lease")[0].partition("Not measured: ")[2]
    assert "`growth`" not in text.split("## lease")[0].partition("Not measured: ")[2]


def test_the_exit_code_says_whether_a_bar_was_missed(tmp_path: Path) -> None:
    def command(reached: float) -> int:
        return main("bench", {"lease": lambda _: figure(reached)}, ["--path", str(tmp_path)])

    assert command(2.0) == 0
    assert command(2.1) == 1


def test_results_are_recorded_only_when_asked_for(tmp_path: Path) -> None:
    def command(*more: str) -> int:
        results = ["--path", str(tmp_path / "scratch"), "--results", str(tmp_path / "results")]
        return main("bench.store", {"lease": lambda _: figure(1.0)}, [*results, "--repeats", "7", *more])

    command()
    assert not (tmp_path / "results").exists()
    command("--write")
    _, circumstances = read(tmp_path / "results" / "lease.json")
    assert circumstances.command == "python -m bench.store --figure lease --repeats 7 --warmups 1"
    assert (tmp_path / "results" / "figures.md").exists()


def test_nothing_is_left_in_the_scratch_directory(tmp_path: Path) -> None:
    def question(settings: Settings) -> Figure:
        (settings.scratch / "file").write_text("left behind")
        return figure(1.0)

    main("bench", {"lease": question}, ["--path", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_here_is_named_and_the_rest_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def question(settings: Settings) -> Figure:
        del settings
        raise UnmeasurableError("it needs two moons")

    questions = {"disk": question, "lease": lambda _: figure(1.0)}
    results = tmp_path / "results"
    code = main("bench", questions, ["--path", str(tmp_path), "--write", "--results", str(results)])
    assert code == 0
    assert "disk: not measured: it needs two moons" in capsys.readouterr().out
    assert [path.name for path in sorted(results.glob("*.json"))] == ["lease.json"]
