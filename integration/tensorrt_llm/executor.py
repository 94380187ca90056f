"""The loop of one rank: ten steps an iteration, as TensorRT-LLM's PyTorch executor has them, with overlap or without.

    1 schedule      2 prepare resources: match, ask the connector, allocate     3 build the scheduler's output
    4 park loads    5 metadata to all ranks    6 start_load_kv    7 forward, with hooks around each layer
    8 wait_for_save    9 finished requests: request_finished, responses    10 get_finished

A request that is canceled, or answered with an error, is freed behind step 9, and the connector is told nothing of it.
With overlap the results of a step are taken in after the next one was launched. An idle loop stands still until
somebody asks something. An error of the forward pass answers all active requests; with overlap it then ends the loop.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from integration.mini_engine.model import PagedLlama, SequenceChunk

from .blocks import KVCacheManager, LlmRequest, State
from .collectives import World, mpi_broadcast
from .connector_manager import ConnectorManager


@dataclass(frozen=True)
class Options:
    """evicts: more is admitted than there are blocks for, and requests are replayed, as under MAX_UTILIZATION."""

    num_blocks: int = 64
    tokens_per_block: int = 16
    max_num_tokens: int = 128
    max_batch_size: int = 16
    overlap: bool = False
    evicts: bool = False


@dataclass(frozen=True)
class Response:
    """To one request. `token_ids` is None where it was given up."""

    request: LlmRequest
    token_ids: Sequence[int] | None
    error: str = ""


@dataclass(frozen=True)
class Hooks:
    """Around each decoder layer."""

    manager: ConnectorManager
    layers: dict[str, int]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before it."""
        self.manager.worker.wait_for_layer_load(self.layers[layer_name], None)

    def save_kv_layer(self, layer_name: str) -> None:
        """After it."""
        self.manager.worker.save_kv_layer(self.layers[layer_name], None)


_Results = list[tuple[LlmRequest, int]]
"""Requests and the token that follows what was computed of them: -1 where a prompt is not computed to its end."""


class Executor:
    """Every rank decides alike: what comes in is told to all, and tokens are those of rank 0."""

    def __init__(
        self, world: World, rank: int, model: PagedLlama, options: Options, respond: Callable[[Response], None]
    ) -> None:
        self.rank = rank
        self.incoming: queue.Queue[tuple[str, Any]] = queue.Queue()  # of rank 0
        self.kv = KVCacheManager(options.num_blocks, options.tokens_per_block)
        self.manager: ConnectorManager | None = None
        self._world = world
        self._model = model
        self._options = options
        self._respond = respond
        self._active: list[LlmRequest] = []
        self._previous: _Results = []
        self.pool, self._caches = _allocate(model, options)

    def connect(self, worker: Any, scheduler: Any) -> None:
        """Use this connector; before the first request."""
        self.manager = ConnectorManager(worker, scheduler)
        worker.register_kv_caches(self.pool)

    def iterate(self) -> bool:
        """One iteration; False where the engine is told to stop."""
        for kind, value in mpi_broadcast_by_reference(self._world, self.rank, self._take_incoming()):
            if kind == "stop":
                return False
            self._take(kind, value)
        batch = self._schedule()
        if batch:
            self._prepare(batch)
            if self.manager is not None:
                batch = self.manager.start_batch(batch)
        error = ""
        results: _Results = []
        if batch:
            try:
                results = self._forward(batch)
            except Exception as raised:  # noqa: BLE001 - as the engine does it
                error = str(raised)
                self._answer_all(error)
        if self._options.overlap:
            assert not error, "Sampling failed"
            results, self._previous = self._previous, results
        self._update(results)
        if self.manager is not None:
            for request in self.manager.get_finished():
                self.kv.free(request)
        return True

    def _take_incoming(self) -> list[tuple[str, Any]]:
        if self.rank:
            return []
        items = [] if self._active else [self.incoming.get()]
        while not self.incoming.empty():
            items.append(self.incoming.get())
        return items

    def _take(self, kind: str, value: Any) -> None:
        if kind == "request":
            request_id, token_ids, max_new_tokens, cache_salt = value
            self._active.append(LlmRequest(request_id, list(token_ids), max_new_tokens, cache_salt))
        elif kind == "cancel":
            for request in self._active:
                request.is_canceled |= request.request_id == value
        else:
            value(self)

    def _schedule(self) -> list[LlmRequest]:
        """The batch: those that generate, then prompts, or parts of them, that there are tokens and blocks for."""
        options, has_reset = self._options, False
        running = [r for r in self._active if r.state is State.GENERATION_IN_PROGRESS and not r.will_complete]
        if options.evicts:
            has_reset = self._make_room(running)
        batch, budget = running[: options.max_batch_size], options.max_num_tokens - len(running)
        admitted: list[LlmRequest] = []
        for request in self._active:
            if request.state is not State.CONTEXT_INIT or has_reset:
                continue
            if len(batch) >= options.max_batch_size or not self._has_room(request, admitted):
                break
            chunk = min(request.context_remaining_length, budget)
            if chunk < request.context_remaining_length:
                chunk -= chunk % options.tokens_per_block
            if chunk <= 0:
                break
            request.context_chunk_size = chunk
            budget -= chunk
            batch.append(request)
            if not request.block_ids:
                admitted.append(request)
        return batch

    def _has_room(self, request: LlmRequest, admitted: Sequence[LlmRequest]) -> bool:
        """For all that it may become, beside all that those may which were let in before; or for their prompts now."""
        if request.block_ids:
            return True
        others = [r for r in self._active if r.block_ids and r not in admitted]
        if self._options.evicts:
            needed = sum(self.kv.blocks_for(r.prompt_len) for r in (*admitted, request))
            return needed + len(others) <= self.kv.num_free
        reserved = sum(self._most_blocks(r) - len(r.block_ids) for r in (*others, *admitted, request))
        return reserved <= self.kv.num_free

    def _most_blocks(self, request: LlmRequest) -> int:
        return self.kv.blocks_for(request.num_asked + request.max_new_tokens)

    def _make_room(self, running: list[LlmRequest]) -> bool:
        """Blocks for the next token of each, from those that came last; whether some were replayed."""
        has_reset = False
        for request in list(running):
            while request in running and not self.kv.extend(request, len(request.device_tokens)):
                self._reset(running.pop())
                has_reset = True
        return has_reset

    def _reset(self, request: LlmRequest) -> None:
        if self.manager is not None:
            self.manager.reset_request(request)
        self.kv.free(request)
        request.state, request.context_current_position = State.CONTEXT_INIT, 0
        request.prompt_len = len(request.tokens)
        request.num_reset += 1

    def _prepare(self, batch: Sequence[LlmRequest]) -> None:
        admitted = [r for r in batch if r.state is State.CONTEXT_INIT and not r.block_ids]
        for request in admitted:
            num_reused = self.kv.match(request)
            num_matched = 0
            if self.manager is not None:
                num_matched = self.manager.get_num_new_matched_tokens(request, num_reused)
            if not request.num_reset:
                request.num_reused, request.num_matched = num_reused, num_matched
            request.context_current_position = num_reused + num_matched
            request.context_chunk_size = min(request.context_chunk_size, request.context_remaining_length)
            assert self.kv.extend(request, request.prompt_len), "the scheduler has let in too many"
        for request in admitted if self.manager is not None else ():
            self.manager.update_state_after_alloc(request)
        for request in batch:
            if request.state is State.GENERATION_IN_PROGRESS:
                assert self.kv.extend(request, len(request.device_tokens)), "blocks that were reserved are there"

    def _forward(self, batch: Sequence[LlmRequest]) -> _Results:
        """Rank 0 computes for all ranks, on each one's cache and with each one's hooks."""
        chunks = []
        for request in batch:
            start, count = len(request.device_tokens) - 1, 1
            if request.state is State.CONTEXT_INIT:
                start, count = request.context_current_position, request.context_chunk_size
            tokens = request.device_tokens[start : start + count]
            chunks.append(SequenceChunk(tokens, start, list(request.block_ids)))
        layers = {name: i for i, name in enumerate(self._caches)}
        own = self._caches, None if self.manager is None else Hooks(self.manager, layers)
        ranks = self._world.allgather(self.rank, own)
        computed: tuple[list[int], str] = [], ""
        if not self.rank:
            hooks = [hooks for _, hooks in ranks if hooks is not None]
            computed = self._compute(chunks, [caches for caches, _ in ranks], hooks)
        token_ids, error = mpi_broadcast(computed)
        if error:
            raise RuntimeError(error)
        if self.manager is not None:
            self.manager.worker.wait_for_save(None)
        results = []
        for request, token_id in zip(batch, token_ids, strict=True):
            if request.state is State.CONTEXT_INIT:
                request.context_current_position += request.context_chunk_size
            if request.context_remaining_length <= 0:
                request.state = State.GENERATION_IN_PROGRESS
                request.device_tokens.append(token_id)
                results.append((request, token_id))
            else:
                results.append((request, -1))
        return results

    def _compute(
        self, chunks: Sequence[SequenceChunk], caches: Sequence[Any], hooks: Sequence[Hooks]
    ) -> tuple[list[int], str]:
        """The tokens, or what every rank fails with."""
        logits, _ = self._model.forward(chunks, caches, self._options.tokens_per_block, hooks)
        return logits.argmax(-1).tolist(), ""

    def _update(self, results: _Results) -> None:
        """Take in what a step has computed; answer whoever has ended, or was given up."""
        for request, token_id in results:
            if token_id < 0 or request not in self._active:
                continue
            is_prompt = len(request.tokens) == request.prompt_len
            request.tokens.append(token_id)
            if is_prompt:
                self.kv.store(request)
            if len(request.output) >= request.max_new_tokens:
                request.state = State.GENERATION_COMPLETE
        for request in list(self._active):
            if request.is_canceled and request.state is not State.LOADING:
                self._end(request, Response(request, None, "canceled"))
            elif request.state is State.GENERATION_COMPLETE:
                self._end(request, Response(request, request.output))

    def _answer_all(self, error: str) -> None:
        for request in list(self._active):
            self._end(request, Response(request, None, error))

    def _end(self, request: LlmRequest, response: Response) -> None:
        self._active.remove(request)
        if request.block_ids:
            has_finished = response.token_ids is not None  # else the connector is not told
            is_held = has_finished and self.manager is not None and self.manager.request_finished(request)
            self.kv.store(request)
            if not is_held:
                self.kv.free(request)
        if not self.rank:
            self._respond(response)


def _allocate(model: PagedLlama, options: Options) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The cache as the engine shows it, (blocks, layers, 2 or for MLA 1, elements), and as the model takes it."""
    shape, names = model.config.cache_shape, model.config.layer_names
    heads = (shape.head_dim,) if shape.key_only else (shape.num_heads, shape.head_dim)
    block = (options.tokens_per_block, *heads) if shape.key_only else (2, options.tokens_per_block, *heads)
    kv_factor = 1 if shape.key_only else 2
    pool = torch.zeros(options.num_blocks, len(names), kv_factor, math.prod(block) // kv_factor, dtype=model.dtype)
    return pool, {name: pool[:, i].view(options.num_blocks, *block) for i, name in enumerate(names)}


def mpi_broadcast_by_reference(world: World, rank: int, value: Any) -> Any:
    """What tests hand to the ranks may be functions."""
    return world.allgather(rank, value)[0]
