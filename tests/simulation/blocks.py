"""The device blocks of an engine's requests, after vLLM's `KVCacheManager`: tables, prefix hits, deferred frees."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kv_connector.types import BlockHash

from .config import EngineConfig
from .pool import NULL_BLOCK, BlockPool
from .requests import SimulatedRequest


class RequestBlocks:
    """Fills and empties `SimulatedRequest.tables`; the scheduler model alone calls.

    `num_planned` and `num_processed` count steps that compute something: blocks that a step under way may write to
    return to the pool when that step is processed, where the engine defers frees.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self.num_planned = 0
        self.num_processed = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()

    def processed(self) -> None:
        """A step that computes something is over."""
        self.num_processed += 1
        self._drain()

    def find_hit(self, request: SimulatedRequest) -> tuple[list[list[int]], int]:
        """The longest prefix that every group has, at least one token less than all; its blocks, by group."""
        hashes: Sequence[BlockHash] = request.block_hashes[: (request.num_tokens - 1) // self._config.block_size]
        if request.is_private:
            hashes = []
        end = len(hashes)
        windows = self._config.window_blocks
        found: list[list[int | None]] = []
        for group, window in enumerate(windows):
            blocks: list[int | None] = []
            for block_hash in hashes[:end]:
                block = self._pool.find(block_hash, group)
                if block is None and window is None:
                    break
                blocks.append(block)
            end = min(end, len(blocks))
            found.append(blocks)
        for _ in range(end + 1):
            fitted = end
            for group, window in enumerate(windows):
                if window is not None:
                    missing = [i for i in range(max(0, fitted - window), fitted) if found[group][i] is None]
                    while missing:
                        fitted = missing[-1]
                        missing = [i for i in range(max(0, fitted - window), fitted) if found[group][i] is None]
            if fitted == end:
                break
            end = fitted
        hit = []
        for group, window in enumerate(windows):
            first = 0 if window is None else max(0, end - window)
            hit.append([NULL_BLOCK] * first + [block for block in found[group][first:end] if block is not None])
        return hit, end * self._config.block_size

    def admit(
        self,
        request: SimulatedRequest,
        count: int,
        ahead: int,
        hit: list[list[int]] | None,
        num_local: int,
        num_external: int,
        is_async: bool,
        reserved: int,
    ) -> list[list[int]] | None:
        """As `allocate_slots` for a waiting request: all of it must fit."""
        size = self._config.block_size
        total = (request.num_computed_tokens or num_local) + num_external
        fresh = hit is not None
        tables = hit if hit is not None else request.tables
        whole = max(request.num_tokens, total + count + ahead)
        need = num_idle = 0
        kept: list[list[int]] = []
        for group, table in enumerate(tables):
            skipped = self._num_skipped(group, total) if fresh else 0
            kept.append([NULL_BLOCK if i < skipped else block for i, block in enumerate(table)])
            num_idle += sum(self._pool.refs[block] == 0 for block in kept[-1] if block) if fresh else 0
            need += max(0, -(-whole // size) - max(len(table), skipped))
        if need + num_idle > self._pool.num_free - reserved:
            return None
        if fresh:
            for table in kept:
                self._pool.touch(table)
            request.tables = kept
            request.num_named = [len(table) for table in kept]
        new = []
        for group, table in enumerate(request.tables):
            target = -(-(total + count + ahead) // size)
            skipped = self._num_skipped(group, total) if fresh else 0
            nulls = max(0, min(skipped, target) - len(table))
            blocks = [NULL_BLOCK] * nulls + self._pool.allocate(max(0, target - len(table) - nulls))
            table += blocks
            new.append(blocks)
        if not is_async:
            self.name(request, min(total + count, request.num_tokens))
        return new

    def allocate(self, request: SimulatedRequest, count: int, ahead: int) -> list[list[int]] | None:
        """As `allocate_slots` for a running request; None where there is no room."""
        self._drop_skipped(request)
        target = -(-(request.num_computed_tokens + count + ahead) // self._config.block_size)
        needs = [max(0, target - len(table)) for table in request.tables]
        if sum(needs) > self._pool.num_free:
            return None
        new = [self._pool.allocate(need) for need in needs]
        for table, blocks in zip(request.tables, new, strict=True):
            table += blocks
        self.name(request, min(request.num_computed_tokens + count, request.num_tokens))
        return new

    def _drop_skipped(self, request: SimulatedRequest) -> None:
        """Blocks that slid out of the window of every step that is not processed."""
        for group, table in enumerate(request.tables):
            skipped = self._num_skipped(group, max(0, request.num_computed_tokens - request.num_in_flight))
            freed = []
            for index in range(min(skipped, len(table)) - 1, -1, -1):
                if table[index] == NULL_BLOCK:
                    break
                freed.append(table[index])
                table[index] = NULL_BLOCK
            self._pool.free(freed)

    def name(self, request: SimulatedRequest, num_tokens: int) -> None:
        """Its blocks that are full by so many tokens can be matched."""
        full = min(num_tokens // self._config.block_size, len(request.block_hashes))
        if request.is_private:
            return
        for group, table in enumerate(request.tables):
            for index in range(request.num_named[group], full):
                if table[index] != NULL_BLOCK:
                    self._pool.name(table[index], request.block_hashes[index], group)
            request.num_named[group] = max(full, request.num_named[group])

    def can_free(self, request: SimulatedRequest) -> bool:
        """Whether its blocks would return at once."""
        return not self._config.defers_frees or request.last_sequence < self.num_processed

    def free(self, request: SimulatedRequest) -> None:
        """Its blocks return to the pool; later, if the engine waits for steps under way that may write to them."""
        blocks = [block for table in request.tables for block in reversed(table) if block != NULL_BLOCK]
        request.tables = []
        request.num_named = []
        if self.can_free(request):
            self._pool.free(blocks)
        elif blocks:
            self._deferred.append((self.num_planned, blocks))

    def _drain(self) -> None:
        while self._deferred and self._deferred[0][0] <= self.num_processed:
            self._pool.free(self._deferred.popleft()[1])

    def _num_skipped(self, group: int, num_tokens: int) -> int:
        """Leading blocks that lie in front of the window of the next token."""
        window = self._config.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self._config.block_size
