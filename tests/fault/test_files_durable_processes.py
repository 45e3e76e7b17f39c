"""Durable files for a long time, and in processes that are killed, fork, or forget to close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files_disk import (
    PAGE,
    finish,
    open_durable,
)
from tests.files_kept import DB, FIRST, WITNESS, found, kept, look, read, write
from tierstore.errors import CapacityError
from tierstore.spi import Record

# ---------------------------------------------------------------------------------------- many times


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow
def test_a_thousand_commits_leak_nothing(tmp_path: Path) -> None:
    files = open_durable(tmp_path, 64 * PAGE)
    records: list[Record] = []
    before = 0
    for turn in range(1000):
        old = records
        records = write(files, {str(n): PAGE for n in range(8)}, seed=turn)
        finish(files.commit(records))
        for record in old:
            finish(files.free(record.slot))
        if turn == 10:
            before = descriptors()
    assert descriptors() == before
    assert files.physical_bytes <= 64 * PAGE
    assert sum(entry.stat().st_size for entry in tmp_path.glob(f"{DB}*")) < 6_000_000
    files.close()


@pytest.mark.slow
def test_opening_and_closing_leaks_nothing(tmp_path: Path) -> None:
    kept(tmp_path, {"a": 5000})
    before = 0
    for turn in range(100):
        assert look(tmp_path) == {"a": "0"}
        if turn % 3 == 0:
            with pytest.raises(CapacityError):
                open_durable(tmp_path, PAGE)
        if turn == 3:
            before = descriptors()
    assert descriptors() == before


# ---------------------------------------------------------------------------------------- processes


def run_python(code: str, path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


COMMIT_FOR_EVER = """
import sys
from pathlib import Path
from tests.files_disk import buffer, finish, open_durable
from tierstore.spi import Record
files = open_durable(Path(sys.argv[1]), 1 << 20)
records = {record.name: record for record in files.recovered()}
turn = max((int(record.note) for record in records.values()), default=0)
while True:
    turn += 1
    name, nbytes = str(turn % 7), turn * 997 % 20_000
    slot = files.reserve(nbytes)
    finish(files.write(slot, buffer(nbytes, turn)))
    old, records[name] = records.get(name), Record(name, str(turn), slot)
    finish(files.commit(list(records.values())))
    print(turn, flush=True)
    if old is not None:
        finish(files.free(old.slot))
"""


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_a_killed_process_leaves_its_last_commit_or_the_one_under_way(tmp_path: Path, kills: int) -> None:
    last = 0
    for kill in range(kills):
        with run_python(COMMIT_FOR_EVER, tmp_path) as child:
            assert child.stdout is not None
            for _ in range(3 + kill % 40):
                last = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            told = child.stdout.read().split()
        last = int(told[-1]) if told and told[-1].isdigit() else last
        files = open_durable(tmp_path, 1 << 20)
        records = found(files)
        newest = max(int(record.note) for record in records.values())
        assert newest in (last, last + 1)
        for name, record in records.items():
            expected = max(turn for turn in range(1, newest + 1) if str(turn % 7) == name)
            assert int(record.note) == expected
            assert record.slot.nbytes == expected * 997 % 20_000
            assert read(files, record) is None
        files.close()
        last = newest


FORK = """
import os, sys
from pathlib import Path
from tests.files_disk import buffer, finish, open_durable
from tierstore.errors import StoreClosed
from tierstore.spi import Record
path = Path(sys.argv[1])
files = open_durable(path)
slot = files.reserve(5000)
finish(files.write(slot, buffer(5000)))
finish(files.commit([Record("a", "0", slot)]))
child = os.fork()
if child == 0:
    for call in (lambda: files.reserve(1), lambda: files.commit([]), files.recovered):
        try:
            call()
        except StoreClosed:
            continue
        os._exit(1)
    files.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (path / "tierstore.db-wal").stat().st_size > 0
finish(files.commit([Record("a", "0", slot), Record("c", "0", files.reserve(0))]))
files.close()
print("fine")
"""


def test_the_child_of_a_fork_leaves_the_parents_manifest_alone(tmp_path: Path) -> None:
    with run_python(FORK, tmp_path / "store") as child:
        assert child.communicate()[0].endswith("fine\n")
    assert look(tmp_path / "store") == {"a": "0", "c": "0"}


def test_a_program_that_forgets_to_close_keeps_its_commits(tmp_path: Path) -> None:
    code = FORK.split("child = os.fork()", maxsplit=1)[0]
    with run_python(code, tmp_path / "store") as child:
        child.communicate()
    assert look(tmp_path / "store") == {"a": "0"}
    assert {entry.name for entry in (tmp_path / "store").iterdir()} == {FIRST, DB, WITNESS}
