"""Which blocks storage keeps as one object: a fixed number of consecutive blocks of a prefix.

    prefix    0  1  2  3 | 4  5  6  7 | 8  9        groups of four

The first block of a group is at a multiple of the group size, so it follows from a block's place in its prefix which
group it is in. A block *ends* the group of itself and all in front of it in its group: at the last place of a group
that is a whole one, and elsewhere a shorter one, which is stored where a request has ended. With groups of one block
every block ends its own, and so does, whatever the size, a block of a window or a state: what is in front of it may be
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ...index import CacheTier, GroupedTree, split_key
from ..ranks import RankStates


class Grouping:
    """The group size, which ranks report, and the groups of host blocks."""

    def __init__(self, grouped: GroupedTree, host: CacheTier, ranks: RankStates) -> None:
        self._windows = grouped.windows
        self._ends_within = grouped.ends_within
        self._host = host
        self._tree = host.tree
        self._ranks = ranks

    @property
    def num_blocks(self) -> int:
        """In a whole group of full attention: a power of two. It is known once there are host blocks."""
        return self._ranks.group_blocks

    def is_single(self, block_id: int) -> bool:
        """Whether the host block, which has a copy, is of a window or a state."""
        return bool(self._windows) and self._is_of_window(self._host.nodes_of((block_id,))[0])

    def start(self, place: int) -> int:
        """Where the group begins that has the block at this place of a prefix."""
        return place - place % self.num_blocks

    def parts(self, wanted: Sequence[int], blocks: Sequence[int], singly: bool, most: int) -> list[list[int]]:
        """Indices of blocks, in order, cut into jobs of about so many: no object is cut."""
        parts: list[list[int]] = []
        for _, group in groupby(wanted, lambda i: blocks[i] if singly else self.start(blocks[i])):
            places = list(group)
            if not parts or len(parts[-1]) + len(places) > most:
                parts.append([])
            parts[-1] += places
        return parts

    def whole(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Those of these host blocks that are copied to their end, for nobody looks for others in storage, and that are
        not to be dropped some time: storage would keep them."""
        if not (self._ends_within or self._tree.terms.were_given):
            return block_ids
        nodes, inside, transient = self._host.nodes_of(block_ids), self._tree.inside, self._tree.terms.transient
        pairs = zip(block_ids, nodes, strict=True)
        return [block_id for block_id, node in pairs if not (inside[node] or transient[node])]

    def ending_whole(self, block_ids: Sequence[int]) -> list[int]:
        """Those of these host blocks that end whole groups."""
        size, depth = self.num_blocks, self._tree.depth
        if size == 1:
            return list(block_ids)
        nodes = self._host.nodes_of(block_ids)
        return [
            block_id
            for block_id, node in zip(block_ids, nodes, strict=True)
            if (depth[node] + 1) % size == 0 or self._is_of_window(node)
        ]

    def ending_in(self, block_id: int) -> list[int]:
        """The host blocks of the group that this one ends, in order; none where one of them is not
        there, or this one has lost its copy."""
        size = self.num_blocks
        if size == 1:
            return [block_id]
        (node,) = nodes = self._host.nodes_of((block_id,))
        if self._host.blocks_of(nodes) != [block_id]:
            return []
        if self._is_of_window(node):
            return [block_id]
        for _ in range(self._tree.depth[node] % size):
            node = self._tree.parent[node]
            nodes.append(node)
        host_ids = self._host.blocks_of(reversed(nodes))
        return [] if self._host.absent(nodes) else host_ids

    def _is_of_window(self, node: int) -> bool:
        return bool(self._windows) and split_key(self._tree.hash_of(node))[1] in self._windows
