"""The scheduler half (layer 2): knows what is cached on the host, decides what is loaded and saved, moves no byte.

Who owns what: the engine owns device blocks and tells us of them call by call; this half owns the prefix tree's hits
and the host tier; a copy job owns a lease (one reference) on every block it reads or writes, on both tiers, from the
plan until every rank has reported it. A host block is matched only while it is resident, evicted only while nobody
leases it, so a copy planned in a step can neither read nor overwrite what another copy of that step uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .base import DeviceBlocks, KVConnectorScheduler, Request, SchedulerOutput
from .budget import SaveBudget
from .config import Config
from .endings import JobEnds
from .errors import ConfigError, KVConnectorError
from .events import AllBlocksCleared, BlockRemoved, CacheEvent, EventLog
from .handovers import HandoverPlanner
from .hits import HitCounter
from .index import (
    BlockGroup,
    CacheIdentity,
    CacheTier,
    GroupedTree,
    Lookup,
    PrefixTree,
    SavePolicy,
    root_hash,
)
from .jobs import JobLedger
from .leases import LoadLease, LoadLeases
from .loads import LoadMode, LoadPlanner
from .metrics import CacheMetrics
from .ranks import RankStates
from .saves import BlockTable, SavePlanner
from .steps import StepsUnderWay
from .storing import StoragePlanner
from .types import BlockHash, CopyJob, Direction, StepPlan, StepReport, Tier


@dataclass(slots=True)
class _RequestState:
    """What this half remembers of a live request."""

    request: Request
    counted: bool = False  # its hits and tokens are in the statistics
    tables: list[BlockTable] = field(default_factory=list)  # by block group
    num_hit_blocks: int = 0  # leading blocks that were valid, or are loaded, when it was admitted
    load: LoadLease | None = None
    is_newly_admitted: bool = False  # since the last step was planned


class SchedulerHalf(KVConnectorScheduler):
    """See `KVConnectorScheduler` for the calls.

    `groups`: the engine's block groups; the first is of full attention if any is. `drop_last_block`: see `Lookup`.
    `unpins_when_idle`: the engine calls `handle_preemptions` before anything writes to a block that it hands out anew.
    An engine that keeps its own device blocks in our index passes its `tree`, so that one tree knows every tier.
    `clock` gives seconds that never go back; it orders evictions and times loads. `identity` names what the engine's
    block hashes leave out (model, layout, ...): it goes into the names that other engines know blocks by. `engine_id`
    names this start of the engine, for those that continue its requests.
    """

    def __init__(
        self,
        config: Config,
        block_size: int,
        world_size: int = 1,
        tree: PrefixTree | None = None,
        clock: Callable[[], float] = time.monotonic,
        groups: Sequence[BlockGroup] = (BlockGroup(),),
        drop_last_block: bool = False,
        unpins_when_idle: bool = True,
        identity: CacheIdentity | None = None,
        engine_id: str = "",
    ) -> None:
        self.tree = tree if tree is not None else PrefixTree()
        self.host = CacheTier(self.tree, Tier.HOST, 0, log_removed=True)  # grows as ranks report memory that is ready
        self.metrics = CacheMetrics()
        self._block_size = block_size
        self._clock = clock
        self._blocks: DeviceBlocks | None = None
        self._requests: dict[str, _RequestState] = {}
        self._jobs = JobLedger(world_size)
        self._grouped = GroupedTree(self.tree, groups)
        self._hits = HitCounter(self.tree, self.host, self.metrics, block_size)
        self._lookup = Lookup(self._grouped, self.host, drop_last_block)
        self._budget = SaveBudget(config.save_bandwidth)
        policy = SavePolicy.from_config(config)
        self._saves = SavePlanner(self._grouped, self.host, policy, self._budget, self.metrics)
        self._loads = LoadPlanner(config, self.metrics, clock)
        self._leases = LoadLeases(self._lookup, self.host, self._jobs, self._loads)
        self._under_way = StepsUnderWay()
        self._storage: StoragePlanner | None = None
        for name, part in (("storage", config.storage), ("peer", config.peer)):
            if part is not None and len(groups) > 1:
                raise ConfigError(f"{name} with {len(groups)} block groups is not supported: leave {name} out")
        root = root_hash(identity) if identity is not None else BlockHash(bytes(32))
        if config.storage is not None:
            self._storage = StoragePlanner(
                config.storage,
                root,
                self._grouped,
                self.host,
                self._jobs,
                self._loads,
                self.metrics,
                clock,
                block_size,
            )
        self._handovers: HandoverPlanner | None = None
        if config.peer is not None:
            self._handovers = HandoverPlanner(
                config.peer, engine_id, root, world_size, self._jobs, self.metrics, clock, block_size
            )
        self._events = EventLog()
        self._ends = JobEnds(
            lambda: self._pool,
            self._jobs,
            self.host,
            self._loads,
            self._saves,
            self._storage,
            self._handovers,
            self.metrics,
            self._events,
        )
        self._ranks = RankStates(world_size, self.host)
        self._step = 0
        self._unpins_when_idle = unpins_when_idle

    # What the engine asks and tells, in the order of a request's life.

    def bind_block_pool(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks

    def on_new_request(self, request: Request) -> None:
        if self._storage is not None and not (self._handovers is not None and self._handovers.arrived(request)):
            self._storage.prefetches.arrived(request, (request.num_tokens - 1) // self._block_size)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._storage is not None:
            self.on_new_request(request)  # not every engine tells, and one that was preempted comes again
            if self._storage.prefetches.is_awaited(request.request_id):
                return None, False
        if self._loads.still_rides(request.request_id, request.num_tokens - num_computed_tokens):
            return None, False
        num_blocks = self._num_loadable(request, num_computed_tokens)
        num_remote = self._num_remote(request, num_computed_tokens, num_blocks)
        if num_remote:
            self._loads.withdraw(request.request_id)
            return (num_blocks + num_remote) * self._block_size, True
        if not num_blocks:
            self._loads.withdraw(request.request_id)
            return 0, False
        mode = self._choose(request, num_computed_tokens, num_blocks)
        if mode is LoadMode.RIDE:
            return None, False
        return (0 if mode is LoadMode.RECOMPUTE else num_blocks * self._block_size), mode is LoadMode.ASYNC

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_local_tokens: int,
        num_external_tokens: int,
    ) -> None:
        state = self._requests.setdefault(request.request_id, _RequestState(request))
        assert state.load is None, f"request {request.request_id} is admitted twice without a step in between"
        assert len(block_ids) == len(self._grouped.groups), "one block table for each block group"
        first, count = num_local_tokens // self._block_size, num_external_tokens // self._block_size
        self._saves.note_admitted(-(-request.num_tokens // self._block_size) - first)
        state.tables = [BlockTable(list(ids)) for ids in block_ids]
        state.num_hit_blocks = first + count
        state.is_newly_admitted = True
        known = self._grouped.known(request.block_hashes, state.num_hit_blocks)
        self.tree.touch(known, self._clock())
        if self._storage is not None:
            self._storage.prefetches.admitted(request.request_id, first, count)
        num_loadable = self._num_loadable(request, num_local_tokens)
        num_remote = 0
        if self._handovers is not None:
            num_remote = max(0, count - num_loadable)
            remote_ids = state.tables[0].block_ids[first + count - num_remote : first + count]
            self._handovers.admitted(request, first + count - num_remote, remote_ids, self._pool)
        mode = LoadMode.ASYNC if num_remote else self._loads.admit(request.request_id)
        if not state.counted:
            state.counted = True
            num_recomputed = num_loadable if mode is LoadMode.RECOMPUTE and not count else 0
            self._hits.count(request, known, num_local_tokens, num_external_tokens, num_remote, num_recomputed)
        if count - num_remote:
            state.load = self._leases.take(
                self._pool, request, state.tables, first, count - num_remote, mode or LoadMode.SYNC, not num_remote
            )

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        for request_id in output.preempted_req_ids:
            state = self._requests.get(request_id)
            # One that was preempted between two steps may have been admitted again since: then its blocks are new ones.
            if state is not None and not state.is_newly_admitted:
                self._under_way.freed(chain.from_iterable(table.block_ids for table in state.tables))
                self._drop_blocks(state)
        self._step += 1
        now = self._clock()
        loads, background = self._plan_loads()
        for state in self._requests.values():
            state.is_newly_admitted = False
        pairs: list[tuple[int, int]] = []  # (device id, host id) of every save
        written: list[int] = []
        num_tokens = 0
        for item in output.scheduled:
            state = self._requests[item.request_id]
            num_tokens += item.num_scheduled_tokens
            for table, ids in zip(state.tables, item.new_block_ids, strict=False):
                table.block_ids.extend(ids)
            for table in state.tables:
                written += table.block_ids[item.num_computed_tokens // self._block_size :]
            pairs += self._saves.plan(state.request, state.tables, item, state.num_hit_blocks, self._block_size, now)
            if self._handovers is not None:
                self._handovers.scheduled(item, state.tables[0].block_ids, self._pool)
        pairs += self._saves.plan_before_reuse(self._pool)
        device_ids, host_ids = zip(*pairs, strict=True) if pairs else ((), ())
        self._pool.touch(device_ids)
        saves = [self._jobs.open(Direction.SAVE, device_ids, host_ids)] if pairs else []
        self._under_way.planned(self._step, written)
        self._loads.estimate.step_planned(self._step, num_tokens, len(loads), now)
        announced, awaited = self._loads.announce(self._step)
        self._log_removed()
        peer, withdrawn, cancelled_peer = self._handovers.plan() if self._handovers is not None else ((), (), ())
        fence = self._ends.take_fence(overwrites=bool(num_tokens or loads or background or peer))
        storage, cancelled = self._storage.plan() if self._storage is not None else ((), ())
        copies = tuple(loads), tuple(saves), tuple(background)
        handed = peer, withdrawn, cancelled_peer
        return StepPlan(
            self._step, *copies, announced, awaited, fence, storage, cancelled, *handed, computes=num_tokens > 0
        )

    def update_connector_output(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._ranks.take_in(report)
        self._budget.block_bytes = self._ranks.block_bytes
        self._ranks.fit_host()  # what a look-up has found needs room
        for report in reports:
            self._ends.take_in(report)
        if reports:
            step = max(report.step for report in reports)
            self._loads.estimate.step_ended(step, self._clock())
            self._loads.note_reported(step)
            self._under_way.reported(step)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._loads.withdraw(request.request_id)
        if self._storage is not None:
            self._storage.finished(request)
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._drop_blocks(state)
            self._saves.note_changed()
            self.tree.touch(self._grouped.known(request.block_hashes, state.num_hit_blocks), self._clock())
            if not self._requests and self._unpins_when_idle:
                self._ends.unpin()
        return False, self._handovers.finished(request) if self._handovers is not None else None

    def withdraw_handover(self, request_id: str) -> None:
        """The request is given up: called before `request_finished`, no other engine is told to continue it."""
        if self._handovers is not None:
            self._handovers.withdraw(request_id)

    # What an operator asks.

    def pin_prefix(self, block_hashes: Sequence[BlockHash]) -> None:
        """Keep a prefix: its blocks are saved as soon as they are computed, and never evicted from the host."""
        for group in range(len(self._grouped.groups)):
            self.tree.pin(self._grouped.insert(block_hashes, group, self._clock()))

    def unpin_prefix(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin_prefix` of the same hashes."""
        for group in range(len(self._grouped.groups)):
            self.host.unpin(self._grouped.find(block_hashes, group))

    def resize_host(self, num_blocks: int | None) -> None:
        """Use at most `num_blocks` host blocks from now on; None uses all that are ready."""
        self._ranks.limit_host(num_blocks)

    def reset_cache(self) -> bool:
        self.host.reset()
        self.host.removed.clear()
        if self._storage is not None:
            self._storage.reset()
        if self._handovers is not None:
            self._handovers.reset()
        self._events.add(AllBlocksCleared(Tier.HOST))
        return True

    def has_pending_push_work(self) -> bool:
        backs_up = self._storage is not None and self._storage.is_busy
        hands_over = self._handovers is not None and self._handovers.is_busy
        return len(self._jobs) > 0 or self._saves.may_save_before_reuse or backs_up or hands_over

    def has_pending_block_frees(self) -> bool:
        return self._jobs.num_pinning > 0

    def take_events(self) -> Iterable[CacheEvent]:
        self._log_removed()
        return self._events.take()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        return (
            self.metrics.snapshot()
            | (self._storage.stats() if self._storage is not None else {})
            | (self._handovers.stats() if self._handovers is not None else {})
            | self._ranks.stats()
            | {
                "host_capacity_blocks": self.host.pool.capacity,
                "host_cached_blocks": self.host.num_copies,
                "host_leased_blocks": self.host.pool.capacity - self.host.num_available,
                "host_evicted_blocks": self.host.num_evicted,
                "jobs_in_flight": len(self._jobs),
                "known_blocks": len(self.tree),
            }
        )

    def check(self) -> None:
        """Verify every invariant of the tree and the host tier; for tests."""
        self.tree.check()
        self.host.check()

    # Decisions.

    def _num_loadable(self, request: Request, num_computed_tokens: int) -> int:
        """Blocks that can be loaded right behind the computed tokens; at least one token is left to compute."""
        size = self._block_size
        if num_computed_tokens % size:
            return 0
        return self._lookup.find(request.block_hashes, num_computed_tokens // size, (request.num_tokens - 1) // size)

    def _num_remote(self, request: Request, num_computed_tokens: int, num_loadable: int) -> int:
        """Blocks behind those that can be loaded that another engine has."""
        if self._handovers is None or num_computed_tokens % self._block_size:
            return 0
        known = num_computed_tokens // self._block_size + num_loadable
        return max(0, self._handovers.num_blocks(request) - known)

    def _choose(self, request: Request, num_computed_tokens: int, num_blocks: int) -> LoadMode:
        first = num_computed_tokens // self._block_size
        first_blocks: list[int] = []
        if self._loads.any_in_background:
            first_blocks = self.host.blocks_of(self._lookup.hit(request.block_hashes, first, 1).nodes[0])
        num_hit = num_blocks * self._block_size
        num_new = request.num_tokens - num_computed_tokens - num_hit
        others = len(self._requests) > (request.request_id in self._requests)
        return self._loads.choose(request.request_id, num_blocks, num_hit, num_new, others, first_blocks)

    def _plan_loads(self) -> tuple[list[CopyJob], list[CopyJob]]:
        """Jobs of the requests admitted in this step: those it waits for, and those that run behind it."""
        loads: list[CopyJob] = []
        background: list[CopyJob] = []
        used = self._under_way.used()
        for request_id, state in self._requests.items():
            load, state.load = state.load, None
            if load is None:
                continue
            (background if load.mode is LoadMode.ASYNC else loads).append(self._leases.open(load, request_id, used))
        self.metrics.sync_loads += len(loads)
        self.metrics.async_loads += len(background)
        return loads, background

    # What it owns.

    @property
    def _pool(self) -> DeviceBlocks:
        if self._blocks is None:
            raise KVConnectorError("bind_block_pool(...) must be called before the first request")
        return self._blocks

    def _drop_blocks(self, state: _RequestState) -> None:
        """The request has lost its device blocks: preempted, aborted or finished."""
        if state.load is not None:
            self._leases.drop(self._pool, state.load)
            state.load = None
        if self._handovers is not None:
            self._handovers.drop(state.request.request_id, self._pool)
        self.metrics.dropped_saves_blocks += sum(len(table.unsaved) for table in state.tables)
        state.tables = []

    def _log_removed(self) -> None:
        if self.host.removed:
            self._events.add(BlockRemoved(tuple(self.host.removed), Tier.HOST))
            self.host.removed.clear()
