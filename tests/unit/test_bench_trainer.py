"""The figures of Hugging Face's Trainer at a small scale, and how added lines are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import trainer
from bench.command import Settings
from bench.record import Verdict

pytest.importorskip("transformers")

from bench import trainer_steps


def test_added_lines_are_counted_without_blank_ones_and_remarks() -> None:
    before = "import a\n\nrun(a)\n"
    after = "import a\nimport b\n\n# why\na = b(a)  # how\nrun(a)\n"
    assert trainer.added_lines(before, after) == ["import b", "a = b(a)"]
    assert trainer.added_lines(before, before) == []


def test_a_line_that_is_changed_is_no_added_line() -> None:
    with pytest.raises(AssertionError, match=r"run\(a\)"):
        trainer.added_lines("import a\nrun(a)\n", "import a\nrun(b)\n")


def test_the_scripts_differ_by_the_import_and_one_line() -> None:
    texts = [(trainer.SCRIPTS / name).read_text() for name in ("plain.py", "offloaded.py")]
    assert trainer.added_lines(*texts) == [
        "from tierstore.integrations.transformers import offloading",
        'Trainer = offloading(Trainer, "run.yaml")',
    ]


@pytest.mark.slow
@pytest.mark.long
def test_the_scripts_print_the_same(tmp_path: Path) -> None:
    figure = trainer.trainer_lines(Settings(tmp_path))
    assert figure.reached == 2
    assert figure.verdict is Verdict.BAR


def test_a_script_that_fails_is_told_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.yaml").write_text("device: cpu\n")
    for name in ("plain.py", "offloaded.py"):
        (tmp_path / "scripts" / name).write_text("raise SystemExit('no such model')\n")
    monkeypatch.setattr(trainer, "SCRIPTS", tmp_path / "scripts")
    with pytest.raises(RuntimeError, match="no such model"):
        trainer.trainer_lines(Settings(tmp_path))


@pytest.mark.slow
def test_a_trainer_takes_turns_with_itself_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_steps, "LAYERS", 2)
    monkeypatch.setattr(trainer_steps, "LENGTH", 16)
    figure = trainer.trainer_step(Settings(tmp_path, repeats=1, warmups=0, scale=0.01))
    assert figure.name == "trainer-step"
    assert figure.reached > 0
    assert figure.details["losses and parameters"] == "of 2 trainings equal, bit for bit"


def test_trainings_that_differ_are_told() -> None:
    with pytest.raises(AssertionError, match="differ"):
        trainer.must_be_equal([(1.0, "a"), (1.0, "b")])
