"""Requests of TensorRT-LLM as the scheduler half reads them, and the device blocks that copies use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base import ScheduledRequest
from ...index import BlockHasher
from ...types import BlockHash


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One allocation of a request, from the question what can be loaded of it on: see `base.Request`. Where its blocks
    are taken and it is replayed, that is another.

    num_local: tokens that the device had. num_offered: tokens behind those that can be loaded, of which the host blocks
    `offered_ids` are leased until they are. block_ids: the blocks that it was given first.
    """

    request_id: str
    token_ids: list[int]
    hasher: BlockHasher
    kv_transfer_params: Any = None
    num_local: int = 0
    num_offered: int = 0
    offered_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    is_whole_prompt: bool = True  # `block_ids` are those of the prompt, and all that was offered is used
    is_named: bool = True  # its hashes cover all that decides its blocks: they may be saved
    allocation: int = 0  # which one: a request that is replayed has several
    _num_reported_tokens: int = 0
    _num_reported_blocks: int = 0

    def __post_init__(self) -> None:
        self.hasher.update(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Those that are known: with the overlap scheduler the newest is not."""
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Of the full blocks among them."""
        return self.hasher.hashes

    def scheduled(self, data: Any) -> ScheduledRequest:
        """Its share of the next step. `data`: TensorRT-LLM's RequestData, which tells all tokens and blocks at first
        and then what is new.

        The position in the first of them is that of the device's hits, and how much of an offer is used is told where
        the prompt has all its blocks at once alone. Elsewhere a step counts as ending too soon, and the next one tells.
        """
        is_first = not self._num_reported_blocks
        self._num_reported_tokens += len(data.new_tokens)
        num_new = self._num_reported_tokens - len(self.token_ids)
        if num_new > 0:
            self.token_ids += data.new_tokens[-num_new:]
            self.hasher.update(self.token_ids)
        num_known = max(0, len(self.block_ids) - self._num_reported_blocks)
        self._num_reported_blocks += len(data.new_block_ids)
        num_used = self.num_offered if is_first and self.is_whole_prompt else 0
        return ScheduledRequest(
            self.request_id,
            data.computed_position + num_used,
            data.num_scheduled_tokens,
            [list(data.new_block_ids[num_known:])],
        )


@dataclass(frozen=True, slots=True)
class SoughtPrefix:
    """What storage is asked about on behalf of a request, and outlives it: see `base.Request`."""

    request_id: str
    num_tokens: int
    block_hashes: Sequence[BlockHash]
    kv_transfer_params: Any = None


class UsedBlocks:
    """Device blocks that copies read or write; see `base.DeviceBlocks`. TensorRT-LLM tells nobody which blocks it will
    hand out next, and has no call that keeps one: a request that has ended is held as long as copies use its blocks."""

    num_available = 0
    """Nobody asks: loads are given their blocks with the request."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()

    def any_of(self, block_ids: Collection[int]) -> bool:
        """Whether copies use some of these."""
        return any(block_id in self._count for block_id in block_ids)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Copies begin."""
        self._count.update(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Copies have ended."""
        self._count.subtract(block_ids)
        for block_id in block_ids:
            if not self._count[block_id]:
                del self._count[block_id]

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        """Nothing: TensorRT-LLM does not tell."""
        return ()

    def forget(self, block_ids: Collection[int]) -> None:
        """Does nothing: after a failed load no step computes any more, see `worker.TieredKVWorker`."""
