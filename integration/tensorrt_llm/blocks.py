"""Requests and device blocks as TensorRT-LLM's first cache manager has them: blocks are found by the tokens in them.

Like the engine's, it keeps the blocks of whatever request ends, by the request's tokens, and trusts that they were
computed; also where the forward pass has failed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_connector.index import BlockHasher, CacheIdentity, root_hash
from kv_connector.types import BlockHash


class State(Enum):
    """Of a request, as the executor sees it."""

    CONTEXT_INIT = "context"
    GENERATION_IN_PROGRESS = "generation"
    GENERATION_COMPLETE = "complete"
    LOADING = "loading"  # DISAGG_GENERATION_TRANS_IN_PROGRESS
    SAVING = "saving"  # DISAGG_CONTEXT_TRANS_IN_PROGRESS


@dataclass(eq=False)
class LlmRequest:
    """One request. `tokens` are those that the host knows; with overlap the device is one ahead (`device_tokens`)."""

    request_id: int
    tokens: list[int]
    max_new_tokens: int
    cache_salt: str | None = None
    state: State = State.CONTEXT_INIT
    block_ids: list[int] = field(default_factory=list)
    context_current_position: int = 0
    context_chunk_size: int = 0
    device_tokens: list[int] = field(default_factory=list)
    num_matched: int = 0  # that the connector has brought
    num_reused: int = 0  # that the device had
    num_reset: int = 0
    is_canceled: bool = False

    def __post_init__(self) -> None:
        self.device_tokens = list(self.tokens)
        self.prompt_len = len(self.tokens)  # of what is computed at once; with what was generated, once replayed
        self.num_asked = len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        """Those that the host knows."""
        assert beam == 0
        return list(self.tokens)

    @property
    def context_remaining_length(self) -> int:
        """Of the prompt, to be computed."""
        return self.prompt_len - self.context_current_position

    @property
    def output(self) -> list[int]:
        """What was generated, as the host knows it."""
        return self.tokens[self.num_asked :]

    @property
    def will_complete(self) -> bool:
        """Whether all tokens are on their way."""
        return len(self.device_tokens) - self.num_asked >= self.max_new_tokens


class KVCacheManager:
    """Device blocks: held by requests, or cached and the next to go, the least recently used first."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that are cached among them."""
        return len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """How many it takes."""
        return -(-num_tokens // self.tokens_per_block)

    def match(self, request: LlmRequest) -> int:
        """Hold the cached blocks of the longest prefix, with a token left to compute; returns its length."""
        hashes = self._hashes(request, request.prompt_len - 1)
        for name in hashes:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            self._hold(block_id)
            request.block_ids.append(block_id)
        return len(request.block_ids) * self.tokens_per_block

    def extend(self, request: LlmRequest, num_tokens: int) -> bool:
        """Give the request blocks for so many tokens; False, and nothing has changed, where there are too few."""
        num_new = max(0, self.blocks_for(num_tokens) - len(request.block_ids))
        if num_new > len(self._idle):
            return False
        for _ in range(num_new):
            block_id, _ = self._idle.popitem(last=False)
            self._forget(block_id)
            self._references[block_id] = 1
            request.block_ids.append(block_id)
        return True

    def store(self, request: LlmRequest) -> None:
        """Later requests find the full blocks among its tokens, but for the last token, which is not computed."""
        hashes = self._hashes(request, len(request.tokens) - 1)
        for name, block_id in zip(hashes, request.block_ids, strict=False):
            if name not in self._block_of:
                self._forget(block_id)
                self._block_of[name], self._hash_of[block_id] = block_id, name

    def free(self, request: LlmRequest) -> None:
        """The request holds none any more; its tails go first."""
        for block_id in reversed(request.block_ids):
            self._references[block_id] -= 1
            if not self._references[block_id]:
                self._idle[block_id] = None
        request.block_ids = []

    def reset(self) -> None:
        """Nothing is found any more."""
        self._block_of.clear()
        self._hash_of.clear()

    def check_idle(self) -> None:
        """Nobody holds a block."""
        assert len(self._idle) == self.num_blocks, f"{self.num_blocks - len(self._idle)} blocks are held"
        assert not any(self._references)

    def _hold(self, block_id: int) -> None:
        self._references[block_id] += 1
        self._idle.pop(block_id, None)

    def _forget(self, block_id: int) -> None:
        name = self._hash_of.pop(block_id, None)
        if name is not None:
            del self._block_of[name]

    def _hashes(self, request: LlmRequest, num_tokens: int) -> Sequence[BlockHash]:
        root = root_hash(CacheIdentity("device", "", "", self.tokens_per_block), salt=request.cache_salt)
        return BlockHasher(self.tokens_per_block, root).update(request.tokens[:num_tokens])
