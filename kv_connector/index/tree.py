"""The prefix tree: which blocks are known, how they follow one another, and on which tiers a copy of each lies.

A block's chained hash names its whole prefix, so one dictionary from hash to node finds any block and the tree needs
no child links: a match is one look-up a block. Nodes are rows of flat arrays, not objects: about 210 bytes a block,
and nothing that Python's garbage collector has to walk.

A node stays as long as it has a copy on some tier, a child, or a pin; after that it is *remembered* (its hits count
toward `write_through_selective`) until `max_remembered` newer ones push it out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from ..types import BlockHash, Tier

ROOT = 0
"""The node that stands for the empty prefix; it is never on a tier and never removed."""

NONE = -1

_ROWS = 1024  # rows that the arrays grow by; about 64 KB
_STRETCH = 64  # hashes that a match compares at once


class PrefixTree:
    """Nodes, their order and their copies. The tiers (`CacheTier`) decide; the tree records.

    Public arrays, by node: `parent`, `used` (time of last use), `hits` (requests after the first that asked for the
    block), `pins`; and by tier and node: `block` (block id of the copy, NONE where there is none) and `kids` (children
    with a copy on that tier, kept by the tier).
    """

    def __init__(self, max_remembered: int = 1 << 16) -> None:
        self.max_remembered = max_remembered
        self.parent = array("i", [NONE])
        self.used = array("d", [0.0])
        self.hits = array("I", [0])
        self.pins = array("I", [0])
        self.block = [array("i", [NONE]) for _ in Tier]
        self.kids = [array("i", [0]) for _ in Tier]
        self._hash: list[BlockHash | None] = [None]
        self._copies = bytearray(1)  # tiers with a copy
        self._children = array("i", [0])
        self._index: dict[BlockHash, int] = {}
        self._free: list[int] = []
        self._num_remembered = 0
        self._leaving: deque[int] = deque()  # forgettable nodes, the longest without a copy first
        self._is_leaving = bytearray(1)

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

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Nodes of the longest known prefix of `hashes`, wherever their copies are; changes nothing.

        A prefix that was inserted at once lies in neighbouring rows, so the next rows are tried before the dictionary,
        many by one comparison: a hash is looked at in no time of Python's, and a large tree's cache misses are saved.
        """
        get, known, nodes = self._index.get, self._hash, []
        node = get(hashes[0]) if hashes else None
        if node is None:
            return []
        nodes.append(node)
        for start in range(1, len(hashes), _STRETCH):
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

    def insert_path(self, hashes: Sequence[BlockHash], now: float, first: int = 0) -> list[int]:
        """Nodes of `hashes[first:]`, made where they are not known; `hashes` is a prefix from its first block on.

        A new node has no copy: the caller attaches one, or calls `settle` so that it is remembered.
        """
        index, nodes = self._index, []
        parent = index.get(hashes[first - 1]) if first else ROOT
        if parent is None:  # forgotten meanwhile
            parent = self.insert_path(hashes[:first], now)[-1]
        for block_hash in hashes[first:]:
            node = index.get(block_hash)
            if node is None:
                node = self._add(parent, block_hash, now)
            assert self.parent[node] == parent, f"block {block_hash.hex()} has two parents"
            nodes.append(node)
            parent = node
        return nodes

    def touch(self, nodes: Iterable[int], now: float) -> None:
        """Mark nodes as used. A path is touched as a whole, so a parent is never older than its children."""
        used = self.used
        for node in nodes:
            used[node] = now

    def add_copies(self, nodes: Sequence[int], tier: Tier, block_ids: Sequence[int]) -> None:
        """Record that blocks of `tier` are, or are becoming, copies of these nodes. Only tiers call this."""
        blocks, copies = self.block[tier], self._copies
        for node, block_id in zip(nodes, block_ids, strict=True):
            assert blocks[node] == NONE, f"node {node} has a {tier.name} copy already"
            blocks[node] = block_id
            if copies[node] == 0:
                self._num_remembered -= 1
            copies[node] += 1

    def remove_copies(self, nodes: Iterable[int], tier: Tier) -> None:
        """Forget the copies of these nodes on `tier`. Only tiers call this."""
        blocks, copies = self.block[tier], self._copies
        for node in nodes:
            assert blocks[node] != NONE, f"node {node} has no {tier.name} copy"
            blocks[node] = NONE
            copies[node] -= 1
            if not copies[node]:
                self._num_remembered += 1
                self._let_leave(node)
        self._forget()

    def pin(self, nodes: Iterable[int]) -> None:
        """Keep these nodes and their host and storage copies until `unpin`."""
        for node in nodes:
            self.pins[node] += 1

    def unpin(self, nodes: Iterable[int]) -> None:
        """Undo one `pin` of each node."""
        for node in nodes:
            assert self.pins[node] > 0, f"node {node} is not pinned"
            self.pins[node] -= 1
            self.settle((node,))

    def settle(self, nodes: Iterable[int]) -> None:
        """Let those of the nodes that have no copy be forgotten once `max_remembered` newer ones have come."""
        copies = self._copies
        for node in nodes:
            if not copies[node]:
                self._let_leave(node)
        self._forget()

    def check(self) -> None:
        """Verify every invariant that does not concern the pools; O(nodes)."""
        nodes = self.nodes()
        assert len(nodes) == len(self._index), "index and nodes disagree"
        children = {ROOT: 0} | dict.fromkeys(nodes, 0)
        remembered = 0
        for node in nodes:
            assert self._index[self.hash_of(node)] == node, f"node {node} is not found by its hash"
            children[self.parent[node]] += 1
            copies = sum(blocks[node] != NONE for blocks in self.block)
            assert copies == self._copies[node], f"node {node} counts {self._copies[node]} copies, has {copies}"
            remembered += copies == 0
            assert not self._is_forgettable(node) or self._is_leaving[node], f"node {node} can never be forgotten"
        assert remembered == self._num_remembered, f"{remembered} nodes remembered, {self._num_remembered} counted"
        for node, count in children.items():
            assert count == self._children[node], f"node {node} counts {self._children[node]} children, has {count}"
        assert sorted(self._leaving) == [n for n, flag in enumerate(self._is_leaving) if flag], "a node leaves twice"

    def _let_leave(self, node: int) -> None:
        if self._is_forgettable(node) and not self._is_leaving[node]:
            self._is_leaving[node] = 1
            self._leaving.append(node)

    def _forget(self) -> None:
        while self._num_remembered > self.max_remembered and self._leaving:
            node = self._leaving.popleft()
            self._is_leaving[node] = 0
            # A head has waited for its tail, which leaves first, and is at least as old.
            while self._is_forgettable(node) and not self._is_leaving[node]:
                if self._num_remembered <= self.max_remembered:
                    self._is_leaving[node] = 1
                    self._leaving.appendleft(node)
                    break
                node = self._remove(node)

    def _is_forgettable(self, node: int) -> bool:
        return (
            not self._copies[node] and not self._children[node] and not self.pins[node] and self._hash[node] is not None
        )

    def _add(self, parent: int, block_hash: BlockHash, now: float) -> int:
        if not self._free:
            self._grow()
        node = self._free.pop()
        self.parent[node] = parent
        self.used[node] = now
        self.hits[node] = 0
        self._hash[node] = block_hash
        self._index[block_hash] = node
        self._children[parent] += 1
        self._num_remembered += 1
        return node

    def _remove(self, node: int) -> int:
        """Forget a node; returns its parent."""
        del self._index[self.hash_of(node)]
        self._hash[node] = None
        self._num_remembered -= 1
        self._free.append(node)
        parent = self.parent[node]
        self._children[parent] -= 1
        return parent

    def _grow(self) -> None:
        """Add free rows; the lowest is taken first, so that a prefix lies in ascending rows."""
        first, zeros = len(self._hash), bytes(_ROWS)
        none = array("i", [NONE]) * _ROWS
        self.parent.extend(none)
        self.used.frombytes(zeros * self.used.itemsize)
        for counts in (self.hits, self.pins, self._children, *self.kids):
            counts.frombytes(zeros * counts.itemsize)
        for blocks in self.block:
            blocks.extend(none)
        self._hash.extend([None] * _ROWS)
        self._copies.extend(zeros)
        self._is_leaving.extend(zeros)
        self._free.extend(range(first + _ROWS - 1, first - 1, -1))
