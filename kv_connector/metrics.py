"""Counters of the scheduler half (layer 0). Each is a plain attribute; units are in the names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from .histograms import Histograms

if TYPE_CHECKING:
    from .types import StepReport


@dataclass(slots=True)
class CacheMetrics:
    """Sums since start-up; `DOCUMENTATION` says what each counts, and `HISTOGRAMS` what is in `histograms`.

    Blocks and tokens are counted once, whatever the number of ranks; bytes over all ranks.
    """

    requests: int = 0
    queries_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    missed_pending_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_storage_tokens: int = 0
    sync_loads: int = 0
    async_loads: int = 0
    awaited_async_loads: int = 0
    coalesced_loads: int = 0
    saves_on_compute_blocks: int = 0
    saves_on_hit_blocks: int = 0
    saves_on_reuse_blocks: int = 0
    saves_pinned_blocks: int = 0
    saved_blocks: int = 0
    refused_blocks: int = 0
    loaded_blocks: int = 0
    deferred_saves_blocks: int = 0
    dropped_saves_blocks: int = 0
    declined_saves_blocks: int = 0
    fetched_blocks: int = 0
    dropped_fetches_blocks: int = 0
    failed_fetch_jobs: int = 0
    cancelled_fetch_jobs: int = 0
    backed_up_blocks: int = 0
    dropped_backups_blocks: int = 0
    failed_backup_jobs: int = 0
    peer_hit_tokens: int = 0
    offered_blocks: int = 0
    received_blocks: int = 0
    failed_receive_jobs: int = 0
    expired_transfers: int = 0
    failed_save_jobs: int = 0
    failed_load_jobs: int = 0
    expired_blocks: int = 0
    refused_pins: int = 0
    ignored_hints: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    load_milliseconds: float = 0.0
    load_stall_milliseconds: float = 0.0
    histograms: Histograms = field(default_factory=Histograms)

    def count_copies(self, report: StepReport) -> None:
        """What copies did on one rank since its last report."""
        self.loaded_bytes += report.loaded_bytes
        self.saved_bytes += report.saved_bytes
        self.load_milliseconds += report.load_milliseconds
        for timing in report.load_timings:
            stall = sum(timing.load_stall_ms)
            self.load_stall_milliseconds += stall
            self.histograms.observe("load_stall_seconds", "host", stall / 1e3)

    def snapshot(self) -> dict[str, float]:
        """All counters by name. Once a step: `dataclasses.asdict` takes five times as long."""
        return dict(zip(_NAMES, _VALUES(self), strict=True))


_NAMES = tuple(counter.name for counter in fields(CacheMetrics) if counter.name != "histograms")
_VALUES = attrgetter(*_NAMES)


DOCUMENTATION = {
    "requests": "Requests admitted.",
    "queries_tokens": "Tokens of admitted requests.",
    "device_hit_tokens": "Tokens of admitted requests that were on the device.",
    "host_hit_tokens": "Tokens of admitted requests that were to be loaded from the host.",
    "storage_hit_tokens": "Those of them that came from storage after the request arrived.",
    "missed_pending_tokens": "Tokens that missed because their block was still being saved.",
    "recomputed_tokens": "Tokens on the host that were computed because that was estimated to be faster than loading.",
    "recomputed_storage_tokens": "Tokens in storage that were computed because that was estimated to be faster.",
    "sync_loads": "Loads that the request's first step waited for, layer by layer.",
    "async_loads": "Loads that the request waited for while others ran.",
    "awaited_async_loads": "Those of them that a step may have had to wait for, as they were expected to end sooner.",
    "coalesced_loads": "Requests that waited for another's load of their prefix.",
    "saves_on_compute_blocks": "Blocks whose save began when they were computed.",
    "saves_on_hit_blocks": "Blocks whose save began when a request hit them on the device.",
    "saves_on_reuse_blocks": "Blocks whose save began before their device block was reused (write_back).",
    "saves_pinned_blocks": "Blocks whose save began because their prefix is pinned.",
    "saved_blocks": "Blocks whose save completed on every rank.",
    "refused_blocks": "Blocks not saved because they do not fit into the lossless form of a host block.",
    "loaded_blocks": "Blocks loaded from the host to the device.",
    "deferred_saves_blocks": "Blocks that waited for save_bandwidth, once for each request that wanted them saved.",
    "declined_saves_blocks": "Blocks not saved: worth less than all they could evict, or behind one that is not saved.",
    "dropped_saves_blocks": "Blocks that the policy wanted saved and that found no room, or no bandwidth, in time.",
    "fetched_blocks": "Blocks read from storage to the host.",
    "dropped_fetches_blocks": "Blocks found in storage that found no room on the host.",
    "failed_fetch_jobs": "Fetch jobs that failed: their blocks could not be read from storage, and were computed.",
    "cancelled_fetch_jobs": "Fetch jobs cancelled before they began, as no request waited for them any more.",
    "backed_up_blocks": "Saved blocks that are in storage, those that were there already included.",
    "dropped_backups_blocks": "Saved blocks not backed up: too many were waiting, or they were evicted first.",
    "failed_backup_jobs": "Backup jobs that failed: storage did not take their blocks.",
    "peer_hit_tokens": "Tokens of admitted requests that were to come from another engine.",
    "offered_blocks": "Blocks of prompts that were computed for another engine.",
    "received_blocks": "Blocks received from another engine.",
    "failed_receive_jobs": "Receive jobs that failed: blocks did not come from another engine; they were computed.",
    "expired_transfers": "Requests computed for another engine that nobody asked for in time.",
    "failed_save_jobs": "Save jobs that failed.",
    "failed_load_jobs": "Load jobs that failed; their tokens were recomputed, or the request failed.",
    "expired_blocks": "Blocks dropped from the host as nobody used them for as long as their ttl_s.",
    "refused_pins": "Requests whose prompt was not pinned, as pins hold as much of the host as they may already.",
    "ignored_hints": "Hints of requests that were invalid and had no effect.",
    "saved_bytes": "Bytes saved, all ranks.",
    "loaded_bytes": "Bytes loaded, all ranks.",
    "load_milliseconds": "Time in which loads ran on the link, all ranks.",
    "load_stall_milliseconds": "Time that the model waited for layers of a load, all ranks.",
    "storage_read_blocks": "Blocks that storage read, on all ranks.",
    "storage_read_bytes": "Bytes that storage read, all ranks.",
    "storage_missed_blocks": "Blocks that were to be read from storage and were gone.",
    "storage_corrupt_blocks": "Blocks in storage that failed their checksum or MAC; they are not read again.",
    "storage_failed_reads_blocks": "Blocks that storage could not read.",
    "storage_written_blocks": "Blocks that storage wrote, on all ranks.",
    "storage_written_bytes": "Bytes that storage wrote, all ranks.",
    "storage_skipped_writes_blocks": "Blocks that were in storage already and were not written again.",
    "storage_failed_writes_blocks": "Blocks that storage could not write.",
    "storage_refused_calls": "Calls skipped while the breaker was open, as storage had failed too often.",
    "storage_breaker_is_open": "1 while storage is not used because it failed too often.",
    "storage_breaker_opened_times": "How often the breaker opened, all ranks.",
    "storage_evicted_blocks": "Blocks that storage deleted to make room.",
    "storage_stored_blocks": "Blocks in storage, as far as this engine knows.",
    "storage_stored_bytes": "Bytes in storage, as far as this engine knows.",
    "peer_sent_bytes": "Bytes sent to other engines, all ranks.",
    "peer_received_bytes": "Bytes that came from other engines, all ranks.",
    "peer_slot_bytes": "Bytes that peer_sent_bytes took in host memory on the staged route, coded or not, all ranks.",
    "peer_refused_links": "Connections from or to other engines that were refused.",
    "peer_lost_links": "Connections between engines that were lost.",
    "peer_link_faults": "Errors of this engine that cost a connection between engines; the log has them.",
    "host_capacity_blocks": "Blocks of host memory that are ready for use.",
    "host_cached_blocks": "Blocks of host memory that hold a cached block.",
    "host_leased_blocks": "Blocks of host memory that copies in flight read or write, or that wait to be backed up.",
    "host_evicted_blocks": "Blocks evicted from the host.",
    "pinned_blocks": "Blocks that are pinned, on the host or not.",
    "saves_are_off": "1 while nothing is saved, as most blocks do not fit into the lossless form of a host block.",
    "jobs_in_flight": "Jobs of all kinds in flight: copies, storage, peers.",
    "loading_bytes": "Bytes of loads in flight that have not arrived yet, all ranks, as of their last report.",
    "saving_bytes": "Bytes of saves in flight that have not arrived yet, all ranks, as of their last report.",
    "known_blocks": "Blocks that the index knows, with or without a copy.",
}
"""What each statistic of the scheduler half counts, gauges included."""

GAUGES = frozenset(
    {
        "storage_breaker_is_open",
        "storage_stored_blocks",
        "storage_stored_bytes",
        "host_capacity_blocks",
        "host_cached_blocks",
        "host_leased_blocks",
        "pinned_blocks",
        "saves_are_off",
        "jobs_in_flight",
        "loading_bytes",
        "saving_bytes",
        "known_blocks",
    }
)

TENANT_DOCUMENTATION = {
    "requests": "Requests of the tenant that were admitted.",
    "queries_tokens": "Tokens of the tenant's admitted requests.",
    "device_hit_tokens": "Tokens of the tenant's admitted requests that were on the device.",
    "host_hit_tokens": "Tokens of the tenant's admitted requests that were to be loaded from the host.",
    "held_blocks": "Host blocks that the tenant holds.",
    "pinned_blocks": "Blocks of the tenant's that are pinned, on the host or not.",
    "share_blocks": "Host blocks below which no other tenant pushes it.",
}
"""Of each tenant, where any is configured."""
TENANT_GAUGES = frozenset({"held_blocks", "pinned_blocks", "share_blocks"})
