"""How much host memory there is: the least of what the machine, the cgroups and the limits leave."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tierstore.config import host_memory, machine
from tierstore.config.host_memory import HostRoom, host_rooms

GIB = 1024**3


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where cgroups are; the process is in none."""
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_CGROUP_OF_SELF", tmp_path / "self")
    return tmp_path / "cgroup"


def enter(cgroups: Path, line: str) -> None:
    (cgroups.parent / "self").write_text(f"1:cpu:/\n{line}\n")


def write(folder: Path, **figures: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in figures.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def of_cgroups() -> list[int]:
    return [each.nbytes for each in host_rooms() if "cgroup" in each.name]


def test_a_process_in_no_cgroup_has_what_the_machine_has(cgroups: Path) -> None:
    assert of_cgroups() == []
    enter(cgroups, "0::/there/is/no/such")
    assert of_cgroups() == []


def test_every_cgroup_of_version_2_from_here_up_bounds_memory(cgroups: Path) -> None:
    enter(cgroups, "0::/user/job")
    write(cgroups / "user", memory__max=8 * GIB, memory__high="max", memory__current=3 * GIB)
    write(cgroups / "user" / "job", memory__max=4 * GIB, memory__high=2 * GIB, memory__current=GIB)
    assert of_cgroups() == [GIB, 5 * GIB]


def test_a_cgroup_without_a_bound_is_none(cgroups: Path) -> None:
    enter(cgroups, "0::/job")
    write(cgroups / "job", memory__max="max", memory__high="max", memory__current=GIB)
    assert of_cgroups() == []


def test_cached_files_of_a_cgroup_count_as_free(cgroups: Path) -> None:
    enter(cgroups, "0::/")
    stat = f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nfile {GIB}"
    write(cgroups, memory__max=2 * GIB, memory__current=2 * GIB, memory__stat=stat)
    assert of_cgroups() == [GIB * 3 // 4]


def test_a_cgroup_that_is_over_its_bound_leaves_nothing(cgroups: Path) -> None:
    enter(cgroups, "0::/")
    write(cgroups, memory__max=GIB, memory__current=2 * GIB)
    assert of_cgroups() == [0]


def test_cgroups_of_version_1_bound_memory_too(cgroups: Path) -> None:
    enter(cgroups, "4:hugetlb,memory:/docker/abc")
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    folder = cgroups / "memory" / "docker"
    write(
        folder, memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat=stat
    )  # a container does not see its own folder
    assert of_cgroups() == [3 * GIB]


@pytest.mark.parametrize("name", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_limits_of_the_process_bound_what_is_mapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = getattr(resource, name)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (64 * GIB, 64 * GIB) if which == wanted else unlimited
    )
    (found,) = [each for each in host_rooms() if each.counts_addresses]
    assert found.name == name
    assert 0 < found.nbytes < 64 * GIB


def test_the_least_bound_is_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_rooms", lambda: [HostRoom(7, "a"), HostRoom(5, "b"), HostRoom(9, "c")])
    assert machine.available_host_bytes() == 5


def test_this_machine_tells_every_bound_by_name() -> None:
    rooms = host_rooms()
    assert all(each.nbytes >= 0 and each.name for each in rooms)
    assert rooms[0].name == "the machine's available memory"
