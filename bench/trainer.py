"""What Hugging Face's Trainer costs with tierstore: lines of a script, and seconds of a step."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tierstore as ts
from bench.command import Question, Settings, UnmeasurableError, main
from bench.measure import Spread, ratios, take_turns
from bench.record import Better, Figure

_ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "trainer_scripts"


# ---------------------------------------------------------------------- lines


def added_lines(before: str, after: str) -> list[str]:
    """Return the lines of ``after`` that ``before`` does not have; blank ones and remarks do not count.

    Raises:
        AssertionError: something was taken away, too.
    """
    changes = [each for each in difflib.ndiff(before.splitlines(), after.splitlines()) if each[0] in "+-"]
    if taken := [each for each in changes if each.startswith("- ")]:
        raise AssertionError(f"the scripts differ by more than added lines: {taken}")
    lines = [each[2:].partition("  #")[0].strip() for each in changes]
    return [each for each in lines if each and not each.startswith("#")]


def _printed(script: str, folder: Path) -> str:
    """Run a script in a folder of its own; return the last line that it prints."""
    folder.mkdir()
    shutil.copy(SCRIPTS / "run.yaml", folder)
    paths = [str(_ROOT), str(_ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script} failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def trainer_lines(settings: Settings) -> Figure:
    """Run a Trainer's script as it is and with what offloading adds; count what is added."""
    _needed()
    before, after = ((SCRIPTS / name).read_text() for name in ("plain.py", "offloaded.py"))
    added = added_lines(before, after)
    plain, ours = (_printed(name, settings.scratch / name[:-3]) for name in ("plain.py", "offloaded.py"))
    if plain != ours:
        raise AssertionError(f"the scripts print otherwise: {plain}, {ours}")
    config = [line for line in (SCRIPTS / "run.yaml").read_text().splitlines() if line]
    details = {
        "added": "; ".join(f"`{each}`" for each in added),
        "run.yaml": f"{len(config)} lines, which are no Python and do not count",
        "loss and parameters": "equal, bit for bit, with the emulated device and the disk of run.yaml",
    }
    what = (
        "lines that a script of Hugging Face's Trainer has more when it is offloaded, the import among them"
    )
    return Figure("trainer-lines", what, len(added), "lines", 3, 1, Better.LOWER, details)


# ---------------------------------------------------------------------- seconds


def trainer_step(settings: Settings) -> Figure:
    """Train with everything in the host tier, in turns with the Trainer alone; each turn begins anew."""
    _needed()
    from bench import trainer_steps

    size = trainer_steps.LlamaSize.scaled(settings.scale)
    turns: list[trainer_steps.TrainerTurn] = []

    def turn(name: str, config: ts.OffloadConfig | None) -> Callable[[], Mapping[str, float]]:
        def train() -> Mapping[str, float]:
            turns.append(trainer_steps.train(size, settings.scratch / name, config))
            return {name: turns[-1].step_s}

        return train

    runs = [turn("alone", None), turn("offloaded", trainer_steps.config_for(size))]
    seconds = take_turns(runs, repeats=settings.repeats, warmups=settings.warmups)
    must_be_equal([(each.loss, each.digest) for each in turns])
    times = ratios(seconds["offloaded"], seconds["alone"])
    details = {f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()}
    details["times alone"] = str(times)
    details["of each turn"] = (
        f"a whole train(), AdamW and clipping as the Trainer has them; {trainer_steps.SETTLING_STEPS} steps "
        f"first, then {trainer_steps.COUNTED_STEPS} that count"
    )
    details["losses and parameters"] = f"of {len(turns)} trainings equal, bit for bit"
    what = (
        f"step of a Llama of {turns[0].parameter_bytes / 4e6:.1f} M parameters, "
        f"{trainer_steps.BATCH} x {trainer_steps.LENGTH} tokens, by Hugging Face's Trainer on the CPU, "
        "everything fits in host memory, against the Trainer alone"
    )
    return Figure("trainer-step", what, times.median, "x its time", 1.1, 1.03, Better.LOWER, details)


def must_be_equal(found: Sequence[object]) -> None:
    """Raise if what trainings came to differs.

    Raises:
        AssertionError: it does.
    """
    if len(set(found)) != 1:
        raise AssertionError(f"the trainings differ: {found}")


def _needed() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnmeasurableError(f"transformers cannot be imported: {error}") from error


QUESTIONS: dict[str, Question] = {"trainer-lines": trainer_lines, "trainer-step": trainer_step}

if __name__ == "__main__":
    sys.exit(main("bench.trainer", QUESTIONS))
