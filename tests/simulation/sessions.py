"""Streaming input, after vLLM 0.32's `resumable` requests: at its end a session keeps its blocks and waits for more.

It goes on behind what is computed of it (the last token that was sampled is not, and is dropped) and is admitted with
the blocks that it has; nobody looks it up. Outputs of steps that were under way at its end are dropped.
"""

from __future__ import annotations

from .model import Oracle
from .requests import SimulatedRequest, Status


class Sessions:
    """Those that wait for input. The scheduler model alone calls."""

    def __init__(self, block_size: int) -> None:
        self.idle: list[SimulatedRequest] = []
        self._block_size = block_size

    def stop(self, request: SimulatedRequest) -> None:
        """A running session has come to the end of its outputs."""
        computed = min(request.num_computed_tokens - request.num_placeholders, request.num_tokens)
        request.num_computed_tokens = computed
        request.num_drafts = request.num_placeholders = 0
        request.drops_stale, request.num_stale = True, request.num_in_flight
        request.status = Status.IDLE
        self.idle.append(request)

    def go_on(self, request: SimulatedRequest, tokens: list[int], outputs: int) -> None:
        """There is more input."""
        self.idle.remove(request)
        computed = request.num_computed_tokens
        request.tokens = request.tokens[:computed] + tokens
        del request.hasher.hashes[computed // self._block_size :]
        request.hasher.update(request.tokens)
        request.oracle = Oracle(request.oracle.shape, request.oracle.epoch, request.tokens)
        request.num_prompt_tokens, request.max_tokens = request.num_tokens, outputs
        request.status = Status.WAITING
