"""Runs fio itself, for sections whose ``ioengine`` is one of its own.

Knows nothing of stores.  fio sees its own keys only; what stands in ``[global]`` for the store's jobs is
left out.  Its buffers lie in huge pages where the C library can do that, because the store's do: on a disk
that takes a long list of small pages badly, fio was three times faster so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fio import keys
from bench.fio.jobfile import Entry, Section, print_file
from bench.fio.plan import Planned
from bench.fio.report import Json, Outcome

PROGRAM = "fio"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""What fio's environment gets, unless it says something there already."""


class FioFailedError(Exception):
    """fio did not run the jobs.  The message is its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What fio said: an outcome for each of its entries, and the disks."""

    outcomes: list[Outcome]
    disks: list[Json]


def is_there() -> bool:
    """Whether fio is installed."""
    return shutil.which(PROGRAM) is not None


def job_file(batch: Sequence[Planned]) -> str:
    """Return the batch as a file that holds nothing but fio's keys."""
    sections = []
    for each in batch:
        entries = [
            Entry(key, value)
            for key, value in each.merged.items()
            if keys.is_fios(key) and keys.canonical(key) != "stonewall"
        ]
        sections.append(Section(each.name, tuple(entries)))
    return print_file(sections)


def run(batch: Sequence[Planned], scratch: Path) -> Answer:
    """Let fio run a batch in ``scratch``.

    Raises:
        FioFailedError: it could not.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "batch.fio"
    path.write_text(job_file(batch))
    output = scratch / "batch.json"
    command = [PROGRAM, "--output-format=json+", f"--output={output.name}", path.name]
    environment = HUGE_PAGES | os.environ
    ran = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
    text = output.read_text() if output.exists() else ""
    start = text.find("{")
    if start < 0:
        said = (ran.stderr or ran.stdout or text).strip() or f"exit code {ran.returncode}"
        raise FioFailedError(f"fio did not run {', '.join(each.name for each in batch)}: {said}")
    return _answer(batch, json.loads(text[start:]))


def _answer(batch: Sequence[Planned], document: Mapping[str, Any]) -> Answer:
    made = []
    for entry in document["jobs"]:
        planned = next((each for each in batch if each.name == entry["jobname"]), batch[0])
        threads = int(planned.merged.get("numjobs", "1")) if planned.is_group_reporting else 1
        made.append(
            Outcome(
                planned, {**entry, "groupid": planned.group, "job options": dict(planned.options)}, threads, 0
            )
        )
    return Answer(made, [dict(disk) for disk in document.get("disk_util", ())])
