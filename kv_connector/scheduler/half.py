"""The scheduler half (layer 2): knows what is cached on the host, decides what is loaded and saved, moves no byte.

Ownership: the engine owns device blocks and reports them call by call; this half owns the prefix tree and the host
tier; a job owns a lease (one reference) on every block it reads or writes, on both tiers, from the plan until every
rank has reported it. A host block is matched only while it is RESIDENT and evicted only while nothing leases it, so a
copy planned in a step can neither read nor overwrite a block that another copy of that step uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base import (
    DeviceBlocks,
    KVConnectorScheduler,
    Request,
    SchedulerOutput,
)
from ..config import Config
from ..events import BlockRemoved, CacheEvent, EventLog
from ..index import (
    BlockGroup,
    CacheIdentity,
    CacheTier,
    GroupedTree,
    Lookup,
    PrefixTree,
    Recency,
    ReuseModel,
    SavePolicy,
)
from ..metrics import CacheMetrics
from ..types import BlockHash, StepPlan, StepReport, Tier
from .companion import Admission
from .companions import Companions
from .control.control import Control
from .control.tenants import Tenants
from .fence import Fence
from .hits import HitCounter
from .ledger import JobLedger
from .loads.answers import Answers
from .loads.choice import LoadPlanner, is_light
from .loads.leases import LoadLeases
from .loads.rates import LoadMode
from .names import no_adapter
from .observers import JobTimes, Observer, Observers
from .operations import Operations
from .ranks import RankStates
from .requests import RequestState, RequestTable
from .saves.budget import SaveBudget
from .saves.planner import SavePlanner
from .saves.refusals import Refusals
from .scheduled import ScheduledPlanner
from .shared import DevicePool, Shared
from .steps import InFlightSteps
from .watchdog import CopyWatchdog


class SchedulerHalf(Operations, KVConnectorScheduler):
    """See `KVConnectorScheduler` for the engine's calls, and `Operations` for an operator's.

    `block_size`: tokens that a block hash covers. `world_size`: ranks that report each step. `groups`: the engine's
    block groups; the first is of full attention if any is. `drop_last_block`, `ends_within`: see `GroupedTree`; the
    engine names ends inside blocks with `base.StateBlock`. `unpins_when_idle`: the engine calls `handle_preemptions`
    before anything writes to a block that it has reallocated. `fails_by_block`: see `LoadPlanner`. `publishes_events`:
    `take_events` is read. An engine that keeps its own device blocks in our index passes its `tree`, so that one tree
    has every tier. `clock` returns monotonic seconds; it orders evictions and times loads. `learns_at_admission`: false
    for an engine that calls `note_asked`. `identity` has what the engine's block hashes leave out (model, layout, ...):
    it is part of the keys of blocks in storage and in other engines. `engine_id` names this start of the engine, for
    engines that continue its requests. `adapter_of` distinguishes LoRA adapters that the engine's hashes do not: see
    `Roots`. `observers` are called at every event. Raises ConfigError for settings that do not fit together.
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
        fails_by_block: bool = True,
        ends_within: bool = False,
        publishes_events: bool = True,
        learns_at_admission: bool = True,
        identity: CacheIdentity | None = None,
        engine_id: str = "",
        adapter_of: Callable[[Request], str] = no_adapter,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.tree = tree if tree is not None else PrefixTree()
        # What other engines bring fills whole blocks, from where blocks of all groups end.
        self._grouped = GroupedTree(self.tree, groups, drop_last_block, ends_within and config.peer is None)
        self.reuse = ReuseModel(self.tree)
        # Of blocks in windows nothing is learned: they follow no parent, and what was evicted is not seen to be missed.
        order = Recency(self.tree) if self._grouped.has_windows else self.reuse
        # It grows as ranks report memory that is ready.
        tenants = Tenants(config.tenants)
        self.host = CacheTier(
            self.tree, Tier.HOST, 0, log_removed=publishes_events, order=order, weights=tenants.weights
        )
        self.metrics = CacheMetrics()
        self._pool = DevicePool()
        self._observers = Observers(observers)
        self._ledger = JobLedger(world_size, self._pool, self.host, clock, JobTimes(self.metrics), self._observers)
        self._events = EventLog(publishes_events)
        self._shared = shared = Shared(
            self._grouped, self.host, self._pool, self._ledger, self.metrics, self._events, clock, block_size, tenants
        )
        lookup = Lookup(self._grouped, self.host)
        self._loads = LoadPlanner(config, self.metrics, clock, fails_by_block)
        self._leases = LoadLeases(shared, lookup, self._loads)
        self._steps = InFlightSteps()
        self._requests = RequestTable(self._leases, self._steps, self.metrics)
        self._ranks = RankStates(world_size, self.host)
        self._companions = Companions(
            config, shared, self._loads, self._ranks, identity, adapter_of, engine_id, world_size, self._observers
        )
        self._budget = SaveBudget(config.save_bandwidth)
        policy, is_in_storage = SavePolicy.from_config(config), config.storage is not None
        self.refusals = Refusals()
        self._saves = SavePlanner(
            shared, policy, self.reuse, self.refusals, self._budget, self._companions.saved, is_in_storage
        )
        self._hits = HitCounter(shared, self.reuse, learns_at_admission)
        self._control = Control(config, shared, self._companions, self._saves.asked)
        self._answers = Answers(shared, lookup, self._loads, self._requests, self._companions)
        self._fence = Fence(self._ledger)
        self._watchdog = CopyWatchdog(self._ledger, clock)
        self._scheduled = ScheduledPlanner(
            shared, self._requests, self._saves, self._companions, self._steps, self._watchdog
        )
        self._step, self._unpins_when_idle = 0, unpins_when_idle

    # What the engine asks and tells, in the order of a request's life.

    def bind_block_pool(self, blocks: DeviceBlocks) -> None:
        self._pool.bind(blocks)

    def on_new_request(self, request: Request) -> None:
        self._companions.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        if self._watchdog.hangs:
            self._observers.arrived(request)
            return 0, False
        if self._ledger.is_awaited(request_id) or self._loads.is_coalesced(request_id):
            return None, False  # of a request with this id that is gone, a load may be announced yet
        self.on_new_request(request)  # not every engine tells, and one that was preempted comes again
        if self._companions.is_awaited(request_id):
            return None, False
        return self._answers.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_local_tokens: int,
        num_external_tokens: int,
    ) -> None:
        assert len(block_ids) == len(self._grouped.groups), "one block table for each block group"
        size, now = self._shared.block_size, self._shared.clock()
        first, count = num_local_tokens // size, num_external_tokens // size
        self._saves.before_reuse.admitted(-(-request.num_tokens // size) - first, first)
        if self._requests.is_silently_preempted(request.request_id, block_ids, num_local_tokens):
            self._preempt(request.request_id)
        state = self._requests.admit(request, block_ids, first + count)
        known = self._grouped.touch_known(request.block_hashes, state.num_hit_hashes, now)
        num_loadable = self._answers.num_loadable(request, num_local_tokens)
        num_brought = max(0, count - num_loadable)
        num_loaded = count - num_brought
        self._admit_with_companions(state, first, num_loaded, num_brought)
        mode = LoadMode.ASYNC if num_brought else self._loads.admit(request.request_id)
        if not state.is_counted:
            state.is_counted = True
            self._control.admitted(state, known)
            num_recomputed = num_loadable if mode is LoadMode.RECOMPUTE and not count else 0
            self._hits.count(state, known, num_local_tokens, num_external_tokens, num_brought, num_recomputed)
        if num_loaded:
            mode = mode or LoadMode.SYNC
            state.load = self._leases.take(request, state.tables, first, num_loaded, mode, not num_brought)
        state.awaits_load = count > 0 and mode is LoadMode.ASYNC
        state.awaits_both = state.load is not None and num_brought > 0

    def note_asked(self, hashes: Sequence[BlockHash], on_device: bool = False) -> None:
        """For an engine that reports blocks instead of whole requests: a request asks for these blocks, all of which
        the device holds (`on_device`), or none. Called once for each block of a request, and for blocks that the device
        lacks before the request computes them, after which they no longer count as misses. Only for models without
        windows."""
        self._hits.note_asked(self.tree.match(hashes), len(hashes), len(hashes) if on_device else 0)

    def hold_computed(self, request: Request, block_ids: Sequence[Sequence[int]], num_in_front: int = 0) -> None:
        """For an engine that reports blocks instead of the requests that compute them: `block_ids`, by block group,
        hold what the hashes of `request` say, and the engine keeps them until `request_finished`. The next plan, in
        which `request` is scheduled without tokens, saves the blocks that the write policy wants. Counts as a use on
        the device, not as a request.

        The first `num_in_front` hashes only name the prefix of the others, and their blocks are NO_BLOCK. Only for
        models without windows."""
        hashes, now = request.block_hashes, self._shared.clock()
        state = self._requests.admit(request, block_ids, 0)
        state.is_counted = state.is_held = True
        for table in state.tables:
            table.next_block = num_in_front
        self._hits.note_used(self._grouped.touch_known(hashes[num_in_front:], 0, now))
        for group in self._grouped.full:
            self.tree.settle(self._grouped.insert(hashes, group, now))

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        for request_id in output.preempted_req_ids:
            if self._requests.may_preempt(request_id):
                self._preempt(request_id)
        self._step += 1
        self._watchdog.look()
        now = self._shared.clock()
        self._control.step(now)
        self._budget.fill(now)
        loads, background = self._requests.plan_loads()
        num_tokens, most_tokens = self._scheduled.plan(self._step, output, now)
        saves = self._saves.jobs.open()
        num_loaded = sum(job.num_blocks for job in loads)
        self._loads.estimate.step_planned(self._step, num_tokens, most_tokens, num_loaded, now)
        announced, awaited = self._loads.announce(self._step)
        self._log_removed()
        plan = StepPlan(
            self._step,
            loads,
            saves,
            background,
            announced,
            awaited,
            reported_step=self._ranks.reported_step,
            unfit=self.refusals.are_too_many,
            computes=num_tokens > 0,
            is_light=is_light(loads, self._shared.block_size, num_tokens + output.num_untold_tokens),
        )
        plan = self._companions.plan(plan)
        is_due = self._fence.take(overwrites=bool(num_tokens or loads or background or plan.peer))
        return replace(plan, fence=True) if is_due else plan

    def update_connector_output(self, reports: Sequence[StepReport]) -> None:
        for report in reports:
            self._ranks.take_in(report)
        self._ranks.fit_host()  # what a lookup has found needs room
        if self._budget.block_bytes != self._ranks.block_bytes:
            self._budget.block_bytes = self._ranks.block_bytes
            self._shared.tenants.fit(self.host, self._ranks.block_bytes)
        for report in reports:
            if report.lost_blocks:
                self._requests.lose(report.lost_blocks)
            self._ledger.take_in(report)
            self._leases.reported(report)
            self.metrics.count_copies(report)
            self._companions.reported(report)
        if reports:
            step = self._ranks.reported_step
            launch_seconds = max((each.launch_milliseconds for each in reports if each.step == step), default=0.0) / 1e3
            self._loads.estimate.step_ended(step, self._shared.clock(), launch_seconds)
            self._loads.note_reported(step)
            self._steps.reported(step)
            self.reuse.learn()  # here, as no request of the step waits any more

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._loads.withdraw(request.request_id)
        self._ledger.forget(request.request_id)
        state = self._requests.finish(request.request_id)
        if state is not None:
            self._leases.leave(request.request_id)
            self._saves.before_reuse.changed()
            self._grouped.touch_known(request.block_hashes, state.num_hit_hashes, self._shared.clock())
            self._control.finished(state)
        params = self._companions.finished(request)
        if state is not None and not len(self._requests) and self._unpins_when_idle:
            self._fence.unpin()
        return False, params

    def abort_transfer(self, request_id: str) -> None:
        """The request is aborted: called before `request_finished`, so that its answer names no transfer to
        continue."""
        self._companions.given_up(request_id)

    def holding(self, block_ids: Collection[int]) -> list[str]:
        """Ids of requests that hold any of these device blocks, or were preempted and lost them after a load into them
        was planned. Call it before `update_connector_output` gets the report of the failed load."""
        return self._requests.holding(block_ids)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Ids of the device blocks of an admitted request, by block group; none while it is preempted. Raises
        KeyError."""
        return [table.block_ids for table in self._requests[request_id].tables]

    def reset_cache(self) -> bool:
        self.host.reset()
        self._log_removed()
        self._requests.reset()
        self._saves.reset()
        is_done = self._companions.reset()
        return is_done and not any(map(self._brings_old, self._requests))

    def has_pending_push_work(self) -> bool:
        may_save = self._saves.before_reuse.may_find
        return len(self._ledger) > 0 or may_save or self._companions.is_busy or self._control.is_busy

    def has_pending_block_frees(self) -> bool:
        # A copy that hangs may pin its blocks for ever: an engine that is short of some preempts.
        return self._ledger.num_pinning > 0 and not self._watchdog.hangs

    def take_events(self) -> Iterable[CacheEvent]:
        self._log_removed()
        return self._events.take()

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        return {
            **self.metrics.snapshot(),
            **self._ranks.stats(),
            **self._companions.stats(),
            **self._control.stats(),
            "host_capacity_blocks": self.host.pool.capacity,
            "host_cached_blocks": self.host.num_copies,
            "host_leased_blocks": self.host.pool.capacity - self.host.num_available,
            "host_evicted_blocks": self.host.num_evicted,
            "saves_are_off": float(self.refusals.are_too_many),
            "jobs_in_flight": len(self._ledger),
            "known_blocks": len(self.tree),
        }

    def shutdown(self) -> None:
        self._control.shutdown()

    def check(self) -> None:
        """Verify every invariant of the tree and the host tier; for tests."""
        self.tree.check()
        self.host.check()

    # Decisions.

    def _admit_with_companions(self, state: RequestState, first: int, num_loaded: int, num_brought: int) -> None:
        self._companions.admitted(
            Admission(state.request, state.admission, first, num_loaded, num_brought, state.tables, state.is_stale)
        )

    def _brings_old(self, state: RequestState) -> bool:
        """Whether the request waits for what was cached before: the engine caches it on the device when it is there.

        Not where it has failed and the request waits to be admitted: an engine may admit nobody until a reset is done.
        """
        return state.awaits_load and (state.awaits_both or not self._ledger.has_failed(state.request.request_id))

    def _preempt(self, request_id: str) -> None:
        self._requests.preempt(request_id)
        self._leases.leave(request_id)
        self._saves.before_reuse.changed()
        self._companions.preempted(request_id)

    # What it owns.

    def _log_removed(self) -> None:
        if removed := self.host.removed:
            self.host.removed = []  # a copy of all that a large host held would cost as much as its reset
            self._events.add(BlockRemoved(removed, Tier.HOST))
