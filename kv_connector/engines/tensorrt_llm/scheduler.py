"""The scheduler of the slot: TensorRT-LLM's calls on rank 0, translated. Every decision is made in the scheduler half.

    TensorRT-LLM calls                         what follows                                     blocks
    ------------------------------------------------------------------------------------------------------------------
    get_num_new_matched_tokens   allocation    get_num_new_matched_tokens                       offered: host leased
    update_state_after_alloc     allocated     update_state_after_alloc                         leased for the load
    build_connector_meta         batch         build_connector_meta: the plan is the metadata   the jobs
    (the worker of rank 0)       get_finished  update_connector_output                          ended jobs let go
    request_finished             end           request_finished; held while copies use blocks   TensorRT-LLM's
    request_reset                replay        request_finished; the next step waits for copies TensorRT-LLM's
    (blocks given to another)    abort, error  the same

Of a request that is canceled, or answered with an error, nothing is said, and its blocks are free at once. It is found
out when another is given one of them.

A question is answered at once and once: there is no "ask again", and a request is allocated before storage could say
anything. What that has is fetched for those that come later (`_seek`). Loads are those of the step that needs them,
never in the background: a request that is parked for a load that fails could neither be computed nor be given up
(`worker` says what becomes of a load that fails).
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ...base import KVConnectorScheduler, SchedulerOutput
from ...build import build_scheduler
from ...errors import ConfigError, KVConnectorError
from ...index import CacheIdentity
from ...types import StepPlan, StepReport
from .identity import PromptHasher, is_named, read_identity
from .launch import read_block_size, read_settings, refuse_unsupported
from .ranks import Ranks, meeting_place
from .requests import LiveRequest, SoughtPrefix, UsedBlocks

logger = logging.getLogger("kv_connector.tensorrt_llm")

_MOST_SOUGHT = 64
"""Prefixes that are looked for in storage at a time."""


class TieredKVScheduler:
    """Decides what is loaded and saved. TensorRT-LLM makes one, on rank 0, and calls it from the executor's thread."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError for settings that are not supported."""
        config = read_settings()
        refuse_unsupported(llm_args)
        self._llm_args = llm_args
        self._block_size = size = read_block_size(llm_args)
        ranks = Ranks(llm_args)
        identity = read_identity(llm_args, size, ranks.count) if config.storage is not None else None
        self._hasher = PromptHasher(identity or CacheIdentity(str(llm_args.model), "", "", size), size)
        self._half = build_scheduler(
            config, size, ranks.count, unpins_when_idle=False, publishes_events=False, identity=identity
        )
        self._used = UsedBlocks()
        self._half.bind_block_pool(self._used)
        self._live: dict[int, LiveRequest] = {}
        self._holders: dict[int, tuple[int, int]] = {}  # by block, request and allocation that it was given to last
        self._allocations = itertools.count()
        self._held: dict[int, list[int]] = {}  # blocks of requests that have ended, by request
        self._seeks = itertools.count()
        self._sought: deque[SoughtPrefix] = deque()
        self._has_lost_blocks = False  # since the last plan: the next step may write what copies use
        self._place = meeting_place(llm_args)
        self._place.scheduler = self
        # TensorRT-LLM does not say when it ends.
        self._close = weakref.finalize(self, _close, self._half)

    def wait_for_initialization(self) -> None:
        """All is there."""

    # Allocation.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens behind those that the device has, whose blocks are leased on the host from now on; in whole blocks."""
        live = self._begin(request)
        if not is_named(request):
            return 0, False
        self._seek(live)
        found, _ = self._half.get_num_new_matched_tokens(live, num_computed_tokens)
        live.num_local, live.num_offered = num_computed_tokens, found or 0
        if live.num_offered:
            first, end = num_computed_tokens // self._block_size, (num_computed_tokens + live.num_offered)
            nodes = self._half.tree.match(live.block_hashes[: end // self._block_size])
            live.offered_ids = self._half.host.blocks_of(nodes[first:])
            self._half.host.acquire(live.offered_ids)
        return live.num_offered, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The request has these blocks, of the prompt as far as it is allocated."""
        self._allocated(request, block_ids, is_whole_prompt=True)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """The same by TensorRT-LLM's second cache manager, which allocates chunk by chunk and may use less than was
        offered."""
        self._allocated(request, _only_group(block_ids_by_layer_group), is_whole_prompt=False)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Tokens that were offered will be computed, or nobody wants them any more. Where it has blocks they are loaded
        nevertheless, in front of that; where all of the offer is meant it may have ended, and is forgotten."""
        live = self._live.get(request.request_id)
        if live is not None and not live.block_ids and start <= live.num_local:
            self._lose(request.request_id)

    def request_reset(self, request: Any) -> None:
        """Its blocks are gone, and it will ask anew."""
        live = self._live.get(request.request_id)
        if live is not None:
            self._lose(request.request_id)
            self._has_lost_blocks |= bool(live.block_ids)

    # Each step.

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """The plan of the step, for every rank's worker."""
        data = (*scheduler_output.new_requests, *scheduler_output.cached_requests)
        scheduled = []
        for item in data:
            live = self._live.get(item.request_id)
            if live is None:
                continue
            share = live.scheduled(item)
            self._give(item.request_id, share.new_block_ids[0])
            if live.is_named:
                scheduled.append(share)
        plan = self._half.build_connector_meta(SchedulerOutput(scheduled))
        lost, self._has_lost_blocks = self._has_lost_blocks, False
        # Nobody has kept them for copies under way.
        return replace(plan, fence=True) if lost else plan

    def take_reports(self, reports: Sequence[StepReport]) -> None:
        """By the worker of rank 0: what the ranks have said of their steps."""
        self._half.update_connector_output(reports)

    @property
    def is_busy(self) -> bool:
        """Whether reports are awaited."""
        return self._half.has_pending_push_work()

    # The end of requests.

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Whether its blocks are to be kept until `take_saved` names it."""
        live = self._live.pop(request.request_id, None)
        if live is None:
            return False
        self._withdraw_offer(live)
        self._half.request_finished(live)
        block_ids = [block_id for block_id in {*live.block_ids, *cache_block_ids} if block_id >= 0]
        if not self._used.any_of(block_ids):
            return False
        self._held[request.request_id] = block_ids
        return True

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """The same by TensorRT-LLM's second cache manager."""
        return self.request_finished(request, _only_group(cache_block_ids_by_layer_group))

    def take_saved(self, request_ids: Collection[int]) -> list[int]:
        """By the worker of rank 0: those of these requests that need not be held any more."""
        free = [i for i in request_ids if not self._used.any_of(self._held.get(i, ()))]
        for request_id in free:
            self._held.pop(request_id, None)
        return free

    # What an operator asks.

    def reset_cache(self) -> bool:
        """Forget all that is cached behind the device, between two iterations. False while requests are being
        allocated: ask again. TensorRT-LLM does not call it, whatever it does to its weights."""
        if any(live.offered_ids for live in self._live.values()):
            return False
        return self._half.reset_cache()

    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start, by name; the unit is in the name."""
        return dict(self._half.get_kv_connector_stats())

    def shutdown(self) -> None:
        """Idempotent; also done when the process ends."""
        self._close()

    def _begin(self, request: Any) -> LiveRequest:
        """A request asks once for each allocation: what is known of it is of one that is gone."""
        self.request_reset(request)
        token_ids = list(request.get_tokens(0))
        live = LiveRequest(str(request.request_id), token_ids, self._hasher.start(request))
        live.allocation = next(self._allocations)
        self._live[request.request_id] = live
        return live

    def _seek(self, live: LiveRequest) -> None:
        """The prefix is looked for in storage, as that of a request which waits for it; the last few of these do."""
        sought = SoughtPrefix(f"storage {next(self._seeks)}", live.num_tokens, tuple(live.block_hashes))
        self._half.on_new_request(sought)
        self._sought.append(sought)
        if len(self._sought) > _MOST_SOUGHT:
            self._half.request_finished(self._sought.popleft())

    def _allocated(self, request: Any, block_ids: list[int], is_whole_prompt: bool) -> None:
        live = self._live.get(request.request_id)
        if live is None:
            live = self._begin(request)
        if live.block_ids or not block_ids:
            return  # the step tells of those that come later
        if min(block_ids) < 0:
            raise KVConnectorError(f"request {live.request_id} has a sliding window, which is not supported")
        size = self._block_size
        if is_whole_prompt and len(block_ids) < -(-live.num_tokens // size):
            raise ConfigError(
                f"{len(block_ids)} blocks hold the {live.num_tokens} tokens of request {live.request_id}, so they are "
                f"larger than kv_cache_config.tokens_per_block={size}: give the size that the model's attention uses"
            )
        live.block_ids, live.is_whole_prompt, live.is_named = list(block_ids), is_whole_prompt, is_named(request)
        self._give(request.request_id, block_ids[live.num_local // size :])
        num_covered = max(0, len(block_ids) - live.num_local // size) * size
        self._half.update_state_after_alloc(live, [block_ids], live.num_local, min(live.num_offered, num_covered))
        self._withdraw_offer(live)

    def _give(self, request_id: int, block_ids: Sequence[int]) -> None:
        """The request was given blocks that it will write. Whoever had them before has ended, and nobody has kept them
        for copies under way."""
        self._has_lost_blocks |= self._used.any_of(block_ids)
        own = request_id, self._live[request_id].allocation
        for holder_id, allocation in {self._holders.get(block_id, own) for block_id in block_ids} - {own}:
            holder = self._live.get(holder_id)
            if holder is not None and holder.allocation == allocation:
                self._lose(holder_id)
        self._holders |= dict.fromkeys(block_ids, own)

    def _lose(self, request_id: int) -> None:
        """Its blocks are gone. If it is replayed, that is another allocation, with hashes of its own."""
        live = self._live.pop(request_id)
        self._withdraw_offer(live)
        self._half.request_finished(live)

    def _withdraw_offer(self, live: LiveRequest) -> None:
        """The load's own lease has taken over, or nobody wants it any more."""
        self._half.host.release(live.offered_ids)
        live.offered_ids = []


def _close(half: KVConnectorScheduler) -> None:
    logger.info("kv_connector: %s", dict(half.get_kv_connector_stats()))
    half.shutdown()


def _only_group(by_layer_group: list[list[int]]) -> list[int]:
    if len(by_layer_group) != 1:
        raise ConfigError(
            f"models with {len(by_layer_group)} groups of layers are not supported yet, only one of full attention is: "
            "start without kv_connector_config"
        )
    return by_layer_group[0]
