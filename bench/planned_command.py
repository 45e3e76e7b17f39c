"""What ``tierstore plan`` takes for large models, as a process: seconds and memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.command import Question, Settings, UnmeasurableError
from bench.record import Better, Figure

GIB = 1024**3
RESIDENT_BAR_BYTES = 2 * GIB
"""Of the process that plans for one machine."""

_ROOT = Path(__file__).resolve().parent.parent
_PLAN = (sys.executable, "-m", "tierstore.cli", "plan")
_FITS, _DOES_NOT_FIT = 0, 1


def llama_config(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, object]:
    """Return the ``config.json`` of a Llama 3 of these sizes, with eight heads of keys and values."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


LLAMA_70B = llama_config(8192, 28672, 80, 64)
LLAMA_405B = llama_config(16384, 53248, 126, 128)


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: with what.
        seconds: from its start to its end.
        cpu_s: that it computed.
        resident_bytes: at most.
        output: what it said.
        errors: what it said of what is wrong.
    """

    code: int
    seconds: float
    cpu_s: float
    resident_bytes: int
    output: str
    errors: str


_BETWEEN = """
import json, resource, subprocess, sys, time
begun = time.perf_counter()
code = subprocess.run(sys.argv[2:]).returncode
seconds = time.perf_counter() - begun
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([code, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss], file)
"""


def ended(command: Sequence[str], folder: Path) -> Ended:
    """Run a command to its end, and see what it took.

    Args:
        command: with its words.
        folder: where what it says is kept.
    """
    told, wrong, took = folder / "output", folder / "errors", folder / "took"
    with told.open("wb") as output, wrong.open("wb") as errors:
        # A child's peak counts what its parent had when it was begun: so it has a small one between.
        subprocess.run(
            [sys.executable, "-c", _BETWEEN, str(took.resolve()), *command],
            cwd=_ROOT,
            stdout=output,
            stderr=errors,
            check=True,
        )
    code, seconds, cpu_s, resident_kib = json.loads(took.read_text())
    return Ended(code, seconds, cpu_s, resident_kib * 1024, told.read_text(), wrong.read_text())


def planned(config: Mapping[str, object], words: Sequence[str], folder: Path) -> Ended:
    """Plan for a model.

    Args:
        config: its ``config.json``.
        words: of the command line, behind the model.
        folder: for files.

    Raises:
        UnmeasurableError: a package that it needs is not there, or it has not these options.
        RuntimeError: it failed; its words are in the message.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    command = [*_PLAN, str(path.resolve()), *words, "--json"]
    found = ended(command, folder)
    if "unrecognized arguments" in found.errors:
        raise UnmeasurableError(found.errors.strip().splitlines()[-1])
    if found.code not in (_FITS, _DOES_NOT_FIT):
        raise RuntimeError(f"{' '.join(command)} ended with {found.code}:\n{found.errors}")
    return found


def seconds_within(found: Ended, bar_bytes: float) -> float:
    """Return what a process took; that is endless if it had more memory than it may have."""
    return found.seconds if found.resident_bytes <= bar_bytes else math.inf


def _details(found: Ended, words: Sequence[str]) -> dict[str, str]:
    step_s = json.loads(found.output).get("step_s")
    return {
        "options": " ".join(words),
        "CPU s": f"{found.cpu_s:.1f}",
        "resident at most": f"{found.resident_bytes / GIB:.2f} GiB",
        "answer": "it fits" if found.code == _FITS else "it does not fit",
        **({} if step_s is None else {"step": f"{step_s:.3g} s"}),
    }


def plan_70b(settings: Settings) -> Figure:
    """Plan for a Llama of 70 B on one machine."""
    config = LLAMA_70B if settings.scale >= 1 else LLAMA_70B | {"num_hidden_layers": 4}
    words = ["--machine", "h100-80gb", "--sequence", "4096", "--dtype", "bfloat16"]
    words += ["--max-host-memory", "2TB"]
    found = planned(config, words, settings.scratch / "planned")
    what = (
        "tierstore plan for a Llama of 70 B, 4,096 tokens, on one H100 with 2 TB of host memory, as a process"
    )
    reached = seconds_within(found, RESIDENT_BAR_BYTES)
    return Figure("planned-70b", what, reached, "s", 30.0, 10.0, Better.LOWER, _details(found, words))


def plan_405b(settings: Settings) -> Figure:
    """Plan for a Llama of 405 B on 1,024 ranks."""
    config = LLAMA_405B if settings.scale >= 1 else LLAMA_405B | {"num_hidden_layers": 4}
    words = ["--machine", "h100-80gb", "--sequence", "4096", "--dtype", "bfloat16"]
    words += ["--world-size", "1024", "--ranks-per-host", "8"]
    found = planned(config, words, settings.scratch / "planned")
    what = "tierstore plan for a Llama of 405 B on 1,024 ranks, 8 a host, 4,096 tokens each, as a process"
    reached = seconds_within(found, math.inf)
    return Figure("planned-405b", what, reached, "s", 120.0, 30.0, Better.LOWER, _details(found, words))


QUESTIONS: dict[str, Question] = {"planned-70b": plan_70b, "planned-405b": plan_405b}
