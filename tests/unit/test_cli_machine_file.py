"""``tierstore doctor --write``: what is measured becomes a machine that the planner reads."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tierstore.cli import doctor, machine_file, main, measure, measure_device
from tierstore.cli.machine_file import MeasuredDisk, MeasuredMachine, machine_of
from tierstore.cli.measure_device import ComputeSpeed, DeviceSpeed
from tierstore.errors import BackendError, UsageError
from tierstore.planning import Machine, TierFigures, TierMedium
from tierstore.planning.machine_text import machine_from_yaml
from tierstore.units import GIB, MIB

_Output = pytest.CaptureFixture[str]

_TODAY = datetime.date(2026, 11, 27)
_COMPUTE = ComputeSpeed({"float32": 2e11}, 4e10, 2e-6)
_DISK = MeasuredDisk(
    "/a",
    10 * GIB,
    measure.Disk(
        is_direct=True,
        alignment_bytes=4096,
        write_bytes_per_s=2_000_000_000,
        read_bytes_per_s=3_000_000_000,
    ),
    measure.DiskAtOnce(3_500_000_000, 1e-4),
)
_FOUND = MeasuredMachine(
    "cuda:0: H1000; 8 cores",
    is_emulated=False,
    device_bytes=70 * GIB,
    host_bytes=100 * GIB,
    copies=DeviceSpeed(50e9, 48e9, 97e9, 8e-6, 9e-6),
    device=ComputeSpeed({"bfloat16": 7e14}, 3e12, 4e-6),
    host=_COMPUTE,
    disks=[_DISK],
)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure hardly anything: what is tested is what is done with it."""
    monkeypatch.setattr(measure, "_COPY_BYTES", MIB)
    monkeypatch.setattr(measure, "_COPY_SECONDS", 0.001)
    monkeypatch.setattr(measure, "_FILE_BYTES", 12 * MIB)
    monkeypatch.setattr(measure, "_DISK_SECONDS", 0.0)
    monkeypatch.setattr(measure_device, "_COPY_BYTES", MIB)
    monkeypatch.setattr(measure_device, "_SECONDS", 0.0)
    monkeypatch.setattr(measure_device, "_MOST_SIDE", 128)
    monkeypatch.setattr(doctor, "_HAVE_NATIVE_PARTS", ())


# ------------------------------------------------------------------------------ the verb


def test_a_machine_is_written_that_the_planner_reads(tmp_path: Path, capsys: _Output) -> None:
    path = tmp_path / "machine.yaml"
    assert main(["doctor", "--write", str(path), str(tmp_path)]) == 0
    machine = machine_from_yaml(path.read_text())
    assert [tier.name for tier in machine.tiers] == ["device", "host", "disk"]
    assert {"float32", "bfloat16"} <= set(machine.device.flops_per_s)
    assert all("measured 20" in said for name, said in machine.sources.items() if name != "tiers.device")
    assert machine.sources["tiers.device"].startswith("assumed")  # there is no device to be asked
    assert f"written to {path}" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["machine.yaml"]


def test_a_file_that_is_there_stays_and_nothing_is_measured(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text("mine")
    monkeypatch.setattr(measure, "host_copy_bytes_per_s", _never)
    assert main(["doctor", "--write", str(path), str(tmp_path)]) == 2
    assert "is there already; --force writes over it" in capsys.readouterr().err
    assert path.read_text() == "mine"


def _never() -> int:
    raise AssertionError("it is measured")


def test_force_writes_over_it(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text("mine")
    assert main(["doctor", "--json", "--write", str(path), "--force", str(tmp_path)]) == 0
    assert machine_from_yaml(path.read_text()).tiers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--force"], "give --write FILE, too"),
        (["--device", "emulated"], "give --write FILE, too"),
        (["--write", "no/such/place.yaml"], "the directory no/such is not there"),
        (["--write", "."], "is a directory"),
        (["--write", "m.yaml", "--device", "cuda:9"], "no device 'cuda:9'; accepted: emulated"),
    ],
)
def test_a_wrong_call_says_what_is_accepted(
    words: list[str], said: str, tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ writing


def test_who_made_the_file_meanwhile_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text("another's")
    with pytest.raises(UsageError, match="is there already"):
        machine_file.write(path, machine_of(_FOUND, _TODAY), force=False)
    assert path.read_text() == "another's"
    assert [each.name for each in tmp_path.iterdir()] == ["machine.yaml"]


@pytest.mark.parametrize("force", [False, True])
def test_a_write_that_fails_leaves_what_was_there(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.yaml"
    if force:
        path.write_text("mine")

    def fail(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace" if force else "hardlink_to", fail)
    with pytest.raises(UsageError, match="cannot be written: No space left"):
        machine_file.write(path, machine_of(_FOUND, _TODAY), force=force)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"] * force


# ------------------------------------------------------------------------------ what it says


def test_every_figure_says_that_it_was_measured_and_when() -> None:
    machine = machine_of(_FOUND, _TODAY)
    figures = [
        *(f"tiers.{tier.name}" for tier in machine.tiers),
        *(f"links.{link.name}" for link in machine.links),
        *(f"shares.{share}" for share in machine.shares),
        *(f"compute.{dtype}" for dtype in machine.device.flops_per_s),
        *(f"host.{dtype}" for dtype in machine.host.flops_per_s),
        *("compute.memory", "host.memory", "compute.operator_s", "host.operator_s", "compute.efficiency"),
    ]
    assert set(figures) == set(machine.sources)
    assert all(said.startswith("measured 2026-11-27") for said in machine.sources.values())


def test_an_accelerator_is_as_it_was_measured() -> None:
    machine = machine_of(_FOUND, _TODAY)
    assert machine.tiers == (
        TierFigures("device", 70 * GIB, TierMedium.DEVICE, 512),
        TierFigures("host", 100 * GIB, TierMedium.HOST, 512),
        TierFigures("disk", 10 * GIB, TierMedium.STORAGE, 4096),
    )
    assert [(link.name, link.bytes_per_s, link.latency_s) for link in machine.links] == [
        ("host->device", 50e9, 8e-6),
        ("device->host", 48e9, 9e-6),
        ("disk->host", 3e9, 1e-4),
        ("host->disk", 2e9, 1e-4),
    ]
    assert machine.device.flops_per_s == {"bfloat16": 7e14}
    assert machine.has_streams


@pytest.mark.parametrize(("together", "bus"), [(97e9, None), (73.6e9, None), (60e9, 60e9), (40e9, 50e9)])
def test_directions_share_a_bus_where_both_at_once_reach_less(together: float, bus: float | None) -> None:
    machine = machine_of(replace(_FOUND, copies=replace(_FOUND.copies, both_bytes_per_s=together)), _TODAY)
    assert machine.shares.get("bus") == bus
    shares = {link.shares for link in machine.links if "device" in (link.source, link.target)}
    assert shares == ({()} if bus is None else {("bus",)})


def test_the_emulated_device_is_a_part_of_the_host() -> None:
    machine = machine_of(replace(_FOUND, is_emulated=True, device_bytes=None), _TODAY)
    assert machine.tier("device").capacity_bytes + machine.tier("host").capacity_bytes == 100 * GIB
    assert machine.sources["tiers.device"].startswith("assumed")
    assert not machine.has_streams


def test_several_disks_add_up_and_one_through_the_page_cache_says_so() -> None:
    cached = replace(_DISK, path="/b", alone=replace(_DISK.alone, is_direct=False, alignment_bytes=None))
    machine = machine_of(replace(_FOUND, disks=[_DISK, cached]), _TODAY)
    assert machine.tier("disk").capacity_bytes == 20 * GIB
    assert machine.shares["drive"] == 7e9
    said = machine.sources["links.disk->host"]
    assert "measured 2026-11-27 in /a, /b; through the page cache, which is host memory: /b" in said


def test_a_drive_s_total_is_never_less_than_one_direction_alone() -> None:
    slow = replace(_DISK, at_once=measure.DiskAtOnce(10, 1e-4))
    assert machine_of(replace(_FOUND, disks=[slow]), _TODAY).shares["drive"] == 3e9


# ------------------------------------------------------------------------------ measuring


def test_copies_and_computing_are_measured_in_host_memory() -> None:
    copies = measure_device.device_speed(measure_device.CPU)
    assert min(copies.to_device_bytes_per_s, copies.from_device_bytes_per_s, copies.both_bytes_per_s) > 0
    assert min(copies.to_device_latency_s, copies.from_device_latency_s) > 0
    computing = measure_device.compute_speed(measure_device.CPU)
    assert "float32" in computing.flops_per_s
    assert min(*computing.flops_per_s.values(), computing.memory_bytes_per_s, computing.operator_s) > 0


def test_an_accelerator_copies_in_two_streams_and_each_copy_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin of the last test but one, with host memory for a device."""
    waited: list[str] = []
    streams: list[str] = []
    make = torch.ones

    def stream(device: str) -> contextlib.AbstractContextManager[None]:
        streams.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch, "ones", lambda size, dtype, pin_memory: make(size, dtype=dtype))
    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    copies = measure_device.device_speed("cpu:0")
    assert copies.both_bytes_per_s > 0
    assert streams == ["cpu:0"] * 2
    assert waited == ["cpu:0"] * 10  # five kinds of copies, each first tried and then measured


def _refusing(dtype: torch.dtype, error: RuntimeError) -> Callable[..., torch.Tensor]:
    real = torch.mm

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if left.dtype == dtype:
            raise error
        return real(left, right, out=out)

    return multiply


def test_a_dtype_that_cannot_be_multiplied_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = RuntimeError("not implemented for 'Half'")
    monkeypatch.setattr(torch, "mm", _refusing(torch.float16, refusal))
    assert set(measure_device.compute_speed("cpu").flops_per_s) == {"float32", "bfloat16", "float64"}


def test_a_device_without_room_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "mm", _refusing(torch.float32, torch.OutOfMemoryError("CUDA out of memory\nx"))
    )
    with pytest.raises(BackendError, match="cpu: cannot be measured: CUDA out of memory; free memory there"):
        machine_file.measured("x", "cpu", None, GIB, [])


def test_small_products_are_made_larger_until_starting_them_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides: list[int] = []
    real = torch.mm

    def note(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sides.append(len(left))
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", note)
    monkeypatch.setattr(measure_device, "_MOST_SIDE", 256)
    monkeypatch.setattr(measure_device, "_once_s", lambda work: work() or 0.001)
    monkeypatch.setattr(measure_device, "_SECONDS", 0.01)
    measure_device.compute_speed("cpu")
    assert set(sides) == {128, 256}


def test_a_disk_is_read_and_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    read, write = os.preadv, os.pwritev

    def note_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        moved.append("read")
        return read(descriptor, buffers, offset)

    def note_write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        moved.append("write")
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", note_read)
    monkeypatch.setattr(os, "pwritev", note_write)
    found = measure.disk_at_once(tmp_path, room_bytes=12 * MIB)
    assert found.together_bytes_per_s > 0
    assert found.latency_s > 0
    assert {"read", "write"} == set(moved)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_or_with_an_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match="make room there"):
        measure.disk_at_once(tmp_path, room_bytes=MIB)
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 1)
    with pytest.raises(BackendError, match="only a part"):
        measure.disk_at_once(tmp_path, room_bytes=12 * MIB)


@pytest.mark.gpu
def test_an_accelerator_is_measured() -> None:
    name = str(torch.accelerator.current_accelerator())
    copies, computing = measure_device.device_speed(name), measure_device.compute_speed(name)
    assert copies.both_bytes_per_s > 0
    assert computing.flops_per_s["bfloat16"] > 0


def test_what_is_written_is_the_machine(tmp_path: Path) -> None:
    machine: Machine = machine_of(_FOUND, _TODAY)
    machine_file.write(tmp_path / "m.yaml", machine, force=False)
    assert machine_from_yaml((tmp_path / "m.yaml").read_text()) == machine
