"""Continuous batching over paged device blocks, with prefix caching, chunked prefill, preemption and abort.

This is the scheduler side of the connector interface as an engine drives it: the calls and their order are those of
vLLM's scheduler. Device blocks are a `CacheTier` of our own index; without a connector it is a prefix cache on the
device alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kv_connector.base import KVConnectorScheduler, ScheduledRequest, SchedulerOutput
from kv_connector.index import BlockState, CacheTier, Event, PrefixTree
from kv_connector.types import StepPlan, StepReport, Tier

from .model import SequenceChunk
from .request import EngineRequest


@dataclass(slots=True)
class Step:
    """What one step computes: `chunks[i]` belongs to `requests[i]`."""

    requests: list[EngineRequest] = field(default_factory=list)
    chunks: list[SequenceChunk] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    loading: list[int] = field(default_factory=list)  # device blocks that this step's loads fill
    plan: StepPlan | None = None


class Scheduler:
    """Owns requests and device blocks. One `schedule` is followed by exactly one `update`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int = 512,
        max_running: int = 16,
        prefix_caching: bool = True,
        tree: PrefixTree | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.tree = tree if tree is not None else PrefixTree()
        self.device = CacheTier(self.tree, Tier.DEVICE, num_blocks)
        self.connector: KVConnectorScheduler | None = None
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.loading: dict[str, EngineRequest] = {}  # waiting for an asynchronous load, aborted ones included
        self.num_preemptions = 0
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._prefix_caching = prefix_caching
        self._clock = clock

    def bind_connector(self, connector: KVConnectorScheduler) -> None:
        """Use a connector from now on; before the first request."""
        self.connector = connector
        connector.bind_block_pool(self.device)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; ValueError where it could never fit."""
        most = request.num_prompt_tokens + request.max_new_tokens
        if self._blocks_for(most) > self.device.pool.capacity:
            raise ValueError(
                f"request {request.request_id} needs {self._blocks_for(most)} device blocks for {most} tokens, "
                f"the pool has {self.device.pool.capacity}: shorten it or give the pool more blocks"
            )
        self.waiting.append(request)
        if self.connector:
            self.connector.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """Drop a request in whatever phase it is, between two steps."""
        if request_id in self.loading and self.connector:
            self.loading[request_id].is_aborted = True
            self.connector.request_finished(self.loading[request_id])
        for request in [r for r in (*self.waiting, *self.running) if r.request_id == request_id]:
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._finish(request)

    def schedule(self) -> Step:
        """Choose what the next step computes, and let the connector plan its copies."""
        step, budget = Step(), self._max_step_tokens
        for request in list(self.running):
            if request in self.running and budget:
                budget -= self._schedule_running(request, budget, step)
        for request in sorted(self.waiting, key=lambda request: not request.has_received):  # holders of blocks first
            if not budget or len(self.running) >= self._max_running or step.preempted:
                break
            scheduled = self._admit(request, budget, step)
            if scheduled is None:
                break
            budget -= scheduled
        self._attach_computed(step)
        if self.connector:
            items = zip(step.requests, step.chunks, step.new_block_ids, strict=True)
            scheduled_requests = [ScheduledRequest(r.request_id, c.start, len(c.token_ids), [n]) for r, c, n in items]
            step.plan = self.connector.build_connector_meta(SchedulerOutput(scheduled_requests, step.preempted))
        return step

    def update(
        self,
        step: Step,
        token_ids: Sequence[int],
        reports: Sequence[StepReport] = (),
        invalid_block_ids: Collection[int] = (),
        draft_token_ids: Sequence[int] | None = None,
        received: Collection[str] = (),
        failed_receiving: Collection[str] = (),
    ) -> list[EngineRequest]:
        """Take in what the step computed; `token_ids[i]` follows `step.chunks[i]`. Returns requests that finished.

        `received`: requests whose asynchronous load has ended on every rank, `failed_receiving` those of them where it
        failed on one.

        Requests that hold an invalid block are computed again: nothing that this step made of them is kept.
        """
        invalid = set(invalid_block_ids)
        self.device.discard(invalid)
        finished = []
        for index, (request, chunk) in enumerate(zip(step.requests, step.chunks, strict=True)):
            if invalid.intersection(request.block_ids):
                self.running.remove(request)
                self._to_waiting(request)
                continue
            request.num_computed_tokens += len(chunk.token_ids)
            self._fill_computed(request, first=chunk.start // self.block_size)
            if request.num_computed_tokens == request.num_tokens:
                request.append(token_ids[index])
                if draft_token_ids is not None:
                    request.draft_token_ids.append(draft_token_ids[index])
        self.device.fill(b for b in step.loading if self.device.state(b) is BlockState.SWAPPING_TO_DEVICE)
        if self.connector:
            self.connector.update_connector_output(reports)
        for request_id in received:
            self._end_receiving(self.loading.pop(request_id), ok=request_id not in failed_receiving)
        for request in [r for r in self.running if r.is_finished]:
            self.running.remove(request)
            self._finish(request)
            finished.append(request)
        return finished

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        pending = self.connector.has_pending_push_work() if self.connector else False
        return bool(self.waiting or self.running or self.loading) or pending

    def reset_cache(self) -> bool:
        """Forget all cached blocks, on the device and behind the connector; running requests keep their own."""
        self.device.reset()
        return self.connector.reset_cache() if self.connector else True

    def _schedule_running(self, request: EngineRequest, budget: int, step: Step) -> int:
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        need = self._blocks_for(request.num_computed_tokens + count) - len(request.block_ids)
        while (new_blocks := self.device.allocate(need)) is None:
            if self.connector and self.connector.has_pending_block_frees():
                return 0
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return 0
        request.block_ids += new_blocks
        self._append(request, count, new_blocks, step)
        return count

    def _admit(self, request: EngineRequest, budget: int, step: Step) -> int | None:
        """Admit a waiting request with what is cached of it; returns the tokens scheduled, None where there is no room.

        0 where the connector asks to wait, and where the request's asynchronous load begins.
        """
        if request.has_received:
            return self._admit_received(request, budget, step)
        local_blocks = self._match_device(request) if self._prefix_caching else []
        num_local = len(local_blocks) * self.block_size
        num_external, is_async = 0, False
        if self.connector:
            matched, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
            if matched is None:
                return 0
            num_external = matched
        computed = num_local + num_external
        count = 0 if is_async else min(request.num_tokens - computed, budget)
        self.device.acquire(local_blocks)
        new_blocks = self.device.allocate(self._blocks_for(computed + count) - len(local_blocks))
        if new_blocks is None:
            self.device.release(local_blocks)
            return None
        self.waiting.remove(request)
        request.block_ids = local_blocks + new_blocks
        request.num_computed_tokens = computed
        request.device_hit_tokens, request.host_hit_tokens = num_local, num_external
        self.tree.touch(self.tree.match(request.block_hashes), self._clock())
        if is_async:
            request.num_attached = len(local_blocks)
            self.loading[request.request_id] = request
        else:
            request.num_attached = computed // self.block_size
            self._attach_cached(request, len(local_blocks), Event.SWAP_IN)
            step.loading += request.block_ids[len(local_blocks) : request.num_attached]
            self.running.append(request)
        if self.connector:
            self.connector.update_state_after_alloc(request, [request.block_ids], num_local, num_external)
        if count:
            self._append(request, count, [], step)
        return count

    def _admit_received(self, request: EngineRequest, budget: int, step: Step) -> int | None:
        """Admit a request whose asynchronous load is complete: its blocks are its own, and matchable from now on."""
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        new_blocks = self.device.allocate(
            self._blocks_for(request.num_computed_tokens + count) - len(request.block_ids)
        )
        if new_blocks is None:
            if not self.running and not step.requests:
                self._make_room(request)
            return None
        self.waiting.remove(request)
        self.running.append(request)
        request.has_received = False
        request.block_ids += new_blocks
        assert self.connector is not None
        self.connector.update_state_after_alloc(request, [request.block_ids], request.num_computed_tokens, 0)
        self._append(request, count, [], step)
        return count

    def _make_room(self, request: EngineRequest) -> None:
        """Requests that hold received blocks and need more must not wait for one another: the last one starts anew."""
        holders = [other for other in self.waiting if other.has_received and other is not request]
        if holders:
            self.waiting.remove(holders[-1])
            self._to_waiting(holders[-1])

    def _end_receiving(self, request: EngineRequest, ok: bool) -> None:
        if request.is_aborted:
            self._release_blocks(request)
        elif not ok:
            self._to_waiting(request)
        else:
            first, request.num_attached = request.num_attached, request.num_computed_tokens // self.block_size
            blocks = self._attach_cached(request, first, Event.SWAP_IN)
            self.device.fill(blocks)
            request.has_received = True
            self.waiting.appendleft(request)

    def _append(self, request: EngineRequest, count: int, new_block_ids: list[int], step: Step) -> None:
        start = request.num_computed_tokens
        step.requests.append(request)
        step.chunks.append(SequenceChunk(request.token_ids[start : start + count], start, list(request.block_ids)))
        step.new_block_ids.append(new_block_ids)

    def _match_device(self, request: EngineRequest) -> list[int]:
        """Device blocks of the longest usable prefix; at least one token is left to compute.

        A block that a load of this very step fills is usable too: the forward pass waits for it all the same.
        """
        blocks: list[int] = []
        for node in self.tree.match(request.block_hashes[: (request.num_tokens - 1) // self.block_size]):
            if self.device.node_state(node) not in (BlockState.RESIDENT, BlockState.SWAPPING_TO_DEVICE):
                break
            blocks += self.device.blocks_of([node])
        return blocks

    def _attach_cached(self, request: EngineRequest, first: int, event: Event) -> list[int]:
        """Blocks that a load fills become copies on the device; returns those that do."""
        nodes = self.tree.insert_path(request.block_hashes[: request.num_attached], self._clock(), first)
        return self._attach(request, first, nodes, event)

    def _attach_computed(self, step: Step) -> None:
        """Blocks that this step completes become copies on the device, matchable once it has run."""
        if not self._prefix_caching:
            return
        for request, chunk in zip(step.requests, step.chunks, strict=True):
            full = (chunk.start + len(chunk.token_ids)) // self.block_size
            first, request.num_attached = request.num_attached, max(full, request.num_attached)
            nodes = self.tree.insert_path(request.block_hashes[:full], self._clock(), first) if full > first else []
            self._attach(request, first, nodes, Event.COMPUTE)

    def _attach(self, request: EngineRequest, first: int, nodes: list[int], event: Event) -> list[int]:
        """A block whose node has a copy on the device already, made by another request, stays private."""
        pairs = [
            (block_id, node)
            for block_id, node in zip(request.block_ids[first:], nodes, strict=False)
            if self.device.node_state(node) is BlockState.ABSENT
        ]
        attached = [block_id for block_id, _ in pairs]
        self.device.attach(attached, [node for _, node in pairs], event)
        return attached

    def _fill_computed(self, request: EngineRequest, first: int) -> None:
        """Blocks from `first` on that the step has completed are resident now."""
        blocks = request.block_ids[first : request.num_computed_tokens // self.block_size]
        self.device.fill(b for b in blocks if self.device.state(b) is BlockState.COMPUTING)

    def _preempt(self, request: EngineRequest, step: Step) -> None:
        """Take the request's blocks; what it has scheduled in this step is undone."""
        self.running.remove(request)
        if request in step.requests:
            index = step.requests.index(request)
            del step.requests[index], step.chunks[index], step.new_block_ids[index]
        step.preempted.append(request.request_id)
        self.num_preemptions += 1
        self._to_waiting(request)

    def _to_waiting(self, request: EngineRequest) -> None:
        self._release_blocks(request)
        request.num_computed_tokens = 0
        request.has_received = False
        self.waiting.appendleft(request)

    def _finish(self, request: EngineRequest) -> None:
        if self.connector:
            _, request.transfer = self.connector.request_finished(request)
        self.tree.touch(self.tree.match(request.block_hashes), self._clock())
        self._release_blocks(request)

    def _release_blocks(self, request: EngineRequest) -> None:
        self.device.release(request.block_ids)
        request.block_ids = []
        request.num_attached = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
