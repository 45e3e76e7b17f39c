"""Every metric of the library, with what it says: names are promised, as those of functions are.

``_total`` at the end: it only grows, while its run or store is there.  Without: it goes up and down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CATALOGUE: Final[Mapping[str, str]] = {
    # a run
    "tierstore_run_steps_total": "steps that have ended",
    "tierstore_run_forward_seconds_total": "seconds in the model's forward",
    "tierstore_run_backward_seconds_total": "seconds in backward passes",
    "tierstore_run_optimizer_seconds_total": "seconds in the optimizers' steps",
    "tierstore_run_stall_seconds_total": "seconds of forward, backward and steps that waited for bytes",
    "tierstore_run_checkpoints_total": "checkpoints, with those of the runs before",
    "tierstore_run_checkpoint_seconds_total": "seconds that checkpoints took",
    # its store
    "tierstore_store_stall_seconds_total": "seconds that callers were blocked, summed over threads",
    # each tier
    "tierstore_tier_capacity_bytes": "quota of a tier",
    "tierstore_tier_charged_bytes": "what counts against a tier's quota",
    "tierstore_tier_ready_bytes": "part of a tier's bytes that can be used",
    "tierstore_tier_in_flight_bytes": "part of a tier's bytes that copies are writing",
    "tierstore_tier_leased_bytes": "part of a tier's bytes that leases hold",
    "tierstore_tier_peak_charged_bytes": "the most that was ever charged to a tier",
    "tierstore_tier_reserved_bytes": "what the medium holds for a tier",
    "tierstore_tier_hits_total": "leases and fetches that found their key ready",
    "tierstore_tier_faults_total": "leases and fetches that did not find their key ready",
    "tierstore_tier_evictions_total": "replicas that were let go",
    "tierstore_tier_refusals_total": "requests that could get no room",
    # what its codec did
    "tierstore_tier_codec_packed_tensors_total": "writes whose bytes were packed",
    "tierstore_tier_codec_skipped_tensors_total": "writes that packing does not pay for",
    "tierstore_tier_codec_raw_bytes_total": "bytes that were packed",
    "tierstore_tier_codec_held_bytes_total": "what packed bytes took",
    "tierstore_tier_codec_pack_seconds_total": "seconds of packing, summed over threads",
    "tierstore_tier_codec_unpack_seconds_total": "seconds of unpacking, summed over threads",
    # what its files did
    "tierstore_tier_io_is_direct": "1: bytes go past the page cache",
    "tierstore_tier_io_read_calls_total": "calls into the kernel that read",
    "tierstore_tier_io_write_calls_total": "calls into the kernel that wrote",
    "tierstore_tier_io_read_bytes_total": "what calls read",
    "tierstore_tier_io_written_bytes_total": "what calls wrote",
    "tierstore_tier_io_fragments_total": "parts that transfers were cut into",
    "tierstore_tier_io_merged_batches_total": "times that several fragments went in one call",
    "tierstore_tier_io_most_in_flight": "the most fragments that were under way at a time",
    "tierstore_tier_io_mean_transfer_bytes": "bytes per call",
    "tierstore_tier_io_call_seconds_total": "seconds in calls, summed over those that overlap",
    "tierstore_tier_io_checksum_seconds_total": "seconds of summing bytes, over all threads",
    "tierstore_tier_io_short_transfers_total": "calls that moved less than asked",
    "tierstore_tier_io_retries_total": "calls made again after an error",
    "tierstore_tier_io_bounced_bytes_total": "bytes that were copied first",
    "tierstore_tier_io_unchecked_bytes_total": "bytes read with no checksum to compare",
    # each of several drives
    "tierstore_tier_io_drive_bandwidth_bytes_per_second": "what a drive's share of the bytes follows",
    "tierstore_tier_io_drive_live_bytes": "what is reserved on a drive",
    "tierstore_tier_io_drive_is_direct": "1: bytes go past the page cache",
    "tierstore_tier_io_drive_read_bytes_total": "what was read from a drive",
    "tierstore_tier_io_drive_written_bytes_total": "what was written to a drive",
    "tierstore_tier_io_drive_calls_total": "calls into the kernel for a drive",
    "tierstore_tier_io_drive_call_seconds_total": "seconds in calls for a drive",
    "tierstore_tier_io_drive_most_in_flight": "the most fragments that were under way at a time",
    # what stands around a medium
    "tierstore_tier_bandwidth_limit_bytes_per_second": "limit of both directions, or the smaller one",
    "tierstore_tier_bandwidth_delayed_total": "operations that had to wait for the limit",
    "tierstore_tier_bandwidth_wait_seconds_total": "seconds that operations waited for the limit",
    "tierstore_tier_retries_retries_total": "tries after the first",
    "tierstore_tier_retries_recovered_total": "operations that worked when tried again",
    "tierstore_tier_retries_given_up_total": "operations that failed in the end",
    # each direction
    "tierstore_traffic_copies_total": "copies that arrived",
    "tierstore_traffic_bytes_total": "bytes of copies that arrived",
    # swapped activations
    "tierstore_swap_kept_total": "storages that were taken over",
    "tierstore_swap_kept_bytes_total": "bytes of storages that were taken over",
    "tierstore_swap_released_total": "storages that left the device",
    "tierstore_swap_released_bytes_total": "bytes of storages that left the device",
    "tierstore_swap_brought_total": "storages that were brought back",
    "tierstore_swap_brought_bytes_total": "bytes of storages that were brought back",
    "tierstore_swap_handed_over_total": "storages that were wanted while still on the device",
    "tierstore_swap_handed_over_bytes_total": "bytes of storages that were wanted while still on the device",
    "tierstore_swap_stalls_total": "times that somebody waited for activations",
    "tierstore_swap_refused_total": "releases that found no room below",
    "tierstore_swap_offloaded": "storages that are kept now",
    "tierstore_swap_offloaded_bytes": "bytes of storages that are kept now",
    # recomputed layers
    "tierstore_recompute_forwards_total": "forwards of what is recomputed as a whole",
    "tierstore_recompute_repetitions_total": "forwards that ran again in backward",
    "tierstore_recompute_replaced_total": "tensors that are made again instead of kept",
    "tierstore_recompute_operators_total": "operators that were run again for tensors that are made again",
    # each table
    "tierstore_table_pages": "pages in memory",
    "tierstore_table_frames": "pages that there is room for",
    "tierstore_table_dirty_pages": "pages in memory that differ from the log",
    "tierstore_table_page_bytes": "bytes of a page",
    "tierstore_table_hits_total": "pages asked for and in memory",
    "tierstore_table_misses_total": "pages asked for and not in memory",
    "tierstore_table_row_missed_bytes_total": "rows asked for in pages that were missing",
    "tierstore_table_pages_made_total": "misses of pages that were never written",
    "tierstore_table_pages_prefetched_total": "pages read because of a prefetch",
    "tierstore_table_prefetches_declined_total": "pages to prefetch that there was no room for",
    "tierstore_table_page_read_bytes_total": "pages read from the log",
    "tierstore_table_page_written_bytes_total": "pages written to the log",
    "tierstore_table_log_pages": "pages in the log",
    "tierstore_table_dead_pages": "older pages that are in the log still",
    "tierstore_table_blocks": "blocks of the log",
    # its rows on the device
    "tierstore_table_cache_slots": "rows that there is room for on the device",
    "tierstore_table_cache_used": "rows on the device",
    "tierstore_table_cache_dirty": "rows on the device that differ from host memory",
    "tierstore_table_cache_hits_total": "rows looked up and on the device",
    "tierstore_table_cache_misses_total": "rows looked up and not on the device",
    "tierstore_table_cache_bypassed_total": "misses that went past the cache",
    "tierstore_table_cache_prefetched_total": "rows brought because of a prefetch",
    "tierstore_table_cache_prefetches_declined_total": "rows to prefetch that there was no slot for",
    "tierstore_table_cache_evictions_total": "rows that made room for others",
    "tierstore_table_cache_rows_to_device_total": "rows carried to the device",
    "tierstore_table_cache_rows_to_host_total": "rows carried back to host memory",
    "tierstore_table_cache_to_device_bytes_total": "all that was carried to the device",
    "tierstore_table_cache_to_host_bytes_total": "all that was carried back to host memory",
}
"""What each name says, without its labels and its unit."""
