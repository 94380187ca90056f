"""The device blocks of an engine's requests, after vLLM's `KVCacheManager`: tables, prefix hits, deferred frees.

A recurrent group has, as in vLLM's mode "align", one state a step: that behind the step's last token, in the block of
its table where that token belongs, and none in the blocks that the step passes. Steps end where blocks do, until the
prompt ends, so that states lie there for others to begin with.

One whose hits may end inside of blocks ends a step at the last hash of a prompt, too, and the next one begins with a
copy of the state there, for the connector alone: its own hits end where blocks do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from kv_connector.base import StateBlock
from kv_connector.index import group_key
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
        self._groups = config.groups
        self._sizes = config.block_sizes
        self._hit_tokens = math.lcm(*self._sizes)
        self.num_planned = 0
        self.num_processed = 0
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._states: list[tuple[SimulatedRequest, StateBlock]] = []  # that got names since the last step was planned
        self._ends: list[tuple[SimulatedRequest, StateBlock]] = []  # inside of blocks, as well
        self.num_rows: dict[int, int] = {}
        """By block of attention that was told last as one that an end lies in: rows in front of that."""
        self._copies: list[tuple[SimulatedRequest, int, int]] = []  # of states there, and where to
        self._new_states: set[int] = set()  # those of the step that is being planned, which it will write

    def step_begins(self) -> None:
        """A step is planned."""
        self._new_states.clear()

    def processed(self) -> None:
        """A step that computes something is over."""
        self.num_processed += 1
        self._drain()

    def take_states(self) -> list[StateBlock]:
        """Those that others may begin with from now on, as far as they are still there."""
        states, self._states = self._states, []
        ends, self._ends = self._ends, []
        told = [state for request, state in states if self._pool.names[state.block_id] == self._key(request, state)]
        self.num_rows = {
            end.block_id: end.num_tokens % self._sizes[end.group]
            for _, end in ends
            if not self._config.layer_groups[end.group].is_recurrent
        }
        return told + [end for _, end in ends]

    def take_copies(self, request: SimulatedRequest) -> list[tuple[int, int]]:
        """What is copied in front of the request's step. The copies are held until that has been processed."""
        copies = [(source, target) for other, source, target in self._copies if other is request]
        self._copies = [copy for copy in self._copies if copy[0] is not request]
        if copies:
            self._deferred.append((self.num_planned + 1, [target for _, target in copies]))
        return copies

    def split(self, request: SimulatedRequest, start: int, count: int) -> int:
        """How many of these tokens a step may compute so that states lie where blocks end; possibly none."""
        end, prefill_end = start + count, max(request.num_prompt_tokens, request.num_tokens - 1)
        if not self._config.is_recurrent or start >= prefill_end:
            return count
        size = max(s for s, group in zip(self._sizes, self._config.layer_groups, strict=True) if group.is_recurrent)
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= self._config.max_step_tokens:
                end = aligned
        next_end = (start // size + 1) * size if start % size else 0
        ends = next_end, (request.num_tokens - 1) // size * size, self._end_within(request)
        stops = [stop for stop in ends if start < stop < end]
        return max(min(stops, default=end) - start, 0)

    def find_hit(self, request: SimulatedRequest) -> tuple[list[list[int]], int]:
        """The longest prefix that every group has, at least one token less than all; its blocks, by group."""
        hashes: Sequence[BlockHash] = request.block_hashes[: (request.num_tokens - 1) // self._config.block_size]
        if request.is_private:
            hashes = []
        end = len(hashes) * self._config.block_size
        found: list[list[int | None]] = []
        for index, group in enumerate(self._groups):
            names = hashes[group.hashes_per_block - 1 :: group.hashes_per_block]
            blocks = [self._pool.find(name, index) for name in names]
            if group.is_full and None in blocks:
                end = min(end, blocks.index(None) * self._sizes[index])
            found.append(blocks)
        end -= end % self._hit_tokens
        while not all(None not in blocks for blocks in self._needed(found, end)):
            end -= self._hit_tokens
        hit = []
        for index, blocks in enumerate(self._needed(found, end)):
            held = [block for block in blocks if block is not None]
            hit.append([NULL_BLOCK] * (end // self._sizes[index] - len(held)) + held)
        return hit, end

    def _needed(self, found: list[list[int | None]], end: int) -> list[list[int | None]]:
        ends = [end // size for size in self._sizes]
        return [found[g][group.first_needed(ends[g]) : ends[g]] for g, group in enumerate(self._groups)]

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
            need += sum(self._lacks(group, max(len(table), skipped), whole))
        if need + num_idle > self._pool.num_free - reserved:
            return None
        if not self._new_states.isdisjoint(block for table in kept for block in table):
            return None  # a step cannot begin with a state that it writes
        if fresh:
            for table in kept:
                self._pool.touch(table)
            request.tables = kept
            request.num_named = [len(table) for table in kept]
        new = []
        for group, table in enumerate(request.tables):
            skipped = self._num_skipped(group, total) if fresh else 0
            target = -(-(total + count + ahead) // self._sizes[group])
            nulls = max(0, min(skipped, target) - len(table))
            blocks = [NULL_BLOCK] * nulls
            for is_held in self._lacks(group, len(table) + nulls, total + count + ahead):
                blocks += self._pool.allocate(1) if is_held else [NULL_BLOCK]
            table += blocks
            new.append(blocks)
        if not is_async:
            self.name(request, min(total + count, request.num_tokens))
        return new

    def allocate(self, request: SimulatedRequest, count: int, ahead: int) -> list[list[int]] | None:
        """As `allocate_slots` for a running request; None where there is no room."""
        self._drop_skipped(request)
        total = request.num_computed_tokens + count + ahead
        lacks = [self._lacks(group, len(table), total) for group, table in enumerate(request.tables)]
        if sum(map(sum, lacks)) > self._pool.num_free:
            return None
        new = [[self._pool.allocate(1)[0] if is_held else NULL_BLOCK for is_held in lack] for lack in lacks]
        for table, blocks in zip(request.tables, new, strict=True):
            table += blocks
        self._keep_end(request)
        self.name(request, min(request.num_computed_tokens + count, request.num_tokens))
        return new

    def _end_within(self, request: SimulatedRequest) -> int:
        """Where a prompt's last hash ends, if hits may end there."""
        size = self._config.block_size
        return (request.num_prompt_tokens - 1) // size * size if self._config.ends_within else 0

    def _keep_end(self, request: SimulatedRequest) -> None:
        """The step begins at that end: its states are copied, if there is room, and the connector is told."""
        end = request.num_computed_tokens
        within = [group for group, size in enumerate(self._sizes) if end % size]
        states = [group for group in within if self._config.layer_groups[group].is_recurrent]
        if not end or end != self._end_within(request) or request.is_private or len(states) > self._pool.num_free:
            return
        for group in within:
            block_id = request.tables[group][end // self._sizes[group]]
            if group in states:
                (copy,) = self._pool.allocate(1)
                self._copies.append((request, block_id, copy))
                block_id = copy
            if group in states or self._groups[group].is_full:
                self._ends.append((request, StateBlock(request.request_id, group, block_id, end)))

    def _lacks(self, group: int, length: int, num_tokens: int) -> list[bool]:
        """What a table of this length lacks for so many tokens: for each place whether a block is needed there."""
        lack = [True] * max(0, -(-num_tokens // self._sizes[group]) - length)
        return [False] * (len(lack) - 1) + lack[-1:] if self._config.layer_groups[group].is_recurrent else lack

    def _drop_skipped(self, request: SimulatedRequest) -> None:
        """Blocks that slid out of the window of every step that is not processed."""
        for group, table in enumerate(request.tables):
            skipped = self._num_skipped(group, max(0, request.num_computed_tokens - request.num_in_flight))
            held = [index for index in range(min(skipped, len(table)) - 1, -1, -1) if table[index] != NULL_BLOCK]
            self._pool.free([table[index] for index in held])
            for index in held:
                table[index] = NULL_BLOCK

    def name(self, request: SimulatedRequest, num_tokens: int) -> None:
        """Its blocks that are full by so many tokens can be matched."""
        num_tokens = min(num_tokens, len(request.block_hashes) * self._config.block_size)
        if request.is_private:
            return
        for group, table in enumerate(request.tables):
            size = self._sizes[group]
            for index in range(request.num_named[group], num_tokens // size):
                if table[index] == NULL_BLOCK:
                    continue
                block_hash = request.block_hashes[(index + 1) * self._groups[group].hashes_per_block - 1]
                self._pool.name(table[index], block_hash, group)
                if self._config.layer_groups[group].is_recurrent:
                    state = StateBlock(request.request_id, group, table[index], (index + 1) * size)
                    self._states.append((request, state))
                    self._new_states.add(table[index])
            request.num_named[group] = max(num_tokens // size, request.num_named[group])

    def begin(self, request: SimulatedRequest) -> None:
        """The step begins with its states, which are told of anew: whoever hits a state shows that it is wanted."""
        computed = request.num_computed_tokens
        for group, size in enumerate(self._sizes):
            if self._config.layer_groups[group].is_recurrent and computed and not computed % size:
                block_id = request.tables[group][computed // size - 1]
                self._states.append((request, StateBlock(request.request_id, group, block_id, computed)))

    def can_free(self, request: SimulatedRequest) -> bool:
        """Whether its blocks would return at once."""
        return not self._config.defers_frees or request.last_sequence < self.num_processed

    def free(self, request: SimulatedRequest) -> None:
        """Its blocks return to the pool; later, if the engine waits for steps under way that may write to them."""
        blocks = [block for table in request.tables for block in reversed(table) if block != NULL_BLOCK]
        request.tables = []
        request.num_named = []
        self._states = [(other, state) for other, state in self._states if other is not request]
        self._ends = [(other, state) for other, state in self._ends if other is not request]
        if self.can_free(request):
            self._pool.free(blocks)
        elif blocks:
            self._deferred.append((self.num_planned, blocks))

    def _key(self, request: SimulatedRequest, state: StateBlock) -> BlockHash | None:
        """The name that the block of a state has as long as it holds it."""
        index = state.num_tokens // self._config.block_size - 1
        return group_key(request.block_hashes[index], state.group) if index < len(request.block_hashes) else None

    def _drain(self) -> None:
        while self._deferred and self._deferred[0][0] <= self.num_processed:
            self._pool.free(self._deferred.popleft()[1])

    def _num_skipped(self, group: int, num_tokens: int) -> int:
        """Leading blocks that lie in front of the window or chunk of the next token; of a state that is the token
        before it."""
        chunk = self._config.chunks[group]
        if chunk is not None:
            return num_tokens // chunk * chunk // self._sizes[group]
        window = 2 if self._config.layer_groups[group].is_recurrent else self._config.layer_groups[group].window
        return 0 if window is None else max(0, num_tokens - window + 1) // self._sizes[group]
