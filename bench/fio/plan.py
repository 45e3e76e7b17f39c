"""What the sections of job files mean, and which of them run at the same time.

Promises: all faults of all sections in one error, each with file and line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.fio import keys
from bench.fio.job import Job, Meaning
from bench.fio.jobfile import Entry, JobFileError, Place, RawJob
from bench.fio.keys import ENGINE
from bench.fio.values import ValueFaultError


@dataclass(frozen=True, slots=True)
class Planned:
    """One section as it will run.

    Attributes:
        job: what it means for the store; None: fio runs it.
        options: its own keys as text, for reports.
        inherited: the keys of ``[global]`` as text, for reports.
        group: number of the group of results.
    """

    name: str
    engine: str
    job: Job | None
    options: Mapping[str, str]
    inherited: Mapping[str, str]
    is_stonewall: bool
    is_group_reporting: bool
    is_new_group: bool
    place: Place
    group: int = 0

    @property
    def merged(self) -> dict[str, str]:
        """The keys that hold."""
        return {**self.inherited, **self.options}


def plan(raw: Iterable[RawJob], *, first_group: int = 0) -> list[list[Planned]]:
    """Say what each section means, and which run at the same time: the lists run one after the other.

    Groups of results are numbered from ``first_group``.

    Raises:
        JobFileError: with every fault.
    """
    faults: list[str] = []
    planned = [each for section in raw if (each := _planned(section, faults)) is not None]
    batches = _batches(planned)
    for batch in batches:
        faults += _mixed_engines(batch)
    if faults:
        raise JobFileError(faults)
    return _numbered(batches, first_group)


def _numbered(batches: Sequence[Sequence[Planned]], first_group: int) -> list[list[Planned]]:
    group = first_group - 1
    numbered: list[list[Planned]] = []
    for batch in batches:
        group += 1
        numbered.append([])
        for each in batch:
            group += each.is_new_group and each is not batch[0]
            numbered[-1].append(replace(each, group=group))
    return numbered


def _batches(planned: Sequence[Planned]) -> list[list[Planned]]:
    batches: list[list[Planned]] = []
    for each in planned:
        if each.is_stonewall or not batches:
            batches.append([])
        batches[-1].append(each)
    return batches


def _mixed_engines(batch: Sequence[Planned]) -> list[str]:
    ours = [each for each in batch if each.job is not None]
    others = [each for each in batch if each.job is None]
    if not ours or not others:
        return []
    late = max(ours[0], others[0], key=batch.index)
    return [
        (
            f"{late.place}: [{ours[0].name}] on the store and [{others[0].name}] in fio would run at the "
            f"same time; let [{late.name}] wait with stonewall"
        )
    ]


def _planned(raw: RawJob, faults: list[str]) -> Planned | None:
    entries = {keys.canonical(key): entry for key, entry in raw.entries().items()}
    engine = entries["ioengine"].value if "ioengine" in entries else "psync"
    is_store_job = engine == ENGINE
    found = len(faults)
    if keys.is_nearly_ours(engine):
        faults.append(
            f"{entries['ioengine'].place}: ioengine={engine}: did you mean {ENGINE!r}? fio has no such engine"
        )
        return None
    for key, entry in entries.items():
        if not (key in keys.STORE_KEYS if is_store_job else _is_left_to_fio(key, entry, raw)):
            faults.append(f"{entry.place}: {keys.unknown(entry.key, is_store_job=is_store_job)}")
    read = _read(entries, faults) if is_store_job else {}
    if len(faults) > found:
        return None
    name = entries["name"].value if "name" in entries else raw.name
    try:
        job = Meaning(name, read).job() if is_store_job else None
    except ValueFaultError as error:
        faults.append(f"{raw.section.place}: [{raw.name}] {error}")
        return None
    return Planned(
        name=name,
        engine=engine,
        job=job,
        options=_texts(raw.section.entries),
        inherited=_texts(raw.inherited),
        is_stonewall=_holds(entries, "stonewall"),
        is_group_reporting=_holds(entries, "group_reporting"),
        is_new_group=_holds(entries, "new_group"),
        place=raw.section.place,
    )


def _is_left_to_fio(key: str, entry: Entry, raw: RawJob) -> bool:
    """Say whether a key may stand in a section that fio runs: fio's, or ours where it was inherited."""
    return keys.is_fios(key) or (key in keys.OUR_KEYS and entry in raw.inherited)


def _holds(entries: Mapping[str, Entry], key: str) -> bool:
    return key in entries and entries[key].value != "0"


def _texts(entries: Iterable[Entry]) -> dict[str, str]:
    return {entry.key: entry.value if entry.has_value else "1" for entry in entries}


def _read(entries: Mapping[str, Entry], faults: list[str]) -> dict[str, Any]:
    """Read every value that can be read; note the others."""
    read: dict[str, Any] = {}
    for key, entry in entries.items():
        if key in keys.STORE_KEYS:
            try:
                read[key] = keys.STORE_KEYS[key].read(entry.value)
            except ValueFaultError as error:
                faults.append(f"{entry.place}: {entry}: {error}")
    return read
