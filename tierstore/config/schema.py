"""The three configurations: one tier, one store, and what a training loop offloads.

All are frozen and valid once made.  Values that depend on the machine stay ``None`` in
`OffloadConfig` until `OffloadConfig.store_config` asks for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any, cast

from tierstore.config import checks, document, machine
from tierstore.config.checks import Check, Faults
from tierstore.errors import ConfigError
from tierstore.quoting import listed, named, quoted
from tierstore.units import parse_bytes

Paths = str | PurePath | Sequence[str | PurePath]
"""A directory, or several; kept as text, or as a tuple of texts."""

Size = int | str
"""Bytes, or text such as ``"512GB"``; see `tierstore.units.parse_bytes`."""


def _keep(owner: object, kept: Mapping[str, object]) -> None:
    """Put the checked values of a frozen dataclass in the place of those given."""
    for key, value in kept.items():
        object.__setattr__(owner, key, value)


@dataclass(frozen=True)
class TierConfig:
    """One tier: which backend, how many bytes, and when room is made.

    Args:
        name: what calls and messages call the tier.
        backend: the name of an entry point in the group ``tierstore.backends``, or an instance of
            a backend, which the store then closes.
        capacity: the hard quota, as a size; 0 is allowed.
        high: the share of the capacity above which eviction begins, 0 < high <= 1 (the int 1 too).
        low: the share down to which it goes on, 0 < low <= high; ``None``: as ``high``.
        options: for the backend's factory, which checks them; and for any tier whose bytes are behind I/O
            ``max_bandwidth`` (a size for each second, such as ``"2GB/s"``, of both directions together), or
            ``max_read_bandwidth`` and ``max_write_bandwidth``, and ``retries``: how often an operation is
            tried again that fails for a reason that may pass, at first after ``retry_wait_s`` (0.1).
        codec: ``"lz4"``: bytes that repeat are compressed, and take less of the capacity; only for
            backends behind I/O, such as ``"files"``.  ``None`` or ``"none"``: they are not.
        setting: for a program whose users know of no tiers and keys: what messages tell them to raise.

    Raises:
        ConfigError: lists every fault.
    """

    name: str
    backend: object
    capacity: Size
    high: float = 1.0
    low: float | None = None
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    codec: str | None = None
    setting: str | None = None

    def __post_init__(self) -> None:
        faults = Faults(f"TierConfig {quoted(self.name)}")
        table: dict[str, Check] = {
            "name": checks.name,
            "backend": checks.backend,
            "capacity": checks.size,
            "high": checks.ratio,
            "low": checks.optional(checks.ratio),
            "options": checks.options,
            "codec": checks.codec,
            "setting": checks.optional(checks.name),
        }
        kept = faults.checked(vars(self), table)
        high, low = kept.get("high"), kept.get("low")
        if isinstance(high, float) and isinstance(low, float) and low > high:
            faults.add("low", low, f"accepted: a number greater than 0 and at most high, which is {high}")
        faults.raise_if_any()
        _keep(self, kept)

    @property
    def capacity_bytes(self) -> int:
        """The hard quota."""
        return parse_bytes(self.capacity)

    @property
    def high_bytes(self) -> int:
        """Eviction begins above this many bytes."""
        return math.floor(Fraction(self.high) * self.capacity_bytes)

    @property
    def low_bytes(self) -> int:
        """Eviction goes on down to this many bytes."""
        return math.floor(Fraction(self.high if self.low is None else self.low) * self.capacity_bytes)


@dataclass(frozen=True)
class StoreConfig:
    """A store: its tiers, fastest first, and who is evicted first.

    Args:
        tiers: at least one, with different names.
        eviction: ``"lru"``, ``"size-class"`` or ``"next-use"``.

    Raises:
        ConfigError: lists every fault.
    """

    tiers: Sequence[TierConfig]
    eviction: str = "lru"

    def __post_init__(self) -> None:
        faults = Faults("StoreConfig")
        kept = faults.checked(vars(self), {"tiers": _tiers, "eviction": checks.eviction})
        faults.raise_if_any()
        _keep(self, kept)

    @classmethod
    def default(
        cls,
        device: str | None = None,
        max_device_memory: Size | None = None,
        offload_cpu_size: Size | None = None,
        offload_disk_size: Size | None = None,
        offload_path: Paths = "./offload/",
        *,
        durable: bool = False,
        **more: object,
    ) -> StoreConfig:
        """Return the usual hierarchy: the tiers ``device``, ``host`` and ``disk``.

        Asks the machine for what is not given.  With device ``"cpu"`` there is no tier ``device``,
        with an ``offload_disk_size`` of 0 no tier ``disk``.

        Args:
            device: a torch accelerator, ``"emulated"`` or ``"cpu"``; ``None``: the accelerator if
                there is one, else ``"cpu"``.
            max_device_memory: capacity of ``device``; ``None``: what it has free (has to be given
                for ``"emulated"``, and must not be for ``"cpu"``).
            offload_cpu_size: capacity of ``host``; ``None``: the available host memory.
            offload_disk_size: capacity of ``disk``; ``None``: the free space at ``offload_path``.
            offload_path: the directory that ``disk`` keeps its files in, or a list of directories, each
                on a drive of its own.
            durable: whether a store that is opened on the same ``offload_path`` later finds what the last
                flush left; with ``False`` the disk tier is scratch space.
            more: any other key of `OffloadConfig`; ``eviction`` is ``"lru"`` unless given.  Keys
                that only a training loop reads are checked, and mean nothing to a store.

        Raises:
            ConfigError: lists every fault.
        """
        keys = {
            "device": device,
            "max_device_memory": max_device_memory,
            "offload_cpu_size": offload_cpu_size,
            "offload_disk_size": offload_disk_size,
            "offload_path": offload_path,
            "durable": durable,
        }
        return OffloadConfig.from_mapping({"eviction": "lru"} | more | keys).store_config()


def _tiers(value: object) -> tuple[TierConfig, ...]:
    if (
        not isinstance(value, Sequence)
        or not value
        or not all(isinstance(each, TierConfig) for each in value)
    ):
        raise ConfigError("accepted: a list of at least one TierConfig, fastest first")
    names = [tier.name for tier in value]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(
            f"accepted: tiers with different names; given more than once: {listed(twice, show=named)}"
        )
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What a training loop offloads, and what it may use for that.

    The names and defaults are those of the reference configuration; ``offload_grad``,
    ``offload_optimizer``, ``aio_engine``, ``device``, ``device_options``, ``disk_options``, ``eviction``,
    ``checksum``, ``optimizer_target``, ``optimizer_in_backward``, ``codec``, ``durable``, ``ignored``,
    ``pinned``, ``buffer_min_size`` and ``placement`` are ours.  Sizes may be given as text and are kept in
    bytes.

    Args:
        memory_offload: ``"ON"`` or ``"OFF"``; with OFF nothing is offloaded.
        max_device_memory: all that the program may have on the device; ``None``: what is free.
        offload_param: where parameters go: ``"cpu"``, ``"disk"`` (in any case), or ``None``: as
            the quotas and the plan decide.
        offload_checkpoint: where what recomputed layers are given goes between forward and backward;
            ``None``: it stays.
        offload_grad: the same for gradients.
        offload_optimizer: the same for optimizer state.
        auto_offload: whether those of parameters, gradients and optimizer state only say where bytes start
            out, and the quotas and the plan decide from then on, which is chosen before the first step and
            again as steps show what they do; with ``False`` they are obeyed after every use.
        foresee: whether a run that cannot fit on the device is refused at the model's first call, before
            anything is computed, and others are planned there: its forward then runs once on a copy without
            bytes.
        live_view: whether ``tierstore top`` can look at the run: a socket that only this user can open, and a
            thread that sleeps until somebody does.
        offload_cpu_size: quota of host memory; ``None``: what is available.
        offload_disk_size: quota of disk; 0: no disk; ``None``: what is free.  More than that is logged as a
            warning.
        offload_path: the directory for files; or a list of directories, each on a drive of its own, over
            which files are spread by bandwidth.
        host_mem_block_size: the host pool grows by blocks of this size.
        aio_block_size: files are read and written in pieces of this size.
        aio_queue_depth: how many of those pieces may be under way.
        enable_aio: whether several may be under way at all.
        aio_engine: who moves the bytes of files: ``"threads"``, ``"io_uring"``, ``"aiofiles"`` or
            ``"plain"``, which is used, or refused with the reason; ``None``: what measured best.
        enable_pinned_mem: whether host memory is registered with the device, where there is one.
        hbm_ratio: the share of the device quota that may be filled before eviction, 0 < x <= 1.
        cpu_ratio: the share of the host quota that may be filled before eviction, 0 < x <= 1.
        device: as in `StoreConfig.default`.
        device_options: more options for the device's backend; for ``"emulated"``:
            ``link_bandwidth``, ``link_latency_s``, ``late_events``, ``overwrite_freed``.
        disk_options: more options for the disk tier, as in `TierConfig`: ``max_bandwidth``, ``retries`` and
            the like, and those of the ``files`` backend that have no key here.
        eviction: ``"lru"``, ``"size-class"`` or ``"next-use"``.
        checksum: whether bytes read from disk are compared with those written.
        optimizer_target: where the optimizer computes: ``"device"`` or ``"cpu"``.
        optimizer_in_backward: whether backward itself steps each parameter as soon as it has its gradient,
            which are not kept.  Every backward pass is then a step: ``optimizer.step()`` has nothing to do.
        codec: how bytes on disk are compressed where that pays: ``"lz4"``; ``None`` or ``"none"``: not.
        durable: whether the files survive the process: `Offload.checkpoint` makes the state of training
            durable there, and the next ``offload`` on the same ``offload_path`` resumes from it.
        ignored, pinned: patterns of parameters and buffers, as in `tierstore.training.offload`.
        buffer_min_size: how large a buffer is at least that the store takes, too; ``None``: it takes none.
        placement: where everything lives, as `tierstore.planning.Placement.to_mapping` writes it, or its
            ``modules`` alone: patterns of module names, and ``"cpu"`` or ``"device"`` for each; where it
            says nothing, the other keys do.

    Raises:
        ConfigError: lists every fault.
    """

    memory_offload: str = "ON"
    max_device_memory: Size | None = None
    offload_param: str | None = None
    offload_checkpoint: str | None = None
    offload_grad: str | None = None
    offload_optimizer: str | None = None
    auto_offload: bool = True
    foresee: bool = True
    live_view: bool = True
    offload_cpu_size: Size | None = None
    offload_disk_size: Size | None = None
    offload_path: Paths = "./offload/"
    host_mem_block_size: Size = "1GB"
    aio_block_size: Size = "1MB"
    aio_queue_depth: int = 1024
    enable_aio: bool = True
    aio_engine: str | None = None
    enable_pinned_mem: bool = True
    hbm_ratio: float = 1.0
    cpu_ratio: float = 1.0
    device: str | None = None
    device_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    disk_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    eviction: str = "next-use"
    checksum: bool = True
    optimizer_target: str = "device"
    optimizer_in_backward: bool = False
    codec: str | None = None
    durable: bool = False
    ignored: Sequence[str] = ()
    pinned: Sequence[str] = ()
    buffer_min_size: Size | None = "1MB"
    placement: Mapping[str, object] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        faults = Faults("OffloadConfig")
        kept = _judge(vars(self), faults)
        faults.raise_if_any()
        _keep(self, kept)

    @property
    def is_on(self) -> bool:
        """Whether anything is offloaded."""
        return self.memory_offload == "ON"

    @property
    def max_device_bytes(self) -> int | None:
        """``max_device_memory`` in bytes; ``None``: what the device has free."""
        return None if self.max_device_memory is None else parse_bytes(self.max_device_memory)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> OffloadConfig:
        """Read a mapping of keys to values, such as a reference ``offload_config``.

        Raises:
            ConfigError: lists every fault, unknown keys among them.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"OffloadConfig: {quoted(mapping)}: accepted: a mapping of keys to values")
        return cls._from_keys(mapping, Faults("OffloadConfig"))

    @classmethod
    def from_yaml(cls, path: str | PurePath) -> OffloadConfig:
        """Read a YAML file.

        The keys stand at the top level or under ``offload_config:``.  From ``context:`` the keys
        ``memory_offload`` and ``max_device_memory`` are read; other sections are left alone.
        An unquoted ``ON``, which YAML reads as true, is understood.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or has faults, which are listed.
        """
        faults = Faults(f"OffloadConfig from {path}")
        return cls._from_keys(document.read_keys(Path(path), tuple(_OFFLOAD), faults), faults)

    @classmethod
    def from_document(cls, mapping: Mapping[str, object]) -> OffloadConfig:
        """Read a mapping of sections, as `from_yaml` reads a file.

        Raises:
            ConfigError: lists every fault.
        """
        faults = Faults("OffloadConfig")
        return cls._from_keys(document.keys_of(mapping, tuple(_OFFLOAD), faults, "the mapping"), faults)

    @classmethod
    def _from_keys(cls, given: Mapping[str, object], faults: Faults) -> OffloadConfig:
        for key, value in given.items():
            if key not in _OFFLOAD:
                faults.add_unknown(key, value, tuple(_OFFLOAD))
        known = {key: value for key, value in given.items() if key in _OFFLOAD}
        kept = _judge(vars(cls()) | known, faults)
        faults.raise_if_any()
        return cls(**cast("dict[str, Any]", kept))

    def to_mapping(self) -> dict[str, object]:
        """Return every key with its value, sizes in bytes: `from_mapping` reads it back."""
        return {key: _plain(value) for key, value in vars(self).items()}

    def store_config(self) -> StoreConfig:
        """Return the tiers that this configuration means on this machine.

        Raises:
            ConfigError: the device is not there, or its memory is left open where it cannot be
                asked, or given where there is none.
        """
        device = self.device or machine.default_device()
        faults = Faults("OffloadConfig")
        _judge_device(vars(self) | {"device": device}, faults)
        faults.raise_if_any()
        tiers = [self._host_tier(device), *self._disk_tiers()]
        if not machine.is_cpu(device):
            tiers.insert(0, self._device_tier(device))
        return StoreConfig(tiers=tiers, eviction=self.eviction)

    def _device_tier(self, device: str) -> TierConfig:
        capacity_bytes = self.max_device_bytes
        if capacity_bytes is None and device == machine.EMULATED:
            raise ConfigError(
                "max_device_memory=None: has to be given for device 'emulated', which has no memory of its "
                "own to ask; accepted: a size greater than 0"
            )
        if device != machine.EMULATED:
            machine.require_accelerator(device)
        return TierConfig(
            name="device",
            backend="device",
            capacity=machine.free_device_bytes(device) if capacity_bytes is None else capacity_bytes,
            high=self.hbm_ratio,
            options={**self.device_options, "device": device},
        )

    def _host_tier(self, device: str) -> TierConfig:
        return TierConfig(
            name="host",
            backend="pinned",
            capacity=machine.available_host_bytes()
            if self.offload_cpu_size is None
            else self.offload_cpu_size,
            high=self.cpu_ratio,
            options={
                "host_mem_block_size": self.host_mem_block_size,
                # Where computing happens in it, no device copies from it, and its pages can be given back.
                "enable_pinned_mem": self.enable_pinned_mem and not machine.is_cpu(device),
            },
        )

    def _disk_tiers(self) -> list[TierConfig]:
        given = self.offload_path
        paths = [str(path) for path in ([given] if isinstance(given, str | PurePath) else given)]
        capacity = self.offload_disk_size
        if capacity is None:
            # What a durable directory keeps is charged to the tier as soon as it is opened.
            kept_bytes = machine.held_disk_bytes(*paths) if self.durable else 0
            capacity = machine.free_disk_bytes(*paths) + kept_bytes
            if not capacity:
                machine.say_if_full(*paths)
        else:
            machine.say_if_disks_are_smaller(parse_bytes(capacity), *paths)
        if capacity == 0:
            return []
        options: dict[str, object] = {
            **self.disk_options,
            "path": paths[0] if len(paths) == 1 else paths,
            "aio_block_size": self.aio_block_size,
            "aio_queue_depth": self.aio_queue_depth,
            "enable_aio": self.enable_aio,
            "checksum": self.checksum,
        }
        if self.aio_engine is not None:
            options["engine"] = self.aio_engine
        if self.durable:
            options["durable"] = True
        return [
            TierConfig(name="disk", backend="files", capacity=capacity, options=options, codec=self.codec)
        ]


_OFFLOAD: dict[str, Check] = {
    "memory_offload": checks.one_of("ON", "OFF"),
    "max_device_memory": checks.optional(checks.positive_size),
    "offload_param": checks.optional(checks.target),
    "offload_checkpoint": checks.optional(checks.target),
    "offload_grad": checks.optional(checks.target),
    "offload_optimizer": checks.optional(checks.target),
    "auto_offload": checks.flag,
    "foresee": checks.flag,
    "live_view": checks.flag,
    "offload_cpu_size": checks.optional(checks.positive_size),
    "offload_disk_size": checks.optional(checks.size),
    "offload_path": checks.directories,
    "host_mem_block_size": checks.positive_size,
    "aio_block_size": checks.positive_size,
    "aio_queue_depth": checks.positive_int,
    "enable_aio": checks.flag,
    "aio_engine": checks.optional(checks.aio_engine),
    "enable_pinned_mem": checks.flag,
    "hbm_ratio": checks.ratio,
    "cpu_ratio": checks.ratio,
    "device": checks.optional(checks.device),
    "device_options": checks.options,
    "disk_options": checks.options,
    "eviction": checks.eviction,
    "checksum": checks.flag,
    "optimizer_target": checks.one_of("device", "cpu"),
    "optimizer_in_backward": checks.flag,
    "codec": checks.codec,
    "durable": checks.flag,
    "ignored": checks.texts,
    "pinned": checks.texts,
    "buffer_min_size": checks.optional(checks.size),
    "placement": checks.optional(checks.placement),
}


_HAVE_KEYS = frozenset(
    {"path", "aio_block_size", "aio_queue_depth", "enable_aio", "checksum", "engine", "durable"}
)
"""The options of the disk's backend that `OffloadConfig` gives it."""


def _plain(value: object) -> object:
    """Return a value as a mapping that is written to a file would have it."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _judge(values: Mapping[str, object], faults: Faults) -> dict[str, object]:
    """Check every key of an offload configuration, alone and together; return what passed."""
    kept = faults.checked(values, _OFFLOAD)
    _judge_device(kept, faults)
    if kept.get("durable") and kept.get("offload_disk_size") == 0:
        reason = "needs a disk, and offload_disk_size=0 says that there is none; accepted: False"
        faults.add("durable", kept["durable"], reason)
    twice = _HAVE_KEYS.intersection(cast("Mapping[str, object]", kept.get("disk_options", {})))
    if twice:
        reason = f"accepted: anything but {listed(sorted(twice))}, which has a key of its own"
        faults.add("disk_options", kept["disk_options"], reason)
    engine = kept.get("aio_engine")
    if kept.get("enable_aio") is False and engine not in (None, checks.ENGINE_WITHOUT_AIO):
        reason = "moves bytes in the background, and enable_aio=False forbids that; accepted: 'plain' or None"
        faults.add("aio_engine", engine, reason)
    return kept


def _judge_device(kept: Mapping[str, object], faults: Faults) -> None:
    """Note what is said about a device that has no memory of its own, or is said twice."""
    options = kept.get("device_options")
    if isinstance(options, Mapping) and "device" in options:
        faults.add("device_options", options, "accepted: anything but 'device', which has a key of its own")
    device = kept.get("device")
    if not isinstance(device, str) or not machine.is_cpu(device):
        return
    for key in ("max_device_memory", "device_options"):
        if kept.get(key):
            faults.add(
                key,
                kept[key],
                f"device {quoted(device)} computes in host memory and has no tier of its own; leave the key "
                "out, or set device to 'emulated' for one with a quota",
            )
