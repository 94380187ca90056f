"""Counters of the scheduler half (layer 0). Each is a plain attribute; `snapshot` names them with their units."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class CacheMetrics:
    """Sums since start-up. Blocks and tokens are counted once, whatever the number of ranks; bytes over all ranks.

    queries_tokens: tokens of admitted requests, of which device_hit_tokens were on the device and host_hit_tokens on
    the host. missed_pending_tokens: tokens whose block was still being saved when it was asked for.
    saves_*_blocks: saves begun, by the reason: the policy wanted the block when it was computed, when a request hit
    it, when it was about to be reused, or because its prefix is pinned. saved_blocks: saves whose bytes arrived.
    dropped_saves_blocks: wanted by the policy, but the request ended before the host had room.
    """

    requests: int = 0
    queries_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    missed_pending_tokens: int = 0
    saves_on_compute_blocks: int = 0
    saves_on_hit_blocks: int = 0
    saves_on_reuse_blocks: int = 0
    saves_pinned_blocks: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    dropped_saves_blocks: int = 0
    failed_save_jobs: int = 0
    failed_load_jobs: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    load_milliseconds: float = 0.0
    exposed_wait_milliseconds: float = 0.0

    def snapshot(self) -> dict[str, float]:
        """All counters by name."""
        return asdict(self)
