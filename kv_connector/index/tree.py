"""The prefix tree: which blocks are known, their parents, and the tiers that have a copy of each.

A block's chained hash names its whole prefix, so one dictionary from hash to node finds any block and the tree needs
no child links: a match is one lookup a block. Nodes are rows of flat arrays, not objects: about 248 bytes a block,
and nothing that Python's garbage collector has to walk.

A node stays as long as it has a copy on some tier, a child, or a pin; after that it is *remembered* (its hits count
toward `write_through_selective`) until `max_remembered` newer ones push it out.

NumPy is used where a whole tier loses its copies at once, and to tell that rows are neighbours in a prefix.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import BlockHash, Tier
from .columns import column
from .recent import RecentPaths
from .terms import PLAIN, NodeTerms, Terms

ROOT = 0
"""The node that stands for the empty prefix; it is never on a tier and never removed."""

NONE = -1

_ROWS = 1024  # rows that the arrays grow by; about 64 KB
_STRETCH = 64  # hashes that a match compares at once
_FORGOTTEN_AT_ONCE = 64  # beside as many as have come; what is over a lower limit goes over many calls
_LEAVING = 1 << 26
_COPY = 1 << 27
"""What keeps a node is one number: its children and pins, behind them whether it waits to leave, and its copies."""
LEAST_REMEMBERED = 1 << 16
"""A tree remembers so many blocks without a copy at least, about 15 MB of them, unless it is told otherwise."""


def rows_of(column: Sequence[Any], rows: Sequence[int]) -> tuple[Any, ...]:
    """The values of a column in these rows, gathered without a Python loop."""
    # One row more than asked for: of a single one there would be no tuple.
    return itemgetter(*rows, rows[0])(column)[:-1] if rows else ()


class PrefixTree:
    """Nodes, their order and their copies. The tiers (`CacheTier`) decide; the tree records.

    Public arrays, by node: `parent`, `depth` (blocks in front of it in its prefix), `used` (time of last use), `hits`
    (requests after the first that asked for the block), `visits` (the same, and those before it in the same chat, the
    older ones faded), `visited` (when the last of them was, in visits of all blocks, which `num_visits` counts),
    `asked` (when it was asked for last, in blocks that requests have asked for, which `time` counts; -1 of a row that
    is no node), `pins`, `inside` (1 where the hash ends inside of a block, of which a copy has what is in front);
    `terms` has more of them; and by tier and node: `block` (block id of the copy, NONE where there is none) and `kids`
    (children with a copy on that tier, kept by the tier).

    `max_remembered` may be set at any time. It decides how long a block may be away and still be known as one that was
    asked for before: twice as many as the host holds blocks is a good number. A lower one is reached over later calls.
    """

    def __init__(self, max_remembered: int = LEAST_REMEMBERED) -> None:
        self.max_remembered = max_remembered
        self.parent = array("i", [NONE])
        self.depth = array("i", [-1])
        self.used = array("d", [0.0])
        self.hits = array("I", [0])
        self.visits = array("f", [0.0])
        self.visited = array("q", [0])
        self.num_visits = 0
        self.asked = array("q", [-1])
        self.time = 0
        self.pins = array("I", [0])
        self.inside = bytearray(1)
        self.terms = NodeTerms()
        self.block = [array("i", [NONE]) for _ in Tier]
        self.kids = [array("i", [0]) for _ in Tier]
        self._hash: list[BlockHash | None] = [None]
        self._added = array("q", [0])  # by node: in which addition of nodes it came
        self._num_additions = 0
        self._recent = RecentPaths(self._hash, self._added)
        self._keeps = array("I", [1])  # the root stays for ever
        self._index: dict[BlockHash, int] = {}
        self._free: list[int] = []
        self._num_remembered = 0
        self._leaving: deque[int] = deque()  # forgettable nodes, the longest without a copy first

    def __len__(self) -> int:
        return len(self._index)

    def get(self, block_hash: BlockHash) -> int | None:
        """The node of a known block; changes nothing."""
        return self._index.get(block_hash)

    def hash_of(self, node: int) -> BlockHash:
        """The hash of a node that is not the root."""
        block_hash = self._hash[node]
        assert block_hash is not None, f"node {node} has no hash"
        return block_hash

    def hashes_of(self, nodes: Iterable[int]) -> list[BlockHash]:
        """The hashes of nodes that are not the root."""
        return [*map(self._hash.__getitem__, nodes)]  # type: ignore[list-item]  # None is the root's and of free rows

    def hashes_in(self, nodes: NDArray[np.intc]) -> Iterator[BlockHash]:
        """The hashes of these nodes, of which the root is none, in the order of their rows: a fast way to many."""
        is_in = np.zeros(len(self._hash), np.bool_)
        is_in[nodes] = True
        return compress(self._hash, is_in.tobytes())  # type: ignore[arg-type]  # None is the root's and of free rows

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Nodes of the longest known prefix of `hashes`, wherever their copies are; changes nothing but what is
        remembered of paths (`RecentPaths`), with which a long prompt that was matched lately begins.

        A prefix that was inserted at once lies in neighbouring rows, so the next rows are tried before the dictionary,
        many by one comparison: a hash is looked at in no time of Python's, and a large tree's cache misses are saved.
        """
        node = self._index.get(hashes[0]) if hashes else None
        if node is None:
            return []
        if len(hashes) <= _STRETCH:
            return self._extended([node], hashes)
        nodes = self._extended(self._recent.shared(hashes) or [node], hashes)
        follow_one_another = self.depth[nodes[-1]] - self.depth[node] == len(nodes) - 1
        if follow_one_another and len(nodes) > _STRETCH:  # a shorter path is matched by one comparison
            self._recent.remember(hashes, nodes, self._num_additions)
        return nodes[:]

    def _extended(self, nodes: list[int], hashes: Sequence[BlockHash]) -> list[int]:
        """The same list, with what is known behind its nodes, which are the first of `hashes`, at least one."""
        get, known, node = self._index.get, self._hash, nodes[-1]
        for start in range(len(nodes), len(hashes), _STRETCH):
            stretch = list(hashes[start : start + _STRETCH])
            if known[node + 1 : node + 1 + len(stretch)] == stretch:
                nodes.extend(range(node + 1, node + 1 + len(stretch)))
                node = nodes[-1]
                continue
            for block_hash in stretch:
                if node + 1 < len(known) and known[node + 1] == block_hash:
                    node += 1
                else:
                    found = get(block_hash)
                    if found is None:
                        return nodes
                    node = found
                nodes.append(node)
        return nodes

    def nodes(self) -> list[int]:
        """Every node but the root; O(nodes)."""
        return [node for node, block_hash in enumerate(self._hash) if block_hash is not None]

    def insert_path(
        self,
        hashes: Sequence[BlockHash],
        now: float,
        first: int = 0,
        stop: int | None = None,
        terms: Terms = PLAIN,
    ) -> list[int]:
        """Nodes of `hashes[first:stop]`, made on these terms where they are not known; `hashes` is a prefix from its
        first block on.

        A new node has no copy: the caller attaches one, or calls `settle` so that it is remembered.
        """
        stop = len(hashes) if stop is None else stop
        if first >= stop:
            return []  # without its prefix, which nobody would settle
        get = self._index.get
        nodes: list[int] = []
        parent = get(hashes[first - 1]) if first else ROOT
        if parent is None:  # forgotten meanwhile
            parent = self.insert_path(hashes, now, 0, first, terms)[-1]
        for index in range(first, stop):
            node = get(hashes[index])
            if node is None:  # and none behind it either: a node keeps its parent
                return nodes + self._add(parent, hashes[index:stop], now, terms)
            nodes.append(node)
            parent = node
        return nodes

    def insert_apart(self, hashes: Sequence[BlockHash], now: float, terms: Terms = PLAIN) -> list[int]:
        """As `insert_path`, of blocks that follow nothing."""
        missing = [block_hash for block_hash in dict.fromkeys(hashes) if block_hash not in self._index]
        if missing:
            self._add(ROOT, missing, now, terms, is_path=False)
        return [self._index[block_hash] for block_hash in hashes]

    def on_path(self, path: Sequence[BlockHash], nodes: Sequence[int]) -> list[int]:
        """Those of the nodes that are on the path, however long that is."""
        if not path or path[0] not in self._index:  # nobody knows any of it
            return []
        depths, named = self.depth, zip(nodes, self.hashes_of(nodes), strict=True)
        return [n for n, name in named if depths[n] < len(path) and path[depths[n]] == name]

    def visits_behind(self, parent: int) -> float:
        """The visits of a new child of this node: those of the parent if it has no child yet, since the same chat
        continues it; else none, since another one branches off."""
        has_children = (self._keeps[parent] & (_LEAVING - 1)) > self.pins[parent]
        return 0 if parent == ROOT or has_children else self.visits[parent]

    def is_run(self, first: int, last: int) -> bool:
        """Whether the rows from `first` to `last` are of blocks that follow one another, and that were used together,
        and asked for together and as often, and have one priority; by comparing many at once."""
        rows, parents = slice(first, last + 1), self.parent[first + 1 : last + 1].tobytes()
        return (
            parents == np.arange(first, last, dtype=np.intc).tobytes()
            and _is_constant(self.used[rows])
            and _is_constant(self.asked[rows])
            and _is_constant(self.visits[rows])
            and (not self.terms.were_given or _is_constant(self.terms.priority[rows]))
        )

    def touch(self, nodes: Iterable[int], now: float) -> None:
        """Mark nodes as used. Where only the end of a path is touched its parents are as recent all the same: a tier
        that lets go of a block hands its time up to the parent, which cannot go before it."""
        used = self.used
        for node in nodes:
            used[node] = now

    def add_copies(self, nodes: Sequence[int], tier: Tier, block_ids: Sequence[int]) -> None:
        """Record that blocks of `tier` are, or are becoming, copies of these nodes. Only tiers call this."""
        blocks, keeps, copy, num_held = self.block[tier], self._keeps, _COPY, 0
        for node, block_id in zip(nodes, block_ids, strict=True):
            assert blocks[node] == NONE, f"node {node} has a {tier.name} copy already"
            blocks[node] = block_id
            before = keeps[node]
            if before >= copy:
                num_held += 1  # on another tier
            keeps[node] = before + copy
        self._num_remembered -= len(nodes) - num_held

    def remove_copies(self, nodes: Sequence[int], tier: Tier) -> None:
        """Forget the copies of these nodes on `tier`. Only tiers call this."""
        blocks, keeps, copy, num_held = self.block[tier], self._keeps, _COPY, 0
        for node in nodes:
            blocks[node] = NONE
            left = keeps[node] = keeps[node] - copy
            if left >= copy:
                num_held += 1  # on another tier
            elif not left:
                self._let_leave(node)
        self._num_remembered += len(nodes) - num_held
        self._forget(len(nodes))

    def remove_all_copies(self, tier: Tier) -> None:
        """Forget every copy on `tier`, as fast as arrays are written. Only tiers call this."""
        held = column(self.block[tier]) != NONE
        column(self._keeps)[held] -= _COPY
        column(self.block[tier])[held] = NONE
        column(self.kids[tier])[:] = 0
        self._num_remembered += int(np.count_nonzero(held & (column(self._keeps) < _COPY)))
        leave = held & (column(self._keeps) == 0)
        column(self._keeps)[leave] = _LEAVING
        self._leaving.extend(np.flatnonzero(leave).tolist())

    def pin(self, nodes: Iterable[int]) -> None:
        """Keep these nodes and their host and storage copies until `unpin`."""
        for node in nodes:
            self.pins[node] += 1
            self._keeps[node] += 1

    def unpin(self, nodes: Iterable[int]) -> None:
        """Undo one `pin` of each node."""
        for node in nodes:
            assert self.pins[node] > 0, f"node {node} is not pinned"
            self.pins[node] -= 1
            self._keeps[node] -= 1
            self.settle((node,))

    def settle(self, nodes: Sequence[int]) -> None:
        """Let those of the nodes that have no copy be forgotten once `max_remembered` newer ones have come."""
        kept = rows_of(self._keeps, nodes)
        if 0 in kept:  # of those that follow one another only the last
            for node in dict.fromkeys(compress(nodes, map((0).__eq__, kept))):
                self._let_leave(node)
        self._forget(len(nodes))

    def check(self) -> None:
        """Verify every invariant that does not concern the pools; O(nodes)."""
        index, known, num_rows = self._index, self._hash, len(self._hash)
        assert num_rows - known.count(None) == len(index), "index and nodes disagree"
        for block_hash, node in index.items():
            assert known[node] == block_hash, f"node {node} is not found by its hash"
        assert len(set(self._leaving)) == len(self._leaving), "a node leaves twice"
        nodes = np.fromiter(index.values(), np.intp, len(index))
        is_node, is_leaving = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.bool_)
        is_node[ROOT] = is_node[nodes] = is_leaving[list(self._leaving)] = True
        parents, depths = np.array(self.parent)[nodes], np.array(self.depth)
        assert is_node[parents].all(), f"rows {set(parents[~is_node[parents]].tolist())} are parents and no nodes"
        self._check_depths(nodes, depths[nodes], depths[parents])
        copies = np.zeros(num_rows, np.int64)
        for blocks in self.block:
            copies += np.array(blocks) != NONE
        remembered = len(nodes) - np.count_nonzero(copies[nodes])
        assert remembered == self._num_remembered, f"{remembered} nodes remembered, {self._num_remembered} counted"
        children = np.bincount(parents, minlength=num_rows)
        keeps, kept = children + np.array(self.pins) + copies * _COPY + is_leaving * _LEAVING, np.array(self._keeps)
        keeps[ROOT] = 1 + children[ROOT]
        wrong = np.flatnonzero(is_node & (keeps != kept))
        assert not wrong.size, f"node {wrong[0]} is kept by {kept[wrong[0]]:#x}, should be by {keeps[wrong[0]]:#x}"
        assert keeps[nodes].all(), f"node {nodes[keeps[nodes].argmin()]} can never be forgotten"

    def _check_depths(self, nodes: NDArray[np.intp], depths: NDArray[np.intc], of_parents: NDArray[np.intc]) -> None:
        wrong = nodes[depths != of_parents + 1]
        assert not wrong.size, f"node {wrong[0]} is not behind its parent"

    def _let_leave(self, node: int) -> None:
        """Nothing keeps it any more."""
        self._keeps[node] = _LEAVING
        self._leaving.append(node)

    def _forget(self, num_nodes: int) -> None:
        """Let the oldest go that are too many. So many nodes have come in this call: it takes no longer than they did,
        however far the limit was lowered or whatever a reset has left."""
        num_excess = min(self._num_remembered - self.max_remembered, 2 * num_nodes + _FORGOTTEN_AT_ONCE)
        if num_excess <= 0:
            return
        leaving, keeps, parents, index, known = self._leaving, self._keeps, self.parent, self._index, self._hash
        free, num_free, asked = self._free, len(self._free), self.asked
        node, left = ROOT, keeps[ROOT]
        for _ in range(num_excess):
            # A head has waited for its tail, which leaves first, and is at least as old.
            while left and leaving:
                node = leaving.popleft()
                if left := keeps[node] - _LEAVING:
                    keeps[node] = left
            if left:
                break
            del index[known[node]]  # type: ignore[arg-type]  # only the root and free rows have no hash
            known[node] = None
            asked[node] = NONE
            free.append(node)
            node = parents[node]
            if left := keeps[node] - 1:
                keeps[node] = left
        if not left:
            keeps[node] = _LEAVING
            leaving.appendleft(node)
        self._num_remembered -= len(free) - num_free

    def _add(
        self, parent: int, hashes: Sequence[BlockHash], now: float, terms: Terms, is_path: bool = True
    ) -> list[int]:
        """Nodes of blocks that are not known and follow one another, the first of them `parent`, or all of them that
        where they are no path."""
        index, known, keeps, added = self._index, self._hash, self._keeps, self._added
        parents, depths, used, hits, asked = self.parent, self.depth, self.used, self.hits, self.asked
        inside = self.inside
        self._num_additions = number = self._num_additions + 1
        if len(self._free) < len(hashes):
            self._grow(len(hashes))
        split = len(self._free) - len(hashes)
        nodes = self._free[split:]
        del self._free[split:]
        nodes.reverse()
        depth = depths[parent] + 1
        visits = self.visits_behind(parent)
        visits_of, visited, num_visits, time = self.visits, self.visited, self.num_visits, self.time
        keeps[parent] += 1 if is_path else len(nodes)
        index.update(zip(hashes, nodes, strict=True))
        for node, block_hash in zip(nodes, hashes, strict=True):
            depths[node] = depth
            parents[node] = parent
            added[node] = number
            used[node] = now
            hits[node] = 0
            inside[node] = 0
            asked[node] = time
            visits_of[node] = visits
            visited[node] = num_visits
            keeps[node] = 1  # its child
            known[node] = block_hash
            if is_path:
                parent = node
                depth += 1
        for node in nodes[-1:] if is_path else nodes:
            keeps[node] = 0
        if terms is not PLAIN or self.terms.were_given:
            self.terms.begin(nodes, terms, parents[nodes[0]])
        self._num_remembered += len(nodes)
        assert len(index) + len(self._free) == len(known) - 1, "a block has two parents"
        return nodes

    def _grow(self, least: int) -> None:
        """Add `least` free rows or more; the lowest is taken first, so that a prefix lies in ascending rows."""
        num_rows = -(-least // _ROWS) * _ROWS
        first, zeros = len(self._hash), bytes(num_rows)
        none = array("i", [NONE]) * num_rows
        for ids in (self.parent, self.depth, *self.block):
            ids.extend(none)
        numbers: tuple[array[Any], ...] = (self.used, self.hits, self.visits, self.visited, self._added, self.pins)
        for column_of in (*numbers, self._keeps, *self.kids):
            column_of.frombytes(zeros * column_of.itemsize)
        self.asked.extend(array("q", [NONE]) * num_rows)
        self.inside += zeros
        self.terms.grow(num_rows)
        self._hash.extend([None] * num_rows)
        self._free[:0] = range(first + num_rows - 1, first - 1, -1)


def _is_constant(numbers: array[Any]) -> bool:
    data, size = numbers.tobytes(), numbers.itemsize
    return data[size:] == data[:-size]
