"""A prefix tree for engines that show fragments of prefixes: blocks that follow one another, and not what is in front.

A block's chained hash says that it has one predecessor, but not which. So the first block of a fragment follows
nothing, as far as the tree knows, until another fragment shows what it follows. By then both have nodes, and one
becomes the other's parent; `depth` counts from the first block of the fragment in which a node came.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..types import BlockHash, Tier
from .terms import PLAIN, Terms
from .tree import NONE, ROOT, PrefixTree


class FragmentTree(PrefixTree):
    """See `PrefixTree` for the calls."""

    def insert_path(
        self,
        hashes: Sequence[BlockHash],
        now: float,
        first: int = 0,
        stop: int | None = None,
        terms: Terms = PLAIN,
    ) -> list[int]:
        """As `PrefixTree.insert_path`, where `hashes` may be any fragment, and some of its blocks be known that come
        behind others that are not."""
        stop = len(hashes) if stop is None else stop
        if first >= stop:
            return []
        get, parents, nodes = self._index.get, self.parent, []
        parent = get(hashes[first - 1]) if first else ROOT
        if parent is None:
            parent = self.insert_path(hashes, now, 0, first, terms)[-1]
        path = hashes[first:stop]
        found = [*map(get, path)]
        index = 0
        while index < len(found):
            node, end = found[index], index + 1
            if node is not None:
                if parents[node] != parent != ROOT:
                    self._learn(node, parent)
                nodes.append(node)
            else:
                while end < len(found) and found[end] is None:
                    end += 1
                nodes += self._add(parent, path[index:end], now, terms)
            parent, index = nodes[-1], end
        return nodes

    def on_path(self, path: Sequence[BlockHash], nodes: Sequence[int]) -> list[int]:
        """As `PrefixTree.on_path`, where depths do not say which blocks of a path nodes are."""
        names, named = set(path), self.hashes_of(nodes)
        if names.isdisjoint(named):
            return []
        return [node for node, name in zip(nodes, named, strict=True) if name in names]

    def _learn(self, node: int, parent: int) -> None:
        """The parent of a node has become known."""
        assert self.parent[node] == ROOT, f"block {self.hash_of(node).hex()} has two parents"
        self.parent[node] = parent
        self._keeps[ROOT] -= 1
        self._keeps[parent] += 1
        for tier in Tier:
            if self.block[tier][node] != NONE:
                self.kids[tier][ROOT] -= 1
                self.kids[tier][parent] += 1

    def _check_depths(self, nodes: NDArray[np.intp], depths: NDArray[np.intc], of_parents: NDArray[np.intc]) -> None:
        wrong = nodes[(depths != 0) & (depths != of_parents + 1)]
        assert not wrong.size, f"node {wrong[0]} is not where its fragment began, nor behind its parent"
