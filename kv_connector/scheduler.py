"""The scheduler half (layer 2): knows what is cached on the host, decides what is loaded and saved, moves no byte.

Who owns what: the engine owns device blocks and tells us of them call by call; this half owns the prefix tree's hits
and the host tier; a copy job owns a lease (one reference) on every block it reads or writes, on both tiers, from the
plan until every rank has reported it. A host block is matched only while it is resident, evicted only while nobody
leases it, so a copy planned in a step can neither read nor overwrite what another copy of that step uses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import DeviceBlocks, KVConnectorScheduler, Request, ScheduledRequest, SchedulerOutput
from .config import Config
from .errors import KVConnectorError
from .events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent, EventLog
from .index import BlockState, CacheTier, Event, PrefixTree, SavePolicy
from .jobs import JobLedger
from .metrics import CacheMetrics
from .types import BlockHash, CopyJob, Direction, StepPlan, StepReport, Tier

logger = logging.getLogger("kv_connector.scheduler")


@dataclass(slots=True)
class _RequestState:
    """What this half remembers of a live request."""

    request: Request
    counted: bool = False  # its hits and tokens are in the statistics
    block_ids: list[int] = field(default_factory=list)  # its device block table
    num_hit_blocks: int = 0  # leading blocks that were valid, or are loaded, when it was admitted
    next_block: int = 0  # blocks from here on have not been shown to the write policy
    unsaved: list[int] = field(default_factory=list)  # earlier blocks that are wanted but found no room
    load: tuple[list[int], list[int]] | None = None  # (device ids, host ids), leased and not yet planned


class SchedulerHalf(KVConnectorScheduler):
    """See `KVConnectorScheduler` for the calls.

    An engine that keeps its own device blocks in our index passes its `tree`, so that one tree knows every tier.
    `clock` gives seconds that never go back; it orders evictions.
    """

    def __init__(
        self,
        config: Config,
        block_size: int,
        world_size: int = 1,
        tree: PrefixTree | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree = tree if tree is not None else PrefixTree()
        self.host = CacheTier(self.tree, Tier.HOST, 0, log_removed=True)  # grows as ranks report memory that is ready
        self.metrics = CacheMetrics()
        self._block_size = block_size
        self._policy = SavePolicy.from_config(config)
        self._clock = clock
        self._blocks: DeviceBlocks | None = None
        self._requests: dict[str, _RequestState] = {}
        self._jobs = JobLedger(world_size)
        self._ready_host_blocks = [0] * world_size
        self._host_limit: int | None = None
        self._events = EventLog()
        self._step = 0
        self._num_taken = 0  # device blocks that requests admitted in the step being scheduled have use for
        self._most_taken = 0  # in any step
        self._may_save_before_reuse = False  # something changed since nothing was left to save

    # What the engine asks and tells, in the order of a request's life.

    def bind_block_pool(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return len(self._loadable(request, num_computed_tokens)) * self._block_size, False

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_local_tokens: int, num_external_tokens: int
    ) -> None:
        state = self._requests.setdefault(request.request_id, _RequestState(request))
        assert state.load is None, f"request {request.request_id} is admitted twice without a step in between"
        first, count = num_local_tokens // self._block_size, num_external_tokens // self._block_size
        # A request takes its blocks step by step where it computes and all at once where it loads: count them all.
        self._num_taken += -(-request.num_tokens // self._block_size) - num_local_tokens // self._block_size
        state.block_ids = list(block_ids)
        state.num_hit_blocks = first + count
        state.next_block = 0
        state.unsaved = []
        known = self.tree.match(request.block_hashes)
        self.tree.touch(known, self._clock())
        if not state.counted:
            state.counted = True
            self._count_hits(request, known, num_local_tokens, num_external_tokens)
        if count:
            host_ids = self.host.blocks_of(self._loadable(request, num_local_tokens)[:count])
            assert len(host_ids) == count, f"{request.request_id} was promised {count} blocks, not {len(host_ids)}"
            state.load = (state.block_ids[first : first + count], host_ids)
            self._lease(state.load[0], host_ids)

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        for request_id in output.preempted_req_ids:
            self._drop_blocks(self._requests[request_id])
        self._step += 1
        loads = []
        for state in self._requests.values():
            if state.load is not None:
                loads.append(self._jobs.open(Direction.LOAD, *state.load))
                state.load = None
        now = self._clock()
        pairs: list[tuple[int, int]] = []  # (device id, host id) of every save
        for item in output.scheduled:
            pairs += self._plan_saves(item, now)
        if self._policy.saves_before_reuse:
            pairs += self._plan_saves_before_reuse()
        saves = [self._jobs.open(Direction.SAVE, *zip(*pairs, strict=True))] if pairs else []
        self._log_removed()
        return StepPlan(self._step, tuple(loads), tuple(saves))

    def update_connector_output(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            for job, ok in self._jobs.take_in(report):
                if job.direction is Direction.LOAD:
                    self._end_load(job, ok)
                else:
                    self._end_save(job, ok)
            self._ready_host_blocks[report.rank] = report.num_host_blocks
            self.metrics.loaded_bytes += report.loaded_bytes
            self.metrics.saved_bytes += report.saved_bytes
            for timing in report.load_timings:
                self.metrics.load_milliseconds += timing.load_ms
                self.metrics.exposed_wait_milliseconds += sum(timing.exposed_wait_ms)
        self._fit_host()

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._drop_blocks(state)
            self._may_save_before_reuse = self._policy.saves_before_reuse
            self.tree.touch(self.tree.match(request.block_hashes), self._clock())
        return False, None

    # What an operator asks.

    def pin_prefix(self, block_hashes: Sequence[BlockHash]) -> None:
        """Keep a prefix: its blocks are saved as soon as they are computed, and never evicted from the host."""
        self.tree.pin(self.tree.insert_path(block_hashes, self._clock()))

    def unpin_prefix(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin_prefix` of the same hashes."""
        self.host.unpin(self.tree.match(block_hashes))

    def resize_host(self, num_blocks: int | None) -> None:
        """Use at most `num_blocks` host blocks from now on; None uses all that are ready."""
        self._host_limit = num_blocks
        self._fit_host()

    def reset_cache(self) -> bool:
        self.host.reset()
        self.host.removed.clear()
        self._events.add(AllBlocksCleared(Tier.HOST))
        return True

    def has_pending_push_work(self) -> bool:
        return len(self._jobs) > 0 or self._may_save_before_reuse

    def has_pending_block_frees(self) -> bool:
        return len(self._jobs) > 0

    def take_events(self) -> Iterable[CacheEvent]:
        self._log_removed()
        return self._events.take()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        return self.metrics.snapshot() | {
            "host_capacity_blocks": self.host.pool.capacity,
            "host_cached_blocks": self.host.num_copies,
            "host_evicted_blocks": self.host.num_evicted,
            "jobs_in_flight": len(self._jobs),
            "known_blocks": len(self.tree),
        }

    def check(self) -> None:
        """Verify every invariant of the tree and the host tier; for tests."""
        self.tree.check()
        self.host.check()

    # Decisions.

    def _loadable(self, request: Request, num_computed_tokens: int) -> list[int]:
        """Nodes that can be loaded right behind the computed tokens; at least one token is left to compute."""
        size = self._block_size
        if num_computed_tokens % size:
            return []
        hashes = request.block_hashes[num_computed_tokens // size : (request.num_tokens - 1) // size]
        nodes = self.tree.match(hashes)
        return nodes[: self.host.resident_prefix(nodes)]

    def _count_hits(self, request: Request, known: list[int], num_local_tokens: int, num_external_tokens: int) -> None:
        for node in known:
            self.tree.hits[node] += 1
        metrics, size = self.metrics, self._block_size
        metrics.requests += 1
        metrics.queries_tokens += request.num_tokens
        metrics.device_hit_tokens += num_local_tokens
        metrics.host_hit_tokens += num_external_tokens
        for node in known[(num_local_tokens + num_external_tokens) // size :]:
            if self.host.node_state(node) is not BlockState.SWAPPING_TO_HOST:
                break
            metrics.missed_pending_tokens += size

    def _plan_saves(self, item: ScheduledRequest, now: float) -> list[tuple[int, int]]:
        """Saves of blocks that are, or will be after this step, full and valid on the device."""
        state = self._requests[item.request_id]
        state.block_ids.extend(item.new_block_ids)
        hashes, size = state.request.block_hashes, self._block_size
        full = min((item.num_computed_tokens + item.num_scheduled_tokens) // size, len(hashes))
        if (full <= state.next_block and not state.unsaved) or not self.host.num_available:
            return []  # with no room at all the blocks are looked at when there is some
        first = state.next_block
        wanted = [index for index in (*state.unsaved, *range(first, full)) if self._is_wanted(hashes[index])]
        state.next_block = max(first, full)
        host_ids = self._allocate_host(len(wanted), hashes[:full], now)
        # Rows of the tree may be recycled while room is made, so nodes are looked up only from here on.
        nodes = self.tree.insert_path(hashes[:full], now, first)
        saved = wanted[: len(host_ids)]
        targets = [nodes[i - first] if i >= first else self.tree.insert_path(hashes[: i + 1], now, i)[0] for i in saved]
        self.host.attach(host_ids, targets, Event.SWAP_OUT)
        for node in nodes:
            self.tree.settle(node)
        state.unsaved = wanted[len(host_ids) :]
        self._count_saves(saved, targets, state.num_hit_blocks)
        device_ids = [state.block_ids[index] for index in saved]
        self._pool.touch(device_ids)
        return list(zip(device_ids, host_ids, strict=True))

    def _plan_saves_before_reuse(self) -> list[tuple[int, int]]:
        """Under write_back: saves of the device blocks that the engine will reuse first."""
        pairs = []
        self._most_taken, self._num_taken = max(self._most_taken, self._num_taken), 0
        num_watched = max(self._policy.lookahead, 2 * self._most_taken)
        for device_id, block_hash in self._pool.next_reused(num_watched):
            node = self.tree.get(block_hash)
            if node is None or self.host.node_state(node) is not BlockState.ABSENT:
                continue
            host_ids = self.host.allocate_up_to(1, older_than=self.tree.used[node])
            node = self.tree.get(block_hash)
            if not host_ids or node is None:
                self.host.release(host_ids)
                continue
            self.host.attach(host_ids, [node], Event.SWAP_OUT)
            pairs.append((device_id, host_ids[0]))
        self._pool.touch([device_id for device_id, _ in pairs])
        self.metrics.saves_on_reuse_blocks += len(pairs)
        self._may_save_before_reuse = bool(pairs)
        return pairs

    def _is_wanted(self, block_hash: BlockHash) -> bool:
        node = self.tree.get(block_hash)
        if node is None:
            return self._policy.wants(hits=0, pinned=False)
        if self.host.node_state(node) is not BlockState.ABSENT:
            return False
        return self._policy.wants(self.tree.hits[node], self.tree.pins[node] > 0)

    def _allocate_host(self, num_blocks: int, path: Sequence[BlockHash], now: float) -> list[int]:
        """Up to `num_blocks` host blocks, evicting older prefixes but nothing of the path that they continue."""
        if num_blocks > self.host.pool.num_free and self.host.num_available:
            self.tree.touch(self.tree.match(path), now)
        return self.host.allocate_up_to(num_blocks, older_than=now)

    def _count_saves(self, indices: list[int], nodes: list[int], num_hit_blocks: int) -> None:
        for index, node in zip(indices, nodes, strict=True):
            if self.tree.pins[node]:
                self.metrics.saves_pinned_blocks += 1
            elif index < num_hit_blocks:
                self.metrics.saves_on_hit_blocks += 1
            else:
                self.metrics.saves_on_compute_blocks += 1

    # Leases and the ends of jobs.

    @property
    def _pool(self) -> DeviceBlocks:
        if self._blocks is None:
            raise KVConnectorError("bind_block_pool(...) must be called before the first request")
        return self._blocks

    def _lease(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        self._pool.touch(device_ids)
        self.host.acquire(host_ids)

    def _release(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        self._pool.free_blocks(device_ids)
        self.host.release(host_ids)

    def _drop_blocks(self, state: _RequestState) -> None:
        """The request has lost its device blocks: preempted, aborted or finished."""
        if state.load is not None:
            self._release(*state.load)
            state.load = None
        self.metrics.dropped_saves_blocks += len(state.unsaved)
        state.unsaved = []
        state.block_ids = []

    def _end_load(self, job: CopyJob, ok: bool) -> None:
        host_ids = job.host_ids.tolist()
        if ok:
            self.metrics.loaded_blocks += job.num_blocks
        else:
            self.metrics.failed_load_jobs += 1
            self.host.discard(host_ids)  # a second try would fail as well: the blocks are a miss from now on
            logger.warning("load job %d failed: %d blocks will be recomputed", job.job_id, job.num_blocks)
        self._release(job.device_ids.tolist(), host_ids)

    def _end_save(self, job: CopyJob, ok: bool) -> None:
        host_ids = job.host_ids.tolist()
        if ok:
            filled = self.host.fill(host_ids)
            self.metrics.saved_blocks += len(filled)
            if filled:
                self._events.add(BlockStored(tuple(self.host.hashes_of(filled)), Tier.HOST))
        else:
            self.metrics.failed_save_jobs += 1
            self.host.discard(host_ids)
            self._may_save_before_reuse = False  # an idle engine does not try again and again
            logger.warning("save job %d failed: %d blocks stay uncached on the host", job.job_id, job.num_blocks)
        self._release(job.device_ids.tolist(), host_ids)

    def _fit_host(self) -> None:
        """Use as many host blocks as every rank has ready and the operator allows."""
        ready = min(self._ready_host_blocks)
        capacity = ready if self._host_limit is None else min(ready, self._host_limit)
        if capacity != self.host.pool.capacity:
            self.host.resize(capacity)

    def _log_removed(self) -> None:
        if self.host.removed:
            self._events.add(BlockRemoved(tuple(self.host.removed), Tier.HOST))
            self.host.removed.clear()
