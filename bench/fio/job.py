"""What the keys of a section mean together: a `Job`.

Promises: what does not go together is refused, with the reason.  Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.fio.keys import ANYWHERE, TIERS, Direction
from bench.fio.values import Amount, Mix, Pair, Spreading, ValueFaultError

_DEFAULT_HOST = Amount(1024**3)
_DEFAULT_DISK = Amount(4 * 1024**3)
_NO_RATE = Pair(0, 0)
_ONE_BLOCK = Pair(Mix(((4096, 100.0),)), Mix(((4096, 100.0),)))


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """What a store is opened with.  Jobs with equal ones share a store."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    eviction: str
    codec: str
    link_bandwidth: int | None
    options: tuple[tuple[str, object], ...]  # of the files backend, as given

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers there are, fastest first."""
        capacities = (self.device_bytes, self.host_bytes, self.disk_bytes)
        return tuple(name for name, nbytes in zip(TIERS, capacities, strict=True) if nbytes)

    def capacity_bytes(self, tier: str) -> int:
        """Return a tier's quota."""
        return dict(zip(TIERS, (self.device_bytes, self.host_bytes, self.disk_bytes), strict=True))[tier]


@dataclass(frozen=True, slots=True)
class Step:
    """What one I/O of a direction does.

    Attributes:
        op: the store's verb.
        tier: the tier that the verb names.
        origin: where the tensor lies before: a tier, or `ANYWHERE`.
    """

    op: str
    tier: str
    origin: str


@dataclass(frozen=True, slots=True)
class Job:
    """A section whose ``ioengine`` is the store's."""

    name: str
    direction: Direction
    blocks: Pair[Mix]
    size_bytes: int
    loop_bytes: int
    steps: Pair[Step]
    store: StoreKeys
    spread: Spreading
    description: str = ""
    directory: str = ""
    filename: str = ""
    iodepth: int = 1
    iodepth_batch: int = 1
    numjobs: int = 1
    loops: int = 1
    number_ios: int = 0
    runtime_s: float = 0.0
    is_time_based: bool = False
    ramp_s: float = 0.0
    startdelay_s: float = 0.0
    read_percent: int = 50
    rate: Pair[int] = _NO_RATE
    rate_iops: Pair[int] = _NO_RATE
    fsync: int = 0
    is_flushed_at_end: bool = False
    verify: str = ""
    is_verified_after: bool = True
    randseed: int | None = None
    is_repeatable: bool = True
    has_random_map: bool = True
    is_dropped_after: bool = False
    is_cache_dropped: bool = True
    trace: str = ""
    content: str = "noise"
    zero_percent: int = 0
    batch: Amount | None = None

    def step(self, *, is_read: bool) -> Step:
        """Return what an I/O of this direction does."""
        return self.steps.read if is_read else self.steps.write


@dataclass(frozen=True)
class Meaning:
    """Makes a `Job` of values that are right each by itself.

    Args:
        name: of the job.
        given: the value of each key that was given, as its reader returned it.
    """

    name: str
    given: Mapping[str, Any]
    direction: Direction = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", self.given.get("rw", Direction.READ))

    def job(self) -> Job:
        """Return the job.

        Raises:
            ValueFaultError: two values do not go together, or one is missing.
        """
        size_bytes = self._size()
        store = self._store(size_bytes)
        job = Job(
            name=self.name,
            direction=self.direction,
            blocks=self._blocks(),
            size_bytes=size_bytes,
            loop_bytes=self.given.get("io_size", Amount(percent=100)).of(size_bytes),
            steps=Pair(self._read_step(store), self._write_step(store)),
            store=store,
            spread=self.given.get("random_distribution", Spreading()),
            read_percent=self._read_percent(),
            is_verified_after=self.given.get("do_verify", True),
            is_repeatable=self.given.get("randrepeat", True),
            has_random_map=not self.given.get("norandommap", False),
            is_cache_dropped=self.given.get("invalidate", True),
            **{field: self.given[key] for key, field in _PLAIN.items() if key in self.given},
        )
        _check(job, self.given)
        return job

    def _size(self) -> int:
        if "size" in self.given:
            amount: Amount = self.given["size"]
            if amount.percent is not None:
                raise ValueFaultError("size in percent is of a file; a store has none: give bytes")
            nbytes = amount.nbytes
        elif "filesize" in self.given:
            nbytes = self.given["filesize"].of(0) * self.given.get("nrfiles", 1)
        else:
            raise ValueFaultError("size is missing: the bytes of all tensors")
        blocks = self._blocks()
        largest = max(blocks.read.largest, blocks.write.largest)
        if nbytes < largest:
            raise ValueFaultError(f"size is {nbytes} bytes, less than one tensor of {largest}")
        return nbytes

    def _blocks(self) -> Pair[Mix]:
        for key in ("bssplit", "bsrange", "bs"):
            if key in self.given:
                blocks: Pair[Mix] = self.given[key]
                return blocks
        return _ONE_BLOCK

    def _read_percent(self) -> int:
        if "rwmixwrite" in self.given:
            return 100 - int(self.given["rwmixwrite"])
        return int(self.given.get("rwmixread", 50))

    def _store(self, size_bytes: int) -> StoreKeys:
        given = self.given
        options = {
            option: given[key]
            for key, option in _FILES_OPTIONS.items()
            if key in given and not (key == "durable" and not given[key])
        }
        store = StoreKeys(
            device_bytes=given.get("device_quota", Amount()).of(size_bytes),
            host_bytes=given.get("host_quota", _DEFAULT_HOST).of(size_bytes),
            disk_bytes=given.get("disk_quota", _DEFAULT_DISK).of(size_bytes),
            eviction=given.get("eviction", "lru"),
            codec="" if given.get("codec") == "none" else given.get("codec", ""),
            link_bandwidth=given.get("link_bandwidth"),
            options=tuple(sorted(options.items())),
        )
        if not store.host_bytes:
            raise ValueFaultError("host_quota is 0, but everything goes through host memory")
        if store.capacity_bytes(store.tiers[-1]) < size_bytes:
            raise ValueFaultError(
                f"size is {size_bytes} bytes, more than the {store.capacity_bytes(store.tiers[-1])} of "
                f"{store.tiers[-1]}_quota, the last tier"
            )
        return store

    def _read_step(self, store: StoreKeys) -> Step:
        op = self.given["op"].read if "op" in self.given else ""
        op = op or ("lease" if "trace" in self.given else "fetch")
        if not self.direction.has_reads:
            return Step(op, store.tiers[0], ANYWHERE)
        default = store.tiers[-1] if op == "get" else store.tiers[0]
        tier = self._named("tier", default, store, is_read=True)
        origins = {"lease": ANYWHERE, "get": tier, "open": ANYWHERE}
        origin = origins[op] if op in origins else _neighbour(tier, store, below=True)
        return self._checked(Step(op, tier, self._named("from", origin, store, is_read=True)))

    def _write_step(self, store: StoreKeys) -> Step:
        op = (self.given["op"].write if "op" in self.given else "") or "evict"
        if not self.direction.has_writes:
            return Step(op, store.tiers[-1], ANYWHERE)
        default = store.tiers[0] if op == "put" else store.tiers[-1]
        tier = self._named("tier", default, store, is_read=False)
        origins = {"put": ANYWHERE, "flush": store.tiers[0]}
        origin = origins[op] if op in origins else _neighbour(tier, store, below=False)
        return self._checked(Step(op, tier, self._named("from", origin, store, is_read=False)))

    def _named(self, key: str, default: str, store: StoreKeys, *, is_read: bool) -> str:
        if key not in self.given:
            return default
        pair: Pair[str] = self.given[key]
        name = pair.read if is_read else pair.write
        if name != ANYWHERE and name not in store.tiers:
            raise ValueFaultError(f"{key}={name}, but the tiers with a quota are {', '.join(store.tiers)}")
        return name

    def _checked(self, step: Step) -> Step:
        if step.op in {"fetch", "lease"} and step.tier == "disk":
            raise ValueFaultError(f"op={step.op} brings tensors to host or device, not to tier=disk")
        if step.op in {"evict", "flush"} and step.origin in {ANYWHERE, "disk"}:
            raise ValueFaultError(f"op={step.op} moves what lies in host or device, not from={step.origin}")
        if step.op in {"fetch", "evict"} and step.origin == step.tier:
            raise ValueFaultError(f"op={step.op} moves between tiers, but tier and from are both {step.tier}")
        if step.op == "put" and step.origin != ANYWHERE:
            raise ValueFaultError("op=put takes its bytes from the caller: leave from out")
        return step


def are_asynchronous(job: Job) -> bool:
    """Whether all that the job does goes on by itself once it was begun."""
    return (not job.direction.has_reads or job.steps.read.op == "fetch") and (
        not job.direction.has_writes or job.steps.write.op == "evict"
    )


def _neighbour(tier: str, store: StoreKeys, *, below: bool) -> str:
    index = store.tiers.index(tier) + (1 if below else -1)
    if not 0 <= index < len(store.tiers):
        side = "below" if below else "above"
        raise ValueFaultError(
            f"there is no tier {side} {tier}: the tiers with a quota are {', '.join(store.tiers)}"
        )
    return store.tiers[index]


def _check(job: Job, given: Mapping[str, Any]) -> None:
    """Refuse what does not go together.

    Raises:
        ValueFaultError: says what.
    """
    is_durable = dict(job.store.options).get("durable", False)
    needs_durable = {"fsync": job.fsync, "end_fsync": job.is_flushed_at_end}
    holder = job.steps.read.origin if job.direction.has_reads else ANYWHERE
    needs_durable["op=flush"] = job.direction.has_writes and job.steps.write.op == "flush"
    needs_durable["op=open"] = is_opening = job.direction.has_reads and job.steps.read.op == "open"
    names = [name for name, is_needed in needs_durable.items() if is_needed]
    is_simple = job.iodepth == 1 and job.numjobs == 1 and not job.filename
    wrong = {
        f"{' and '.join(names)} needs durable=1": bool(names) and not is_durable,
        "iodepth_batch is more than iodepth": job.iodepth_batch > job.iodepth,
        "iodepth_batch needs op=fetch or op=evict: one call takes one tensor otherwise": job.iodepth_batch > 1
        and not are_asynchronous(job),
        "time_based needs runtime": job.is_time_based and not job.runtime_s,
        "thread=0: jobs of the store are threads of one process": not given.get("thread", True),
        "trace needs rw=read and op=lease": bool(job.trace)
        and (job.direction is not Direction.READ or job.steps.read.op != "lease"),
        "trace needs iodepth=1, numjobs=1 and no filename: the order is the question": bool(job.trace)
        and not is_simple,
        "trace and time_based: a trace ends": bool(job.trace) and job.is_time_based,
        "op=open needs rw=read, iodepth=1, numjobs=1 and no filename": is_opening
        and not (job.direction is Direction.READ and is_simple),
        "rw=rw and rw=randrw need one size for reads and writes": job.direction.has_reads
        and job.direction.has_writes
        and job.blocks.read != job.blocks.write,
        "filename with verify and writes: give each job its own tensors": bool(
            job.filename and job.verify and job.direction.has_writes and job.numjobs > 1
        ),
        f"size does not fit into {holder}_quota, where from= wants it": holder not in {ANYWHERE, "disk"}
        and job.store.capacity_bytes(holder) < job.size_bytes,
        "verify and content=zeros: one tensor looks like another": bool(job.verify)
        and job.content == "zeros",
        "rate and rate_iops: give one": any((job.rate.read, job.rate.write))
        and any((job.rate_iops.read, job.rate_iops.write)),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueFaultError(message)


_FILES_OPTIONS = {
    "block_size": "aio_block_size",
    "queue_depth": "aio_queue_depth",
    "checksum": "checksum",
    "workers": "threads",
    "direct": "direct",
    "durable": "durable",
    "engine": "engine",
}

_PLAIN = {
    "description": "description",
    "directory": "directory",
    "filename": "filename",
    "iodepth": "iodepth",
    "iodepth_batch": "iodepth_batch",
    "numjobs": "numjobs",
    "loops": "loops",
    "number_ios": "number_ios",
    "runtime": "runtime_s",
    "time_based": "is_time_based",
    "ramp_time": "ramp_s",
    "startdelay": "startdelay_s",
    "rate": "rate",
    "rate_iops": "rate_iops",
    "fsync": "fsync",
    "end_fsync": "is_flushed_at_end",
    "verify": "verify",
    "randseed": "randseed",
    "unlink": "is_dropped_after",
    "trace": "trace",
    "content": "content",
    "buffer_compress_percentage": "zero_percent",
    "batch": "batch",
}
