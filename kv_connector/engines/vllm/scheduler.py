"""The scheduler half behind vLLM's calls."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from ...base import StateBlock
from ...build import build_scheduler
from ...config import Config
from ...errors import ConfigError, KVConnectorError
from ...index import CacheIdentity, may_truncate
from ..stats import StatsFeed
from .blocks import PoolBlocks
from .events import EventFeed
from .identity import Adapters, ReplacedAdapters
from .sessions import Sessions
from .specs import EngineShape
from .stats import TieredStats
from .steps import (
    TELLS_FAILED_REQUESTS,
    PlanMetadata,
    ReadyMetadata,
    ReportMetadata,
    to_step,
    to_tables,
    told_ends,
    told_states,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput as VllmOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
logger = logging.getLogger("kv_connector.vllm")


class SchedulerRole:
    """Translates; `half` decides."""

    def __init__(
        self, config: Config, shape: EngineShape, identity: CacheIdentity | None, ends_within: bool = False
    ) -> None:
        """`ends_within`: hits may end inside of blocks, at any hash."""
        self.shape = shape
        self.host_memory = config.host_memory
        self._ends_within = ends_within
        self.half = build_scheduler(
            config,
            shape.block_size,
            shape.world_size,
            groups=shape.groups,
            drop_last_block=shape.drop_last_block,
            unpins_when_idle=shape.unpins_when_idle,
            identity=identity,
            adapter_of=Adapters(),
            engine_id=shape.engine_id,
            publishes_events=shape.publishes_events,
            # Told of blocks vLLM ends the engine over several groups, and with one goes on behind the blocks in front.
            # And a recurrent state is read before a step asks for its loads, so it is not loaded in that step.
            fails_by_block=not TELLS_FAILED_REQUESTS or may_truncate(shape.groups),
            ends_within=ends_within,
        )
        self._local_tokens: dict[str, int] = {}  # what waiting requests had on the device when they were looked up
        self._live: dict[str, Request] = {}  # that were admitted
        self._farther_tokens = 0, 0  # of the request admitted last: those of other engines, and of storage
        self._blocks: PoolBlocks | None = None
        self._told: dict[str, list[list[int]]] = {}  # block tables of requests admitted since the last step
        self._begun_anew: set[str] = set()  # that wait with blocks of which nothing was loaded, and may hit nothing
        self._to_compute: list[Request] = []  # that were put off behind those, and want their prompts computed
        self._sessions = Sessions()
        self._replaced = ReplacedAdapters()
        self._feed = StatsFeed()
        self._tenants = self.half.tenant_stats if config.tenants else dict
        self._events = EventFeed(shape) if shape.publishes_events else None
        logger.info(
            "kv_connector: %s over %d rank(s), %d bytes of host memory in all, blocks of %d tokens in %d group(s)",
            config.write_policy.value,
            shape.world_size,
            config.host_memory,
            shape.block_size,
            len(shape.groups),
        )

    def bind_block_pool(self, pool: BlockPool) -> None:
        groups = {v: ours for ours, v in enumerate(self.shape.group_ids)}
        self._blocks = PoolBlocks(pool, groups, self._is_held)
        self.half.bind_block_pool(self._blocks)

    def set_xfer_handshake_metadata(self, metadata: Iterable[object]) -> None:
        """Of each rank; under MultiConnector it may be another connector's."""
        ready = [rank.report for rank in metadata if isinstance(rank, ReadyMetadata)]
        self.half.update_connector_output(ready)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._blocks is None:
            raise ConfigError(
                "vLLM gave no access to its blocks: MultiConnector before 0.25 keeps them from its children; "
                "use a newer vLLM, or TieredKVConnector alone"
            )
        self._local_tokens[request.request_id] = num_computed_tokens
        if self._events is not None:
            self._events.note(request)
        if self._begun_anew and request.request_id not in self._begun_anew:
            self._put_off(request)
            return None, False  # vLLM may look at it before those, which hold blocks that it may need
        if request.skip_reading_prefix_cache:
            return 0, False  # it wants its prompt computed, and vLLM drops what we answer
        if self._replaced.has(request):
            return 0, False  # the host has blocks of its adapter's old weights, also where vLLM has forgotten them
        return self.half.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """After an asynchronous load vLLM calls again, without a lookup: all of it is on the device by then."""
        num_local = self._local_tokens.pop(request.request_id, request.num_computed_tokens)
        if request.request_id in self._begun_anew:
            request.skip_reading_prefix_cache = False
            self._end_anew(request.request_id)
        block_ids = blocks.get_block_ids()
        tables = to_tables([block_ids[group_id] for group_id in self.shape.group_ids])
        self._told[request.request_id] = tables
        self._live[request.request_id] = request
        metrics = self.half.metrics
        peer, storage = metrics.peer_hit_tokens, metrics.storage_hit_tokens
        self.half.update_state_after_alloc(request, tables, num_local, num_external_tokens)
        self._farther_tokens = metrics.peer_hit_tokens - peer, metrics.storage_hit_tokens - storage

    def hit_sources(self, num_external_tokens: int) -> dict[str, int]:
        """Where the external tokens of the request admitted last come from, by the values of vLLM's `CacheHitSource`;
        sources of none are left out. What was read from storage for it counts as storage's."""
        peer, storage = self._farther_tokens
        sources = {"p2p": peer, "disk": storage, "host": num_external_tokens - peer - storage}
        return {source: count for source, count in sources.items() if count}

    def build_connector_meta(self, output: VllmOutput) -> PlanMetadata:
        told, self._told = self._told, {}
        self._sessions.planned(output, self._live)
        if self._events is not None:
            for request_id in output.num_scheduled_tokens:
                self._events.note(self._live[request_id])
        states = [state for state in told_states(output, self.shape) if self._is_kept(state, output)]
        if states and self._ends_within:
            states += list(told_ends(output, self.shape, states))
        return PlanMetadata(self.half.build_connector_meta(to_step(output, self.shape.group_ids, told, states)))

    def _is_kept(self, state: StateBlock, output: VllmOutput) -> bool:
        """Whether a state is one that a hit may end with, of a request that goes on, and is still cached as that."""
        request = self._live.get(state.request_id)
        if request is None or self._blocks is None or state.request_id in (output.preempted_req_ids or ()):
            return False
        num_hashes, rest = divmod(state.num_tokens, self.shape.block_size)
        if rest or (not self._ends_within and num_hashes % self.shape.groups[state.group].hashes_per_block):
            return False
        if not 0 < num_hashes <= len(request.block_hashes):
            return False
        block_hash, group_id = request.block_hashes[num_hashes - 1], self.shape.group_ids[state.group]
        return self._blocks.is_cached_as(state.block_id, block_hash, group_id)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Raises KVConnectorError where vLLM would continue a request with bytes that were never loaded.

        When a load fails vLLM looks for its request among those that load or run. It overlooks one whose load was
        announced and which waits for free blocks: that is computed from here. And it overlooks one that the next step's
        plan has preempted. Where it has scheduled the next step already, or its runner counts tokens by itself, it
        takes that step's output for the request's, and caches what the step computes. Older versions are told of
        blocks, not of requests: with windows in all layers they continue behind blocks that were never loaded. Raised
        here and not by a worker, as other stages of a pipeline wait for what a worker computes.
        """
        self._sessions.taken_in()
        lost, may_take_output = output.invalid_block_ids, False
        for request_id in self.half.holding(lost) if lost else ():
            may_take_output |= self._take_loss(self._live[request_id], lost)
        meta = output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            has_failed_in_step = any(report.has_failed_in_step for report in meta.reports)
            if self.shape.recomputes_wrongly and has_failed_in_step and may_take_output:
                raise KVConnectorError(
                    f"the load of {len(lost)} blocks failed twice in a step, and vLLM, with "
                    "asynchronous scheduling, a pipeline or Model Runner V2, would continue with wrong tokens: with "
                    "kv_load_failure_policy=fail the request would end instead, and with --no-async-scheduling, "
                    "VLLM_USE_V2_MODEL_RUNNER=0 and no pipeline it would be computed"
                )
            self.half.update_connector_output(meta.reports)

    def _take_loss(self, request: Request, lost: set[int]) -> bool:
        """A request that held some of these blocks, which were not loaded, computes them, or vLLM has it do so. Returns
        whether vLLM may keep the output of a step that has read them. Raises as `update_connector_output`."""
        tables = self.half.block_ids(request.request_id)
        waits = request.status in _WAITS
        holds = any(not lost.isdisjoint(ids) for ids in tables)
        takes_output = _may_take_output(request, holds, self.shape.takes_nothing_back)
        if waits and (takes_output or not may_truncate(self.shape.groups)):
            raise KVConnectorError(
                f"the load of request {request.request_id} failed twice, and vLLM, which has preempted the request or "
                "has no room for it, would give it wrong tokens: a smaller --max-num-seqs or more device memory leaves "
                "room"
            )
        if self.shape.recomputes and not may_truncate(self.shape.groups):
            raise KVConnectorError(
                f"the load of request {request.request_id} failed twice, and this vLLM would compute it with wrong "
                "tokens, as its model has sliding windows: with kv_load_failure_policy=fail the request would end "
                "instead, and with vLLM 0.32 it would be computed"
            )
        if holds and (waits or self.shape.recomputes):
            self._compute_from(request, tables, lost)
        return takes_output

    def _compute_from(self, request: Request, tables: Sequence[Sequence[int]], lost: Collection[int]) -> None:
        """Have the request compute what was not loaded. Where several share such a block vLLM has the first one compute
        it, and the others continue behind it: with wrong tokens if the first is aborted, preempted or slower. So each
        computes it for itself. vLLM has handled the failure before it calls, and has discarded what the step has
        sampled for all of them."""
        for size, ids in zip(self.shape.block_sizes, tables, strict=False):
            first = next((n for n, block_id in enumerate(ids) if block_id in lost), None)
            if first is not None:
                request.num_computed_tokens = min(request.num_computed_tokens, first * size)
        if request.status in _WAITS and not request.num_computed_tokens:
            # vLLM would look for a hit, and cannot give its blocks to a request that has blocks already.
            request.skip_reading_prefix_cache = True
            self._begun_anew.add(request.request_id)

    def _is_held(self) -> bool:
        """Whether vLLM may have blocks for a request, and refuses to reset its cache."""
        return any(map(_may_hold_blocks, self._live.values()))

    def _put_off(self, request: Request) -> None:
        """Not to be admitted before those that begin anew: vLLM drops the answer that says so where a request wants its
        prompt computed, so that waits as well."""
        if request.skip_reading_prefix_cache:
            request.skip_reading_prefix_cache = False
            self._to_compute.append(request)

    def _end_anew(self, request_id: str) -> None:
        """It was admitted, or has ended; behind the last one those that were put off want their prompts computed."""
        self._begun_anew.discard(request_id)
        if not self._begun_anew:
            for request in self._to_compute:
                request.skip_reading_prefix_cache = True
            self._to_compute.clear()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._local_tokens.pop(request.request_id, None)
        self._live.pop(request.request_id, None)
        self._end_anew(request.request_id)
        self._sessions.forget(request.request_id)
        if self._events is not None:
            self._events.forget(request.request_id)
        if request.status not in _ENDED_WELL:
            self.half.abort_transfer(request.request_id)
        return self.half.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self.half.has_pending_push_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = self.half.take_events()
        return self._events.to_vllm(events) if self._events is not None else ()

    def take_stats(self) -> TieredStats | None:
        half = self.half
        data = self._feed.take(half.get_kv_connector_stats(), half.metrics.histograms, self._tenants)
        return TieredStats(data=data) if data else None

    def reset_cache(self) -> bool:
        done = self.half.reset_cache()
        if not self._is_held():  # or vLLM has kept its own cache, with blocks of old weights
            self._replaced.reset()
        logger.info("kv_connector: the host cache was reset")
        return done

    def shutdown(self) -> None:
        stats = self.half.get_kv_connector_stats()
        logger.info(
            "kv_connector: shut down after %d requests: %d of %d tokens came from the device, %d from the host",
            stats["requests"],
            stats["device_hit_tokens"],
            stats["queries_tokens"],
            stats["host_hit_tokens"],
        )
        self.half.shutdown()


def _may_take_output(request: Request, holds: bool, plans_ahead: bool) -> bool:
    """Whether vLLM may keep the output of a step that has read blocks that were not loaded, for a request that `holds`
    these blocks or has lost them. One that waits and holds them has run in no step since it was admitted. If it was
    preempted before that, the output of earlier steps had come by then or is dropped; older versions that plan ahead do
    not say which."""
    if request.status not in (*_WAITS, RequestStatus.WAITING_FOR_REMOTE_KVS):
        return True
    if hasattr(request, "drop_stale_output"):
        return not holds and not request.drop_stale_output
    return not holds or (plans_ahead and request.num_preemptions > 0)


def _may_hold_blocks(request: Request) -> bool:
    """Whether vLLM may have blocks for a request that has not ended; one that was preempted begins anew."""
    return request.num_computed_tokens > 0 or request.status not in _WAITS
