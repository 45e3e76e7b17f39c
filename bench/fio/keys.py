"""Which keys there are: fio's own, those of them that the store runs, and ours.

Promises: `unknown` says of any name what it is and what was probably meant.  Knows nothing of what a
combination of keys means.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable
from dataclasses import dataclass

from bench.fio import values
from bench.fio.values import Pair, ValueFaultError

ENGINE = "tierstore"
"""The ``ioengine`` whose jobs run on the store; every other one is fio's."""

# Facts of fio 3.33: `fio --cmdhelp=all`, the aliases of `fio --cmdhelp=NAME`, and `fio --enghelp=NAME`.
_FIO_NAMES_TEXT = """
    allow_file_create allow_mounted_write allrandrepeat atomic ba block_error_percentiles bs bs_unaligned
    bsrange bssplit buffer_compress_chunk buffer_compress_percentage buffer_pattern buffered bwavgtime cgroup
    cgroup_nodelete cgroup_weight clat_percentiles clocksource continue_on_error cpumask cpus_allowed
    cpus_allowed_policy create_fsync create_on_open create_only create_serialize dedupe_global dedupe_mode
    dedupe_percentage dedupe_working_set_percentage description direct directory disable_bw_measurement
    disable_clat disable_lat disable_slat disk_util do_verify end_fsync error_dump exec_postrun exec_prerun
    exit_what exitall exitall_on_error experimental_verify fadvise_hint fallocate fdatasync file_append
    file_service_type filename filename_format filesize fill_device flow flow_id flow_sleep fsync
    fsync_on_close gid group_reporting gtod_cpu gtod_reduce hugepage-size ignore_error ignore_zone_limits
    invalidate io_size io_submit_mode iodepth iodepth_batch iodepth_batch_complete_max
    iodepth_batch_complete_min iodepth_low ioengine iopsavgtime ioscheduler job_max_open_zones kb_base
    lat_percentiles latency_percentile latency_run latency_target latency_window lockfile lockmem
    log_alternate_epoch log_alternate_epoch_clock_id log_avg_msec log_compression log_compression_cpus
    log_entries log_hist_coarseness log_hist_msec log_max_value log_offset log_prio log_store_compressed
    log_unix_epoch loops max_latency max_open_zones mem merge_blktrace_file merge_blktrace_iters
    merge_blktrace_scalars name new_group nice norandommap nrfiles numa_cpu_nodes numa_mem_policy number_ios
    numjobs offset offset_align offset_increment opendir openfiles overwrite per_job_logs percentage_random
    percentile_list pre_read prio prioclass profile ramp_time random_distribution random_generator randrepeat
    randseed rate rate_cycle rate_ignore_thinktime rate_iops rate_iops_min rate_min rate_process
    read_beyond_wp read_iolog read_iolog_chunked refill_buffers replay_align replay_no_stall replay_redirect
    replay_scale replay_skip replay_time_scale runtime rw rw_sequencer rwmixread rwmixwrite scramble_buffers
    serialize_overlap significant_figures size slat_percentiles startdelay stats steadystate
    steadystate_duration steadystate_ramp_time stonewall sync sync_file_range thinktime thinktime_blocks
    thinktime_blocks_type thinktime_iotime thinktime_spin thread time_based trim_backlog trim_backlog_batch
    trim_percentage trim_verify_zero uid unified_rw_reporting unique_filename unit_base unlink
    unlink_each_loop verify verify_async verify_backlog verify_backlog_batch verify_dump verify_fatal
    verify_interval verify_offset verify_only verify_pattern verify_state_load verify_state_save wait_for
    write_barrier write_bw_log write_hint write_hist_log write_iolog write_iops_log write_lat_log zero_buffers
    zone_reset_frequency zone_reset_threshold zonecapacity zonemode zonerange zonesize zoneskip
    cmd_type cmdprio cmdprio_bssplit cmdprio_class cmdprio_percentage fixedbufs force_async hipri
    hipri_percentage nonvectored nowait registerfiles sqthread_poll sqthread_poll_cpu thp uncached
    userspace_reap
"""
_FIO_NAMES = frozenset(_FIO_NAMES_TEXT.split())
ALIASES = {
    "blockalign": "ba",
    "blocksize": "bs",
    "blocksize_range": "bsrange",
    "blocksize_unaligned": "bs_unaligned",
    "disable_bw": "disable_bw_measurement",
    "fileoffset": "offset",
    "fill_fs": "fill_device",
    "io_limit": "io_size",
    "iodepth_batch_complete": "iodepth_batch_complete_min",
    "iodepth_batch_submit": "iodepth_batch",
    "iomem": "mem",
    "nr_files": "nrfiles",
    "ratecycle": "rate_cycle",
    "ratemin": "rate_min",
    "readwrite": "rw",
    "ss": "steadystate",
    "ss_dur": "steadystate_duration",
    "ss_ramp": "steadystate_ramp_time",
    "timeout": "runtime",
    "wait_for_previous": "stonewall",
}
"""Other names that fio has for its keys."""


class Direction(enum.Enum):
    """What ``rw`` says, as its value in fio's output."""

    READ = "read"
    WRITE = "write"
    RANDREAD = "randread"
    RANDWRITE = "randwrite"
    RW = "rw"
    RANDRW = "randrw"

    @property
    def is_random(self) -> bool:
        """Whether blocks come in random order."""
        return self.value.startswith("rand")

    @property
    def has_reads(self) -> bool:
        """Whether there are reads."""
        return "write" not in self.value

    @property
    def has_writes(self) -> bool:
        """Whether there are writes."""
        return "read" not in self.value


READ_OPERATIONS = ("fetch", "lease", "get", "open")
WRITE_OPERATIONS = ("evict", "put", "flush")
TIERS = ("device", "host", "disk")
ANYWHERE = "anywhere"
VERIFIES = (
    *("md5", "sha1", "sha256", "sha512", "sha3-224", "sha3-256", "sha3-384", "sha3-512"),
    *("crc32", "crc32c", "crc32c-intel", "xxhash"),
)
"""fio's checksums that can be computed here."""


def _direction(text: str) -> Direction:
    text = "rw" if text == "readwrite" else text
    for direction in Direction:
        if direction.value == text:
            return direction
    raise ValueFaultError(f"accepted: {', '.join(d.value for d in Direction)}; a tensor cannot be trimmed")


def _operations(text: str) -> Pair[str]:
    """Read one operation, or one for reads and one for writes."""
    words = text.split(",")
    reads = [word for word in words if word in READ_OPERATIONS]
    writes = [word for word in words if word in WRITE_OPERATIONS]
    if len(reads) + len(writes) != len(words) or len(reads) > 1 or len(writes) > 1:
        raise ValueFaultError(
            f"accepted: one for reads ({', '.join(READ_OPERATIONS)}), one for writes "
            f"({', '.join(WRITE_OPERATIONS)}), or both with a comma"
        )
    return Pair("".join(reads), "".join(writes))


def _verify(text: str) -> str:
    if text == "0":
        return ""
    if text not in VERIFIES:
        raise ValueFaultError(f"accepted: 0, {', '.join(VERIFIES)}")
    return text


_CONTENTS = ("noise", "weights", "zeros")


def _trace(text: str) -> str:
    name, colon, rest = text.partition(":")
    number = rest.replace(".", "", 1)
    if name not in {"cyclic", "zipf", "scan"} or (colon and not number.isdigit()):
        raise ValueFaultError("accepted: cyclic, zipf:THETA, scan:PERCENT_HOT")
    return text


@dataclass(frozen=True, slots=True)
class Key:
    """A key that jobs of the store may have.

    Attributes:
        read: turns its text into a value.
        what: what it says, in a few words.
    """

    read: Callable[[str], object]
    what: str


_tier_names = values.pair(values.one_of(*TIERS))

FIO_KEYS: dict[str, Key] = {
    "bs": Key(values.pair(values.block), "bytes of a tensor, one I/O; a pair for reads and writes"),
    "bsrange": Key(values.pair(values.block_range), "sizes of tensors: multiples of the low end, mixed"),
    "bssplit": Key(values.pair(values.block_split), "sizes of tensors with their percentages"),
    "buffer_compress_percentage": Key(values.percent, "so much of every tensor is zeros"),
    "description": Key(values.word, "printed with the result"),
    "direct": Key(values.flag, "disk past the page cache or not; left out: as the backend can"),
    "directory": Key(values.word, "where stores and files are made, for a while"),
    "do_verify": Key(values.flag, "whether verify= reads everything that was written at the end (1)"),
    "end_fsync": Key(values.flag, "flush the store at the end (needs durable=1)"),
    "filename": Key(values.word, "jobs with the same one work on the same tensors"),
    "filesize": Key(values.amount, "with nrfiles, the size where size= is left out"),
    "fsync": Key(values.size, "flush the store after so many writes (needs durable=1)"),
    "group_reporting": Key(values.flag, "one result for the jobs of a group"),
    "invalidate": Key(values.flag, "the disk tier's files leave the page cache first (1)"),
    "io_size": Key(values.amount, "bytes to move, where that is not size"),
    "iodepth": Key(values.count, "operations in flight (1)"),
    "iodepth_batch": Key(values.count, "so many begin in one call of fetch or evict (1)"),
    "ioengine": Key(values.word, "tierstore, or any engine of fio"),
    "loops": Key(values.count, "how often all of it is done (1)"),
    "name": Key(values.word, "the job's name, where it is not the section's"),
    "new_group": Key(values.flag, "a new group of results begins here"),
    "norandommap": Key(values.flag, "random I/O may take a tensor twice and leave others out"),
    "nrfiles": Key(values.count, "with filesize, the size where size= is left out (1)"),
    "number_ios": Key(values.size, "stop after so many I/Os"),
    "numjobs": Key(values.count, "so many threads do the same, each on its own tensors (1)"),
    "ramp_time": Key(values.seconds, "so long at first, nothing is counted"),
    "random_distribution": Key(values.spreading, "how random I/O chooses: random, zipf, pareto, normal"),
    "randrepeat": Key(values.flag, "the same chance in every run (1)"),
    "randseed": Key(values.size, "chooses the chance"),
    "rate": Key(values.pair(values.size), "at most so many bytes a second"),
    "rate_iops": Key(values.pair(values.size), "at most so many I/Os a second"),
    "runtime": Key(values.seconds, "stop after so long"),
    "rw": Key(_direction, "what is done, and in which order"),
    "rwmixread": Key(values.percent, "so many of a mix are reads (50)"),
    "rwmixwrite": Key(values.percent, "so many of a mix are writes"),
    "size": Key(values.amount, "bytes of all tensors of the job"),
    "startdelay": Key(values.seconds, "begin so much later"),
    "stonewall": Key(values.flag, "wait until the jobs above have ended"),
    "thread": Key(values.flag, "1: jobs of the store are threads of one process"),
    "time_based": Key(values.flag, "go on until runtime is over"),
    "unlink": Key(values.flag, "drop the tensors when the job has ended"),
    "verify": Key(_verify, "compare everything that is read or written, by this checksum"),
}
"""Those of fio's keys that the store's jobs understand."""

OUR_KEYS: dict[str, Key] = {
    "batch": Key(values.amount, "writes: so many bytes are made ready at a time (half the quota)"),
    "block_size": Key(values.positive_size, "the files backend's aio_block_size"),
    "checksum": Key(values.flag, "whether the disk tier sums what it writes"),
    "codec": Key(values.word, "the disk tier's codec, such as lz4"),
    "content": Key(values.one_of(*_CONTENTS), "the bytes: noise, weights (bf16, normal) or zeros"),
    "device_quota": Key(values.amount, "an emulated device tier of this size; % of size (none)"),
    "disk_quota": Key(values.amount, "the disk tier's size; 0: none (4g)"),
    "durable": Key(values.flag, "the disk tier survives the process"),
    "engine": Key(values.word, "the files backend's I/O engine"),
    "eviction": Key(values.one_of("lru", "size-class", "next-use"), "the store's policy (lru)"),
    "from": Key(values.pair(values.one_of(*TIERS, ANYWHERE)), "where tensors lie before the operation"),
    "host_quota": Key(values.amount, "the host tier's size; % of size (1g)"),
    "link_bandwidth": Key(values.positive_size, "bytes a second of the emulated device's link"),
    "op": Key(_operations, "what one I/O is; a pair for reads and writes (fetch,evict)"),
    "queue_depth": Key(values.count, "the files backend's aio_queue_depth"),
    "tier": Key(_tier_names, "the tier that the operation names; a pair for reads and writes"),
    "trace": Key(_trace, "the order of accesses, with its optimum: cyclic, zipf:T, scan:H"),
    "workers": Key(values.count, "the files backend's threads"),
}
"""What fio has no words for."""

STORE_KEYS = FIO_KEYS | OUR_KEYS


def is_nearly_ours(engine: str) -> bool:
    """Whether an engine is none, but the store's was probably meant."""
    is_near = difflib.get_close_matches(engine.lower().replace("-", ""), [ENGINE], cutoff=0.75)
    return engine != ENGINE and bool(is_near)


def canonical(name: str) -> str:
    """Return the name that fio's tables have for a key."""
    return ALIASES.get(name, name)


def is_fios(name: str) -> bool:
    """Whether fio knows the key."""
    return canonical(name) in _FIO_NAMES


def unknown(name: str, *, is_store_job: bool) -> str:
    """Say what is the matter with a key that the job cannot have."""
    if is_store_job and is_fios(name):
        return f"{name!r} is a key of fio that ioengine=tierstore does not support"
    accepted = set(STORE_KEYS) if is_store_job else set(_FIO_NAMES | set(ALIASES))
    near = difflib.get_close_matches(name, sorted(accepted), n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"unknown key {name!r}{hint}"
