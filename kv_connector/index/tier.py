"""One tier of the cache: its pool of blocks, the copies they hold, and which of them are evicted.

A block of the pool is free, private (allocated, a copy of nothing), or a copy of a node in the tree. A copy may be
evicted when it is resident, has no references (no request uses it and no copy job leases it), no child on this tier,
and no pin. Evicting a leaf may turn its parent into one, so eviction cascades from the tails of prefixes to their
heads, least recently used first. Whoever uses a block uses its whole prefix, but only the block need be marked: when
it goes, its time of last use is handed up to its parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from ..errors import InvalidBlockError
from ..types import BlockHash, Tier
from .columns import column
from .eviction import NEVER, EvictionOrder, EvictionQueue, Recency
from .pool import BlockPool
from .states import BlockState, Event, advance
from .tenants import TenantQueues
from .tree import NONE, PrefixTree, rows_of

# Plain ints: looking a member up on an enum class costs as much as the rest of a hot loop's turn.
_RESIDENT = int(BlockState.RESIDENT)
_DELETING = int(BlockState.DELETING)
_ALL_RESIDENT = bytes((_RESIDENT,))


class CacheTier:
    """Copies of tree nodes in the blocks of one tier. Single-threaded; every change is all or nothing."""

    def __init__(
        self,
        tree: PrefixTree,
        tier: Tier,
        capacity: int,
        log_removed: bool = False,
        order: EvictionOrder | None = None,
        weights: Sequence[int] = (),
    ) -> None:
        """`order` is the eviction order; least recently used by default. `weights` are those of the tenants that share
        the tier, if there are several: see `TenantQueues`. `log_removed` keeps the hashes of evicted resident copies in
        `removed`, for an owner that empties that list."""
        self.tree = tree
        self.tier = tier
        self.pool = BlockPool(capacity)
        self.num_copies = 0  # blocks that hold a copy, resident or on its way
        self.num_evicted = 0
        self.removed: list[BlockHash] = []
        self._log_removed = log_removed
        self._state = bytearray()  # by block id
        self._node = array("i")  # by block id; says nothing where the state is ABSENT or DELETING
        self._block = tree.block[tier]
        self._kids = tree.kids[tier]
        self._refs = self.pool.ref_counts
        self._order = order or Recency(tree)
        self._order.resized(capacity)
        make_queue = partial(EvictionQueue, tree, tier, self._refs, self._order)
        self.tenants = TenantQueues(tree, weights, make_queue, self._is_evictable) if weights else None
        """Of a tier that several share."""
        self._queue = self.tenants or make_queue(self._is_evictable)
        self._queue.resized(capacity)
        self._num_idle = 0  # resident copies without references: what eviction could free at most

    @property
    def num_available(self) -> int:
        """Blocks that are free or hold an unreferenced copy; `allocate` can hand out at most so many."""
        return self.pool.num_free + self._num_idle

    def state(self, block_id: int) -> BlockState:
        """State of the copy in a block; ABSENT for a free or private one."""
        return BlockState(self._state[block_id]) if block_id < len(self._state) else BlockState.ABSENT

    def holds_copy(self, block_id: int) -> bool:
        """Whether the block holds a copy, resident or on its way."""
        return self.state(block_id) not in (BlockState.ABSENT, BlockState.DELETING)

    def node_state(self, node: int) -> BlockState:
        """State of a node's copy on this tier."""
        block_id = self._block[node]
        return BlockState.ABSENT if block_id == NONE else BlockState(self._state[block_id])

    def resident_prefix(self, nodes: Sequence[int]) -> int:
        """How many of the leading `nodes` have their bytes here, complete and valid; changes nothing."""
        block_ids = rows_of(self._block, nodes)
        if NONE in block_ids:
            block_ids = block_ids[: block_ids.index(NONE)]
        return self.num_resident(block_ids)

    def absent(self, nodes: Sequence[int]) -> list[int]:
        """Indices of the `nodes` that have no copy on this tier, not even one on its way."""
        block_ids = rows_of(self._block, nodes)
        return [index for index, block_id in enumerate(block_ids) if block_id == NONE] if NONE in block_ids else []

    def blocks_of(self, nodes: Iterable[int]) -> list[int]:
        """Block ids of the nodes' copies on this tier."""
        return [*map(self._block.__getitem__, nodes)]

    def nodes_of(self, block_ids: Iterable[int]) -> list[int]:
        """The nodes whose copies are in these blocks, which hold some."""
        node = self._node
        return [node[block_id] for block_id in block_ids]

    def num_resident(self, block_ids: Sequence[int]) -> int:
        """How many of the leading ones of these blocks, which hold copies or did so, hold a complete and valid one."""
        states = bytes(rows_of(self._state, block_ids))
        return len(states) - len(states.lstrip(_ALL_RESIDENT))

    def first_not_resident(self, block_ids: Sequence[int]) -> int | None:
        """The first of these blocks, which hold copies or did so, that does not hold a complete and valid one."""
        num_resident = self.num_resident(block_ids)
        return block_ids[num_resident] if num_resident < len(block_ids) else None

    def hashes_of(self, block_ids: Iterable[int]) -> list[BlockHash]:
        """Hashes of the copies in these blocks, which hold some."""
        return self.tree.hashes_of(self.nodes_of(block_ids))

    def allocate(self, num_blocks: int, older_than: float = NEVER, tenant: int = 0) -> list[int] | None:
        """`num_blocks` private blocks for this tenant with one reference each, evicting where too few are free.

        Only copies last used before `older_than` are evicted. None, and nothing changed, where that is not enough.
        """
        num_free = self._num_free(tenant)
        victims: list[int] = []
        if (short := num_blocks - num_free) > 0:
            if short > self._num_idle:
                return None
            victims = self._queue.take(short, older_than, NEVER, tenant, num_free)
            if len(victims) < short:
                self._restore(victims)
                return None
        return self._hand_out(min(num_blocks, num_free), victims, tenant)

    def allocate_up_to(self, num_blocks: int, older_than: float = NEVER, tenant: int = 0) -> list[int]:
        """As `allocate`, but as many as possible, maybe none."""
        num_free = min(num_blocks, self._num_free(tenant))
        victims = self._queue.take(num_blocks - num_free, older_than, NEVER, tenant, num_free)
        return self._hand_out(num_free, victims, tenant)

    def allocate_behind(
        self,
        num_blocks: int,
        paths: Sequence[Sequence[BlockHash]],
        now: float,
        worth: float = NEVER,
        tenant: int = 0,
    ) -> list[int]:
        """As `allocate_up_to`, evicting older prefixes but nothing of the paths that the blocks continue, one for each
        block group, and nothing that is worth more than they are."""
        if (num_free := self._num_free(tenant)) >= num_blocks:
            return self._hand_out(num_blocks, [], tenant)
        victims = self._queue.take(num_blocks - num_free, now, worth, tenant, num_free)
        while own := self._on(paths, victims):  # at most once for each gap in a path
            self._restore(victims)
            self.tree.touch(own, now)
            victims = self._queue.take(num_blocks - num_free, now, worth, tenant, num_free)
        return self._hand_out(num_free, victims, tenant)

    def has_room_behind(
        self, paths: Sequence[Sequence[BlockHash]], now: float, worth: float = NEVER, tenant: int = 0
    ) -> bool:
        """Whether `allocate_behind` would find one block at least; however large the tier and long the paths are."""
        if self._num_free(tenant):
            return True
        while (first := self._queue.first(now, tenant))[1] < NEVER:
            if not self._on(paths, (first[2],)):
                return first[0] <= worth
            self.tree.touch((first[2],), now)
        return False

    def attach(self, block_ids: Sequence[int], nodes: Sequence[int], event: Event) -> None:
        """Make private blocks the copies of `nodes`; `event` (COMPUTE, SWAP_IN, ...) says who writes them."""
        self._reserve_rows(max(block_ids, default=-1))
        filling = advance(self.tier, BlockState.ABSENT, event)
        refs, node_of, states, kids, parent = self._refs, self._node, self._state, self._kids, self.tree.parent
        if block_ids and (min(rows_of(refs, block_ids)) < 1 or any(rows_of(states, block_ids))):
            wrong = next(block_id for block_id in block_ids if refs[block_id] < 1 or states[block_id])
            raise InvalidBlockError(f"{self.tier.name} block {wrong} is not a private block in use")
        self.tree.add_copies(nodes, self.tier, block_ids)
        for block_id, node in zip(block_ids, nodes, strict=True):
            states[block_id] = filling
            node_of[block_id] = node
            kids[parent[node]] += 1
        self._queue.attached(block_ids, nodes)
        self.num_copies += len(block_ids)

    def fill(self, block_ids: Iterable[int]) -> list[int]:
        """Copies whose bytes have arrived become resident; returns the blocks of those that were not deleted."""
        states = self._state
        filled = [block_id for block_id in block_ids if states[block_id] != _DELETING]
        for state in {states[block_id] for block_id in filled}:
            assert advance(self.tier, state, Event.FILL) == _RESIDENT, "what is filled is resident"
        for block_id in filled:
            states[block_id] = _RESIDENT
        return filled

    def discard(self, block_ids: Iterable[int]) -> None:
        """Drop copies whose bytes are wrong, or not wanted: copies being written or resident are not matched any more.

        A block in use stays with its users and is free when the last one releases it.
        """
        for block_id in block_ids:
            if not self.holds_copy(block_id):
                continue
            if self.pool.refs(block_id) > 0:
                self._detach(block_id, Event.DELETE)
            else:
                self._num_idle -= 1
                self._detach(block_id, Event.EVICT)
                self._free((block_id,))

    def discard_tail(self, nodes: Sequence[int]) -> int:
        """Drop the copies of these nodes, which follow one another, from the tail on, up to one that is pinned, or in
        front of another copy. Returns how many."""
        num_before = self.num_copies
        for node in reversed(nodes):
            if self._block[node] != NONE:
                if self._kids[node] or self.tree.pins[node]:
                    break
                self.discard((self._block[node],))
        return num_before - self.num_copies

    def leaves(self, block_ids: Iterable[int]) -> list[int]:
        """Those of these blocks behind whose copies there is none on this tier."""
        return [block_id for block_id in block_ids if not self._kids[self._node[block_id]]]

    def copies(self) -> list[int]:
        """Blocks that hold a copy, resident or on its way; O(blocks)."""
        return [block_id for block_id, state in enumerate(self._state) if state and state != _DELETING]

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more reference to each block: a request uses it or a copy job leases it."""
        self._num_idle -= len(self.pool.acquire(block_ids))

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less. A block nobody uses stays cached when it is resident and is free otherwise."""
        if not block_ids:
            return
        states, node_of, kids, free = self._state, self._node, self._kids, []
        num_rows, capacity, num_idle = len(states), self.pool.capacity, 0
        for block_id in self.pool.release(block_ids):
            state = states[block_id] if block_id < num_rows else BlockState.ABSENT
            if state == _RESIDENT and block_id < capacity:
                num_idle += 1
                node = node_of[block_id]
                if not kids[node]:  # of a whole prefix one block at most
                    self._offer(node)
                continue
            if state == _DELETING:
                states[block_id] = advance(self.tier, state, Event.FREE)
            elif state:  # its writer let go before it was done, or the tier has shrunk below it
                self._detach(block_id, Event.EVICT if state == _RESIDENT else Event.FAIL)
            free.append(block_id)
        self._num_idle += num_idle
        self._free(free)

    def next_reused(self, limit: int) -> list[tuple[int, BlockHash]]:
        """Those of the next `limit` blocks that `allocate` would hand out which hold a copy, soonest first, with the
        hash of the copy; changes nothing that can be observed."""
        victims = self._queue.take(max(0, limit - self.pool.num_free), NEVER)
        self._restore(victims)
        return [(self._block[node], self.tree.hash_of(node)) for node in victims]

    # The names that `DeviceBlocks` has for the same things.
    touch = acquire
    free_blocks = release
    forget = discard

    def unpin(self, nodes: Sequence[int]) -> None:
        """Undo one pin of each node; their copies may be evicted again."""
        self.tree.unpin(nodes)
        for node in reversed(nodes):
            self._offer(node)

    def resize(self, capacity: int) -> None:
        """Change the number of blocks. Copies above a smaller capacity are dropped at once if unused, else when their
        last user releases them."""
        self.pool.resize(capacity)
        self._order.resized(capacity)
        self._queue.resized(capacity)
        self.discard([block_id for block_id in self.pool.live_ids(capacity) if not self.pool.refs(block_id)])

    def reset(self) -> None:
        """Drop every copy. Blocks in use stay with their users until released. Takes array writes alone, except with
        `removed`, which collects every hash.
        """
        num_rows = min(len(self._state), len(self._refs))  # blocks behind them have not been used since a reset
        states = column(self._state)[:num_rows].copy()
        is_copy = (states != BlockState.ABSENT) & (states != _DELETING)
        is_used = column(self._refs)[:num_rows] > 0
        if self._log_removed:
            resident = column(self._node)[:num_rows][states == _RESIDENT]
            self.removed.extend(self.tree.hashes_in(resident))
        idle = advance(self.tier, _RESIDENT, Event.EVICT)
        for state in np.flatnonzero(np.bincount(states[is_copy & is_used])).tolist():
            assert advance(self.tier, state, Event.DELETE) == _DELETING, "a copy in use is deleted and nothing else"
        column(self._state)[:num_rows][is_copy & ~is_used] = idle
        column(self._state)[:num_rows][is_copy & is_used] = _DELETING
        self.tree.remove_all_copies(self.tier)
        self.pool.free_idle()
        self._queue.all_freed(self.pool)
        self._queue.clear()
        self._num_idle = 0
        self.num_copies = 0

    def check(self) -> None:
        """Verify every invariant of this tier; O(blocks)."""
        self.pool.check()
        states, node_of, holds = np.array(self._state), np.array(self._node), np.array(self._block)
        refs = np.full(len(states), -1)
        refs[: len(self._refs)] = self._refs[: len(refs)]  # blocks behind them have not been used since a reset
        copies = np.flatnonzero(states)
        is_deleting = states[copies] == _DELETING
        wrong = copies[is_deleting & (refs[copies] <= 0)]
        assert not wrong.size, f"block {wrong[0]} is never freed"
        copies = copies[~is_deleting]
        nodes, refs = node_of[copies], refs[copies]
        wrong = copies[holds[nodes] != copies]
        assert not wrong.size, f"node {node_of[wrong[0]]} and block {wrong[0]} disagree"
        wrong = copies[(refs < 0) | ((refs == 0) & (states[copies] != _RESIDENT))]
        assert not wrong.size, f"block {wrong[0]} is {self.state(wrong[0]).name} and nobody writes it"
        for node in nodes[np.array(self._kids)[nodes] == 0].tolist():
            assert not self._is_evictable(node) or node in self._queue, f"node {node} can never be evicted"
        self._queue.check_owners(copies, nodes)
        num_idle, holders = np.count_nonzero(refs == 0), np.flatnonzero(holds != NONE)
        assert num_idle == self._num_idle, f"{num_idle} copies are idle, {self._num_idle} counted"
        assert len(holders) == self.num_copies, f"the tree knows {len(holders)} copies, the tier {self.num_copies}"
        self._queue.check(self.pool)
        kids = np.bincount(np.array(self.tree.parent)[holders], minlength=len(holds))
        wrong = np.flatnonzero(kids != np.array(self._kids))
        assert not wrong.size, f"node {wrong[0]} has {kids[wrong[0]]} kids here, {self._kids[wrong[0]]} counted"

    def _is_evictable(self, node: int) -> bool:
        block_id = self._block[node]
        return (
            block_id != NONE
            and not self._kids[node]
            and self._refs[block_id] == 0
            and self._state[block_id] == _RESIDENT
            and (not self.tree.pins[node] or self.tier is Tier.DEVICE)
        )

    def _offer(self, node: int) -> None:
        if not self._kids[node] and self._is_evictable(node):
            self._queue.push(node)

    def _on(self, paths: Sequence[Sequence[BlockHash]], nodes: Sequence[int]) -> list[int]:
        """Those of the nodes that are on one of the paths."""
        return [node for path in paths for node in self.tree.on_path(path, nodes)]

    def _num_free(self, tenant: int) -> int:
        """Free blocks that the tenant may have."""
        return self.pool.num_free if self.tenants is None else min(self.pool.num_free, self.tenants.room(tenant))

    def _hand_out(self, num_free: int, victims: list[int], tenant: int) -> list[int]:
        """Private blocks: so many that are free, and those of the victims."""
        block_ids = self.pool.allocate(num_free) or []
        if victims:
            evicted = self._evict(victims)
            self.pool.reuse(evicted)
            self._queue.freed(evicted)
            block_ids += evicted
        self._queue.handed_out(block_ids, tenant)
        return block_ids

    def _free(self, block_ids: Sequence[int]) -> None:
        self._queue.freed(block_ids)
        self.pool.free(block_ids)

    def _restore(self, victims: list[int]) -> None:
        for node in reversed(victims):
            self._kids[self.tree.parent[node]] += 1
            self._offer(node)

    def _evict(self, victims: list[int]) -> list[int]:
        """Let go of victims that the queue has taken, and counted out of their parents' kids. Their blocks are idle."""
        block_ids, states = self.blocks_of(victims), self._state
        absent = advance(self.tier, _RESIDENT, Event.EVICT)
        if self._log_removed:
            self.removed += self.tree.hashes_of(victims)
        for block_id in block_ids:
            states[block_id] = absent
        self.tree.remove_copies(victims, self.tier)
        self._num_idle -= len(victims)
        self.num_copies -= len(victims)
        self.num_evicted += len(victims)
        return block_ids

    def _detach(self, block_id: int, event: Event) -> None:
        node, state = self._node[block_id], self._state[block_id]
        if self._log_removed and state == _RESIDENT:
            self.removed.append(self.tree.hash_of(node))
        self._state[block_id] = advance(self.tier, state, event)
        self.num_copies -= 1
        parent, used = self.tree.parent[node], self.tree.used
        used[parent] = max(used[parent], used[node])
        self._kids[parent] -= 1
        self.tree.remove_copies((node,), self.tier)
        self._offer(parent)

    def _reserve_rows(self, block_id: int) -> None:
        missing = block_id + 1 - len(self._node)
        if missing > 0:
            self._node.extend([NONE] * missing)
            self._state.extend(bytes(missing))
