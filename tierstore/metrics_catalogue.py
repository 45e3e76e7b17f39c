"""Every metric of the library, with what it says: names are promised, as those of functions are.

``_total`` at the end: it only grows, while its run or store is there.  Without: it goes up and down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CATALOGUE: Final[Mapping[str, str]] = {
    # a run
    "tierstore_run_steps_total": "steps that have ended",
    "tierstore_run_forward_seconds_total": "in the model's forward",
    "tierstore_run_backward_seconds_total": "in backward passes",
    "tierstore_run_optimizer_seconds_total": "in the optimizers' steps",
    "tierstore_run_stall_seconds_total": "of these, waiting for bytes",
    "tierstore_run_checkpoints_total": "checkpoints, with those of the runs before",
    "tierstore_run_checkpoint_seconds_total": "making them",
    # its store
    "tierstore_store_stall_seconds_total": "that callers were blocked, summed over threads",
    # each tier
    "tierstore_tier_capacity_bytes": "quota",
    "tierstore_tier_charged_bytes": "what counts against it",
    "tierstore_tier_ready_bytes": "the part that can be used",
    "tierstore_tier_in_flight_bytes": "the part that copies are writing",
    "tierstore_tier_leased_bytes": "the part that leases hold",
    "tierstore_tier_peak_charged_bytes": "the most that was ever charged",
    "tierstore_tier_reserved_bytes": "what the medium holds for it",
    "tierstore_tier_hits_total": "leases and fetches that found their key ready",
    "tierstore_tier_faults_total": "those that did not",
    "tierstore_tier_evictions_total": "replicas that were let go",
    "tierstore_tier_refusals_total": "requests that could get no room",
    # what its codec did
    "tierstore_tier_codec_packed_tensors_total": "writes whose bytes were packed",
    "tierstore_tier_codec_skipped_tensors_total": "writes that packing does not pay for",
    "tierstore_tier_codec_raw_bytes_total": "bytes that were packed",
    "tierstore_tier_codec_held_bytes_total": "what they took",
    "tierstore_tier_codec_pack_seconds_total": "packing, summed over threads",
    "tierstore_tier_codec_unpack_seconds_total": "unpacking, summed over threads",
    # what its files did
    "tierstore_tier_io_is_direct": "1: bytes go past the page cache",
    "tierstore_tier_io_read_calls_total": "calls into the kernel that read",
    "tierstore_tier_io_write_calls_total": "those that wrote",
    "tierstore_tier_io_read_bytes_total": "what they read",
    "tierstore_tier_io_written_bytes_total": "what they wrote",
    "tierstore_tier_io_fragments_total": "parts that transfers were cut into",
    "tierstore_tier_io_merged_batches_total": "times that some of them went in one call",
    "tierstore_tier_io_most_in_flight": "the most fragments that were under way at a time",
    "tierstore_tier_io_mean_transfer_bytes": "bytes per call",
    "tierstore_tier_io_call_seconds_total": "in calls, summed over those that overlap",
    "tierstore_tier_io_checksum_seconds_total": "summing bytes, over all threads",
    "tierstore_tier_io_short_transfers_total": "calls that moved less than asked",
    "tierstore_tier_io_retries_total": "calls made again after an error",
    "tierstore_tier_io_bounced_bytes_total": "bytes that were copied first",
    "tierstore_tier_io_unchecked_bytes_total": "bytes read with no checksum to compare",
    # each of several drives
    "tierstore_tier_io_drive_bandwidth_bytes_per_second": "what its share of the bytes follows",
    "tierstore_tier_io_drive_live_bytes": "what is reserved there",
    "tierstore_tier_io_drive_is_direct": "1: bytes go past the page cache",
    "tierstore_tier_io_drive_read_bytes_total": "what was read there",
    "tierstore_tier_io_drive_written_bytes_total": "what was written",
    "tierstore_tier_io_drive_calls_total": "calls into the kernel",
    "tierstore_tier_io_drive_call_seconds_total": "in them",
    "tierstore_tier_io_drive_most_in_flight": "the most fragments that were under way at a time",
    # what stands around a medium
    "tierstore_tier_bandwidth_limit_bytes_per_second": "limit of both directions, or the smaller one",
    "tierstore_tier_bandwidth_delayed_total": "operations that had to wait for it",
    "tierstore_tier_bandwidth_wait_seconds_total": "how long",
    "tierstore_tier_retries_retries_total": "tries after the first",
    "tierstore_tier_retries_recovered_total": "operations that worked in one of them",
    "tierstore_tier_retries_given_up_total": "operations that failed in the end",
    # each direction
    "tierstore_traffic_copies_total": "copies that arrived",
    "tierstore_traffic_bytes_total": "their bytes",
    # swapped activations
    "tierstore_swap_kept_total": "storages that were taken over",
    "tierstore_swap_kept_bytes_total": "their bytes",
    "tierstore_swap_released_total": "those that left the device",
    "tierstore_swap_released_bytes_total": "their bytes",
    "tierstore_swap_brought_total": "those that were brought back",
    "tierstore_swap_brought_bytes_total": "their bytes",
    "tierstore_swap_handed_over_total": "those that were wanted while still on the device",
    "tierstore_swap_handed_over_bytes_total": "their bytes",
    "tierstore_swap_stalls_total": "times that somebody waited for them",
    "tierstore_swap_refused_total": "releases that found no room below",
    "tierstore_swap_offloaded": "storages that are kept now",
    "tierstore_swap_offloaded_bytes": "their bytes",
    # recomputed layers
    "tierstore_recompute_forwards_total": "forwards of what is recomputed as a whole",
    "tierstore_recompute_repetitions_total": "of those, in backward",
    "tierstore_recompute_replaced_total": "tensors that are made again instead of kept",
    "tierstore_recompute_operators_total": "operators that were run again for that",
    # each table
    "tierstore_table_pages": "pages in memory",
    "tierstore_table_frames": "pages that there is room for",
    "tierstore_table_dirty_pages": "pages in memory that differ from the log",
    "tierstore_table_page_bytes": "bytes of a page",
    "tierstore_table_hits_total": "pages asked for and in memory",
    "tierstore_table_misses_total": "those that were not",
    "tierstore_table_row_missed_bytes_total": "rows asked for in pages that were missing",
    "tierstore_table_pages_made_total": "misses of pages that were never written",
    "tierstore_table_pages_prefetched_total": "pages read because of a prefetch",
    "tierstore_table_prefetches_declined_total": "pages that there was no room for",
    "tierstore_table_page_read_bytes_total": "read from the log",
    "tierstore_table_page_written_bytes_total": "written to it",
    "tierstore_table_log_pages": "pages in the log",
    "tierstore_table_dead_pages": "older ones that are there still",
    "tierstore_table_blocks": "blocks of the log",
    # its rows on the device
    "tierstore_table_cache_slots": "rows that there is room for",
    "tierstore_table_cache_used": "rows that are there",
    "tierstore_table_cache_dirty": "rows that differ from host memory",
    "tierstore_table_cache_hits_total": "rows looked up and there",
    "tierstore_table_cache_misses_total": "those that were not",
    "tierstore_table_cache_bypassed_total": "misses that went past the cache",
    "tierstore_table_cache_prefetched_total": "rows brought because of a prefetch",
    "tierstore_table_cache_prefetches_declined_total": "rows that there was no slot for",
    "tierstore_table_cache_evictions_total": "rows that made room for others",
    "tierstore_table_cache_rows_to_device_total": "rows carried to the device",
    "tierstore_table_cache_rows_to_host_total": "rows carried back",
    "tierstore_table_cache_to_device_bytes_total": "all that was carried to the device",
    "tierstore_table_cache_to_host_bytes_total": "all that was carried back",
}
"""What each name says, without its labels and its unit."""
