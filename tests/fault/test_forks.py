"""In the child of a fork a store is of no use and never hangs, and its parent never notices."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tierstore as ts
from tests.files_disk import Gate, ScriptedKernel, needs_ring, open_durable, open_files
from tests.forked import in_child, in_thread, run_python
from tests.stores import numbered
from tests.zarr_stores import open_zarr
from tierstore import forks
from tierstore.config import StoreConfig, TierConfig
from tierstore.engine import transfer
from tierstore.errors import StoreForked
from tierstore.leases import Lease
from tierstore.spi import Backend
from tierstore_backends.memory import open_backend

KIB = 1024
NBYTES = 8 * KIB
KEYS = tuple("abcdefgh")
ENGINES = ["threads", "plain", "aiofiles", pytest.param("io_uring", marks=needs_ring)]

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Shutter:
    """A gate before every write to the disk, which can be shut."""

    def __init__(self) -> None:
        self._gate = Gate()

    def __call__(self, kind: str, offset: int, nbytes: int) -> int | None:
        return self._gate(kind, offset, nbytes)

    def shut(self) -> None:
        """Let nothing be written until it is opened."""
        self._gate = Gate("write")

    def wait_for_caller(self) -> None:
        """Return when somebody is about to write."""
        self._gate.wait_for_caller()

    def open(self) -> None:
        """Let everybody through."""
        self._gate.open()


@dataclass
class Scene:
    """A store at the moment of the fork.

    Attributes:
        store: host memory for half of the keys, and something behind I/O for all.
        gate: what stands before every write to that; open until it is shut.
        lease: of the first key, held.
        transfer: of the second, on its way or done.
        reader: of parts of the last key.
    """

    store: ts.Store
    gate: Shutter
    lease: Lease = field(init=False)
    transfer: ts.Transfer[None] = field(init=False)
    reader: ts.PartReader = field(init=False)

    def read_part(self) -> torch.Tensor:
        """Return the second half of the last key."""
        into = torch.zeros(1, NBYTES // 2, dtype=torch.uint8)
        self.reader.read([(KEYS[-1], NBYTES // 2)], into).result()
        return into[0]


def opened(kind: str, path: Path, gate: Shutter) -> tuple[Backend, str | None]:
    """Return a backend of a kind, whose writes go through the gate, and a codec."""
    if kind == "zarr":
        return open_zarr(str(path)), None
    if kind == "durable":
        return open_durable(path, syscalls=ScriptedKernel(gate)), None
    engine = "threads" if kind == "codec" else kind
    options: dict[str, Any] = {"enable_aio": False} if kind == "plain" else {"engine": engine}
    return open_files(path, syscalls=ScriptedKernel(gate), **options), "lz4" if kind == "codec" else None


@contextlib.contextmanager
def scene(kind: str, path: Path) -> Iterator[Scene]:
    """Open a store with all keys; see afterwards that nothing was lost, and close it."""
    gate = Shutter()
    backend, codec = opened(kind, path, gate)
    host = open_backend(capacity_bytes=len(KEYS) * NBYTES // 2, options={})
    tiers = [
        TierConfig("host", host, len(KEYS) * NBYTES // 2),
        TierConfig("disk", backend, 8 * KIB * KIB, codec=codec),
    ]
    store = ts.Store(StoreConfig(tiers))
    try:
        for number, key in enumerate(KEYS):
            store.put(key, numbered(number, NBYTES))
        if store.is_durable:
            store.flush()
        made = Scene(store, gate)
        made.lease = store.lease("a", tier="host")
        made.transfer = store.fetch("b", tier="host")
        made.transfer.result()
        made.reader = store.reader()
        made.reader.add(KEYS[-1])
        yield made
        gate.open()
        assert torch.equal(made.read_part(), numbered(len(KEYS) - 1, NBYTES // 2))
        made.reader.close()
        made.transfer.result()
        made.lease.release()
        for number, key in enumerate(KEYS):
            assert torch.equal(store.get(key), numbered(number, NBYTES))
        store.check()
    finally:
        gate.open()
        store.close()
    assert not path.exists() or {entry.suffix for entry in path.iterdir()} <= {".bin", ".db"}


async def awaited(transfer: ts.Transfer[None]) -> None:
    await transfer


USES: dict[str, Callable[[Scene], object]] = {
    "put": lambda s: s.store.put("new", numbered(1)),
    "replace": lambda s: s.store.put("a", numbered(1), replace=True),
    "get": lambda s: s.store.get("c"),
    "lease": lambda s: s.store.lease("c", tier="host"),
    "write lease": lambda s: s.store.lease("c", tier="host", write=True),
    "fetch": lambda s: s.store.fetch("c", tier="host"),
    "prefetch": lambda s: s.store.prefetch("c", tier="host"),
    "evict": lambda s: s.store.evict("c"),
    "flush": lambda s: s.store.flush(),
    "drop": lambda s: s.store.drop("c"),
    "rename": lambda s: s.store.rename({"c": "z"}),
    "resize": lambda s: s.store.resize("host", NBYTES),
    "follow": lambda s: s.store.follow(None),
    "advance": lambda s: s.store.advance(1),
    "where": lambda s: s.store.where("c"),
    "spec": lambda s: s.store.spec("c"),
    "story": lambda s: s.store.story("c"),
    "check": lambda s: s.store.check(),
    "in": lambda s: "c" in s.store,
    "len": lambda s: len(s.store),
    "iter": lambda s: list(s.store),
    "keys": lambda s: s.store.keys(),
    "stats": lambda s: s.store.stats(),
    "rooms": lambda s: s.store.rooms(),
    "leased bytes": lambda s: s.store.leased_bytes("host"),
    "lease[key]": lambda s: s.lease["a"],
    "lease.tensor": lambda s: s.lease.tensor,
    "lease.use": lambda s: s.lease.use(),
    "lease.split": lambda s: s.lease.split({"a": "z"}),
    "reader": lambda s: s.store.reader(),
    "reader.add": lambda s: s.reader.add("c"),
    "reader.remove": lambda s: s.reader.remove(KEYS[-1]),
    "reader.read": lambda s: s.read_part(),
    "result": lambda s: s.transfer.result(),
    "result in time": lambda s: s.transfer.result(timeout_s=0.1),
    "done": lambda s: s.transfer.done(),
    "callback": lambda s: s.transfer.add_done_callback(lambda: None),
    "await": lambda s: asyncio.run(awaited(s.transfer)),
}


def use_all(made: Scene) -> None:
    """Try everything; then end everything, in every way that there is.  In the child."""
    for name, use in USES.items():
        try:
            with pytest.raises(StoreForked, match=r"Open a store of its own here.*'spawn'"):
                use(made)
        except BaseException as failure:
            failure.add_note(f"in {name!r}")
            raise
    with made.lease:
        pass
    made.lease.release()
    with made.reader:
        pass
    made.reader.close()
    with made.store:
        pass
    made.store.close(flush=False)
    made.store.close()


every_kind = pytest.mark.parametrize("kind", [*ENGINES, "durable", "codec", "zarr"])


@every_kind
def test_a_child_is_refused_by_name_while_nothing_moves(kind: str, tmp_path: Path) -> None:
    with scene(kind, tmp_path / "x") as made:
        in_child(lambda: use_all(made))


def refused_to_another_thread(kind: str, path: Path) -> None:
    """Fork in a thread, and use a store in the child."""
    with scene(kind, path) as made:
        in_thread(lambda: in_child(lambda: use_all(made)))


IN_A_THREAD = """
import sys
from pathlib import Path
from tests.fault import test_forks as forks
for kind in sys.argv[2].split():
    path = Path(sys.argv[1]) / kind
    forks.refused_to_another_thread(kind, path / "thread")
    if kind in forks.IN_THE_MIDST:
        forks.refused_in_a_callback(kind, path / "callback")
"""


@pytest.mark.parametrize(
    "kinds", ["threads plain aiofiles durable codec zarr", pytest.param("io_uring", marks=needs_ring)]
)
def test_a_child_of_another_thread_is_refused_by_name_also_in_the_callback_of_a_transfer(
    kinds: str, tmp_path: Path
) -> None:
    """In a process of its own: among what hundreds of other tests leave, such a child has been killed.

    Python or PyTorch did so before ``os.fork`` had returned in it.
    """
    run_python(IN_A_THREAD, str(tmp_path), kinds)


# ---------------------------------------------------------------------- while something is under way

IN_THE_MIDST = ["threads", "plain", "durable", "codec"]  # a ring's thread stands at no gate, nor does zarr's
in_the_midst = pytest.mark.parametrize("kind", IN_THE_MIDST)


@contextlib.contextmanager
def under_way(act: Callable[[], object], gate: Shutter) -> Iterator[None]:
    """Let another thread ``act``, which stands at the gate inside the context."""
    gate.shut()
    with ThreadPoolExecutor(1) as thread:
        acting = thread.submit(act)
        try:
            gate.wait_for_caller()
            yield
        finally:
            gate.open()
        acting.result()


@in_the_midst
def test_a_child_is_refused_by_name_while_copies_are_in_flight(kind: str, tmp_path: Path) -> None:
    with scene(kind, tmp_path / "x") as made:
        made.store.put("b", numbered(1, NBYTES), tier="host", replace=True)
        with under_way(lambda: made.store.evict("b").result(), made.gate):
            for _ in range(3):
                in_child(lambda: use_all(made))


@in_the_midst
def test_a_transfer_that_was_in_flight_is_refused_in_the_child_and_ends_in_the_parent(
    kind: str, tmp_path: Path
) -> None:
    with scene(kind, tmp_path / "x") as made:
        made.store.put("b", numbered(1, NBYTES), tier="host", replace=True)

        def evict() -> None:
            made.transfer = made.store.evict("b")  # which the engine "plain" carries out before it returns
            made.transfer.result()

        with under_way(evict, made.gate):
            in_child(lambda: use_all(made))


def test_a_child_is_refused_by_name_inside_a_flush(tmp_path: Path) -> None:
    with scene("durable", tmp_path / "x") as made:
        made.store.put("b", numbered(1, NBYTES), tier="host", replace=True)
        with under_way(made.store.flush, made.gate):
            in_child(lambda: use_all(made))


@in_the_midst
def test_a_child_is_refused_by_name_while_another_thread_puts(kind: str, tmp_path: Path) -> None:
    with (
        scene(kind, tmp_path / "x") as made,
        under_way(lambda: made.store.put("z", numbered(1, NBYTES), tier="disk"), made.gate),
    ):
        in_child(lambda: use_all(made))


def refused_in_a_callback(kind: str, path: Path) -> None:
    """Fork in the thread that says that a transfer has ended, and use the store in the child."""
    with scene(kind, path) as made:
        forked: Future[None] = Future()

        def fork() -> None:
            try:
                in_child(lambda: use_all(made))
            except AssertionError as failure:
                forked.set_exception(failure)
            else:
                forked.set_result(None)

        made.store.put("b", numbered(1, NBYTES), tier="host", replace=True)
        with under_way(lambda: made.store.evict("b").add_done_callback(fork), made.gate):
            pass
        forked.result(60)


@in_the_midst
def test_the_close_that_another_thread_is_about_leaves_the_child_alone(kind: str, tmp_path: Path) -> None:
    gate = Shutter()
    backend, codec = opened(kind, tmp_path / "x", gate)
    host = open_backend(capacity_bytes=NBYTES, options={})
    store = ts.Store(
        StoreConfig([TierConfig("host", host, NBYTES), TierConfig("d", backend, 64 * KIB, codec=codec)])
    )
    store.put("a", numbered(1, NBYTES))

    def close() -> None:
        store.evict("a", to="d")
        store.close()

    with under_way(close, gate):
        in_child(store.close)


# ---------------------------------------------------------------------- locks


Lock = Any  # the two kinds have no type in common


def locks_of(root: object) -> list[Lock]:
    """Return every lock of this library that an object refers to, and those of its modules."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    found, seen, due = [], set(), [root, vars(transfer)]
    while due:
        each = due.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kinds):
            found.append(each)
        elif isinstance(each, dict):
            due += each.values()
        elif isinstance(each, list | tuple | set):
            due += each
        elif type(each).__module__.startswith(("tierstore", "threading", "tests")):
            due += getattr(each, "__dict__", {}).values()
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            due += [getattr(each, name) for name in slots if hasattr(each, name)]
    return found


@contextlib.contextmanager
def all_held(locks: list[Lock]) -> Iterator[None]:
    """Let another thread hold every lock, inside the context."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        taken = [lock for lock in locks if lock.acquire(timeout=0.05)]
        is_held.set()
        may_end.wait()
        for lock in taken:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


@every_kind
def test_a_child_waits_for_no_lock_that_a_thread_of_its_parent_holds(kind: str, tmp_path: Path) -> None:
    with scene(kind, tmp_path / "x") as made:
        locks = locks_of(made)
        assert len(locks) > 5
        with all_held(locks):
            in_child(lambda: use_all(made))


# ---------------------------------------------------------------------- what the child may do


def test_a_signals_handler_that_forks_in_a_wait_ends_it_in_the_child_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_LOOK_AGAIN_S", 0.01)
    with scene("durable", tmp_path / "x") as made:
        made.store.put("b", numbered(1, NBYTES), tier="host", replace=True)
        made.gate.shut()
        parent = os.getpid()
        children: list[int] = []

        def fork(number: int, frame: FrameType | None) -> None:
            del number, frame
            children.append(os.fork())
            if children[-1] == 0:
                signal.alarm(30)
            else:
                made.gate.open()

        former = signal.signal(signal.SIGUSR1, fork)
        main = threading.get_ident()

        def strike() -> None:
            made.gate.wait_for_caller()
            signal.pthread_kill(main, signal.SIGUSR1)

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            made.store.flush()
        except StoreForked:
            os._exit(7 if os.getpid() != parent else 8)
        finally:
            if os.getpid() != parent:
                os._exit(9)
        striking.join()
        signal.signal(signal.SIGUSR1, former)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7


@every_kind
def test_a_child_has_a_store_of_its_own_as_any_process(kind: str, tmp_path: Path) -> None:
    def work() -> None:
        with scene(kind, tmp_path / "y") as own:
            own.store.put("mine", numbered(3, NBYTES))
        assert not (tmp_path / "y").exists() or kind == "durable"

    with scene(kind, tmp_path / "x"):
        in_child(work)


@every_kind
def test_a_child_that_lives_longer_keeps_no_path_in_use(kind: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with scene(kind, tmp_path / "x"):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os.close(writing)
            os.read(reading, 1)  # until the parent has ended, or says so
            os._exit(0)
    os.close(reading)
    with scene(kind, tmp_path / "x") if kind != "durable" else open_durable_again(tmp_path / "x"):
        pass
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextlib.contextmanager
def open_durable_again(path: Path) -> Iterator[None]:
    files = open_durable(path)
    assert {record.name for record in files.recovered()} == set(KEYS)
    files.close()
    yield


def test_a_lock_is_given_up_though_a_child_that_nobody_told_has_a_copy_of_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    files = open_files(tmp_path / "x")
    child = ctypes.CDLL(None).fork()  # past Python
    if child == 0:
        signal.alarm(60)
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    files.close()
    open_files(tmp_path / "x").close()
    os.close(writing)
    os.waitpid(child, 0)


def test_a_copy_that_nobody_refers_to_any_more_is_let_go_in_a_child_while_a_thread_hands_out_memory(
    tmp_path: Path,
) -> None:
    with ts.Store(StoreConfig([TierConfig("host", "memory", 8 * KIB * KIB)])) as store:
        store.put("a", torch.zeros(2 * KIB * KIB, dtype=torch.uint8))
        copies = [store.get("a")]
        with all_held(locks_of(store)):
            in_child(copies.clear)


# ---------------------------------------------------------------------- threads of a child that compute

COMPUTING_CHILD = """
import os, threading, torch
from tierstore.tables.workers import TableWorkers

def add() -> float:
    at_once.wait()
    return torch.ones(100_000).add_(1)[0].item()

torch.set_num_threads(1)
torch.ones(100_000).sum()
for number in range(20):
    child = os.fork()
    if child == 0:
        at_once = threading.Barrier(4)
        workers = TableWorkers("table")
        futures = [workers.submit(add) for _ in range(4)]
        assert [each.result() for each in futures] == [2.0] * 4
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, number
print("fine")
"""


def test_threads_of_a_child_that_compute_at_once_find_pytorchs_threads() -> None:
    assert run_python(COMPUTING_CHILD).endswith("fine\n")


# ---------------------------------------------------------------------- processes that come to their end

ENDS = """
import os, sys, threading, torch
import tierstore as ts
how, path = sys.argv[1:]
torch.set_num_threads(1)
sizes = {"offload_cpu_size": "64KB", "offload_disk_size": "8MB", "durable": how.startswith("durable")}
config = {"device": "cpu", "offload_path": path, **sizes}
store = ts.Store(ts.OffloadConfig.from_mapping(config).store_config())
for number in range(32):
    store.put(str(number), torch.full((8192,), number, dtype=torch.uint8))
if store.is_durable:
    store.flush()
moving = [store.fetch(str(number)) for number in range(4)]
child = os.fork()
if child == 0:
    if "close" in how:
        store.close()
    if "raise" in how:
        raise ValueError("the child fails")
    if "thread" in how:
        threading.Thread(target=sys.exit, daemon=False).start()
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
for each in moving:
    each.result()
for number in range(32):
    assert store.get(str(number)).eq(number).all()
store.close()
if store.is_durable:
    with ts.Store(ts.OffloadConfig.from_mapping(config).store_config()) as store:
        assert len(store) == 32
else:
    assert not os.path.exists(path)
print("fine")
"""


@pytest.mark.parametrize(
    "how", ["scratch", pytest.param("durable close", marks=pytest.mark.long), "durable raise"]
)
def test_a_child_that_comes_to_the_interpreters_end_leaves_its_parent_everything(
    how: str, tmp_path: Path
) -> None:
    assert run_python(ENDS, how, str(tmp_path / "x")).endswith("fine\n")
