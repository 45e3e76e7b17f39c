"""Disk peers that go past the page cache: DeepSpeed's handle, kvikio, and fio itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import torch

from bench.peers import ops
from bench.peers.diskjob import DiskJob, Way
from bench.peers.usage import Usage, drive_bytes
from bench.peers.workers import Absent, required


class DeepSpeedAio:
    """The handle that DeepSpeed swaps with: a file a tensor, all of them asked for, then one wait.

    It gets memory of its own kind (page-locked), which is its fastest way.

    Raises:
        Absent: it is not installed, or its operator cannot be built.
    """

    way = Way.DIRECT

    def __init__(self) -> None:
        self._operator = ops.load("async_io")

    def prepare(self, job: DiskJob) -> None:
        """Open a handle and lock memory."""
        self._job = job
        self._handle = self._operator.aio_handle(job.block_bytes, job.depth, False, True, 1)  # noqa: FBT003
        example = torch.empty(0, dtype=torch.uint8)
        self._sources, self._targets = (
            [self._handle.new_cpu_locked_tensor(job.tensor_bytes, example) for _ in range(job.count)]
            for _ in range(2)
        )
        for target in self._targets:
            target.zero_()

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Copy it to locked memory."""
        self._sources[index].copy_(tensor)

    def write(self) -> None:
        """Submit all of them and wait."""
        for index, source in enumerate(self._sources):
            self._handle.async_pwrite(source, str(self._job.file(index)), 0)
        self._wait()

    def read(self) -> None:
        """Submit all of them and wait."""
        for index, target in enumerate(self._targets):
            self._handle.async_pread(target, str(self._job.file(index)), 0)
        self._wait()

    def _wait(self) -> None:
        done = self._handle.wait()
        if done != self._job.count:
            raise OSError(f"{done} of {self._job.count} requests were completed")

    def found(self, index: int) -> torch.Tensor:
        """Return the memory that was read into."""
        found: torch.Tensor = self._targets[index]
        return found

    def finish(self) -> None:
        """Give the locked memory back."""
        for tensor in [*self._sources, *self._targets]:
            self._handle.free_cpu_locked_tensor(tensor)
        self._sources, self._targets = [], []


class Kvikio:
    """kvikio between device memory and files: a file a tensor, all of them asked for, then waited for.

    Raises:
        Absent: it is not installed, or there is no GPU.
    """

    way = Way.DIRECT

    def __init__(self) -> None:
        self._library = required("kvikio", "pip install kvikio-cu12 on a machine with an NVIDIA GPU")
        if not torch.cuda.is_available():
            raise Absent("kvikio moves bytes between a GPU and files; there is no GPU here")

    def prepare(self, job: DiskJob) -> None:
        """Allocate on the device."""
        self._job = job
        self._library.defaults.set({"num_threads": job.depth, "task_size": job.block_bytes})
        self._sources, self._targets = (
            [torch.zeros(job.tensor_bytes, dtype=torch.uint8, device="cuda") for _ in range(job.count)]
            for _ in range(2)
        )

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Copy it to the device."""
        self._sources[index].copy_(tensor)
        torch.cuda.synchronize()

    def write(self) -> None:
        """Submit all of them and wait."""
        self._move("w", self._sources)

    def read(self) -> None:
        """Submit all of them and wait."""
        self._move("r", self._targets)

    def _move(self, flags: str, tensors: Sequence[torch.Tensor]) -> None:
        files = [self._library.CuFile(self._job.file(index), flags) for index in range(len(tensors))]
        moves = [
            file.pwrite(tensor) if flags == "w" else file.pread(tensor)
            for file, tensor in zip(files, tensors, strict=True)
        ]
        moved = [move.get() for move in moves]
        for file in files:
            file.close()
        if set(moved) != {self._job.tensor_bytes}:
            raise OSError(f"of {self._job.tensor_bytes} bytes a tensor, {moved} were moved")

    def found(self, index: int) -> torch.Tensor:
        """Return what was read, in host memory."""
        return self._targets[index].cpu()

    def finish(self) -> None:
        """Let go of the device memory."""
        self._sources, self._targets = [], []


# ---------------------------------------------------------------------- fio


class Fio:
    """fio with one of its engines: the job's bytes in one file, in blocks, at the job's depth.

    Measures itself: `measured` returns what fio says of its last run.  Its bytes are its own, so it is
    fio that checks them, once, outside of what is measured.

    Args:
        engine: fio's name of it.  ``psync`` has a depth of one, so it gets as many jobs as the depth.

    Raises:
        Absent: fio is not installed, or has no such engine.
    """

    way = Way.DIRECT

    def __init__(self, engine: str) -> None:
        if shutil.which("fio") is None:
            raise Absent("fio is not installed: apt-get install fio")
        engines = subprocess.run(
            ["fio", "--enghelp"], capture_output=True, text=True, check=True
        ).stdout.split()
        if engine not in engines:
            raise Absent(f"this fio has no engine {engine}")
        self._engine = engine
        self.verified_bytes = 0

    def prepare(self, job: DiskJob) -> None:
        """Lay the file out, checked: every byte is written, read and compared once.

        Raises:
            Absent: fio cannot use this engine here, such as where io_uring or O_DIRECT is refused.
            RuntimeError: what it read is not what it wrote.
        """
        self._job = job
        try:
            self._run("write")
        except RuntimeError as error:
            raise Absent(str(error)) from error
        self._run("write", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1")
        self.verified_bytes = job.nbytes

    def measured(self, rw: str) -> Usage:
        """Run once, ``"read"`` or ``"write"``; return what it took by fio's own clock."""
        read_before, written_before = drive_bytes()
        job = self._run(rw, "--scramble_buffers=0")
        read_after, written_after = drive_bytes()  # of children, too, once they are waited for
        moved = int(str(job[rw]["io_bytes"]))
        if moved != self._job.nbytes:
            raise RuntimeError(f"fio moved {moved} of {self._job.nbytes} bytes")
        return Usage(
            seconds=float(str(job[rw]["runtime"])) / 1e3,
            cpu_seconds=cpu_seconds_of(job),
            read_bytes=read_after - read_before,
            written_bytes=written_after - written_before,
        )

    def _run(self, rw: str, *more: str) -> Mapping[str, Mapping[str, object]]:
        command = ["fio", *job_options(self._job, self._engine, rw), *more]
        done = subprocess.run(command, cwd=self._job.path, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}{done.stdout[-2000:]}")
        report = json.loads(done.stdout[done.stdout.index("{") :])
        job: Mapping[str, Mapping[str, object]] = report["jobs"][0]
        if job["error"]:
            raise RuntimeError(f"{' '.join(command)} reported error {job['error']}")
        return job


def job_options(job: DiskJob, engine: str, rw: str) -> list[str]:
    """Return the words after ``fio`` that do the job's work."""
    numjobs = job.depth if engine == "psync" else 1
    size = job.nbytes // numjobs
    if size % job.block_bytes:
        raise ValueError(
            f"{job.nbytes} bytes are not whole blocks of {job.block_bytes} for each of {numjobs} jobs"
        )
    return [
        f"--name={engine}", f"--ioengine={engine}", f"--rw={rw}", f"--filename={job.path / 'fio'}",
        f"--bs={job.block_bytes}", f"--size={size}", f"--offset_increment={size}", f"--numjobs={numjobs}",
        f"--iodepth={1 if engine == 'psync' else job.depth}", "--direct=1", "--group_reporting",
        "--output-format=json",
    ]  # fmt: skip


def cpu_seconds_of(job: Mapping[str, object]) -> float:
    """Return the processor seconds of a job in fio's JSON: percents of the time of all its threads."""
    percent = float(str(job["usr_cpu"])) + float(str(job["sys_cpu"]))
    return percent / 100 * float(str(job["job_runtime"])) / 1e3
