"""What of a request can be loaded: the longest prefix whose bytes every block group still has on a tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import BlockHash
from .groups import GroupedTree
from .states import BlockState
from .tier import CacheTier


@dataclass(frozen=True, slots=True)
class Hit:
    """Of group g the blocks `indices[g]` are loaded, which are the nodes `nodes[g]`."""

    indices: tuple[range, ...]
    nodes: tuple[list[int], ...]


class Lookup:
    """Searches one tier; changes nothing. Positions in a prefix, and lengths, count its hashes: those of a hit are
    multiples of `GroupedTree.hashes_per_hit`, but where it may end inside of blocks."""

    def __init__(self, grouped: GroupedTree, tier: CacheTier) -> None:
        self._grouped = grouped
        self._tier = tier

    def find(self, hashes: Sequence[BlockHash], first: int, stop: int) -> int:
        """How much from `first` on, in front of `stop`, can be loaded."""
        tree, grouped = self._grouped.tree, self._grouped
        if first % grouped.hashes_per_hit:
            return 0
        end = most = min(stop, len(hashes))
        for group in grouped.full:
            size = grouped.groups[group].hashes_per_block
            last = min(-(-end // size), most // size)  # also the block that the end of another group lies in
            path = tree.match(grouped.keys(hashes, group)[first // size : last])
            end = min(end, first + size * self._tier.resident_prefix(path))
        keys = {group: grouped.keys(hashes, group) for group in grouped.windows}

        def is_resident(group: int, block: int) -> bool:
            node = tree.get(keys[group][block])
            return node is not None and self._tier.node_state(node) is BlockState.RESIDENT

        whole = grouped.hit_end(first, max(end, first), is_resident)
        return (self._end_within(hashes, whole, most) if grouped.ends_within else whole) - first

    def hit(self, hashes: Sequence[BlockHash], first: int, length: int) -> Hit:
        """The copies that a hit of `length`, no more than `find` says, is made of."""
        grouped, end = self._grouped, first + length
        indices, nodes = [], []
        for index, blocks in enumerate(grouped.needed(first, end)):
            num_whole = len(blocks) - (end < blocks.stop * grouped.groups[index].hashes_per_block)
            keys = grouped.keys(hashes, index)[blocks.start : blocks.start + num_whole]
            last = self._last_block(hashes, index, end) if num_whole < len(blocks) else None
            nodes.append(grouped.find_of(index, keys) + ([last] if last is not None else []))
            indices.append(blocks)
        return Hit(tuple(indices), tuple(nodes))

    def num_copies(self, first: int, length: int) -> int:
        """How many copies a hit is made of."""
        return sum(map(len, self._grouped.needed(first, first + length)))

    def _end_within(self, hashes: Sequence[BlockHash], whole: int, most: int) -> int:
        """The farthest end of a hit, up to `most`, where blocks of some groups do not end; `whole` where there is none
        behind it, which is the last end at those of all groups."""
        grouped = self._grouped
        for group in grouped.full:
            most = self._reach(hashes, group, whole, most)
        for end in range(most, whole, -1):
            if all(self._serves(hashes, group, end) for group in grouped.windows):
                return end
        return whole

    def _reach(self, hashes: Sequence[BlockHash], group: int, whole: int, most: int) -> int:
        """How far full attention goes on behind `whole`, up to `most`: rows of a block serve all ends in front."""
        size = self._grouped.groups[group].hashes_per_block
        path = self._grouped.tree.match(self._grouped.keys(hashes, group)[whole // size : most // size])
        end = whole + size * self._tier.resident_prefix(path)
        behind = range(min(end + size, len(hashes)), end, -1)
        return next((min(e, most) for e in behind if self._resident(hashes, group, e) is not None), end)

    def _serves(self, hashes: Sequence[BlockHash], group: int, end: int) -> bool:
        """Whether all that a hit needs of a window, or the state, is there for this end."""
        size = self._grouped.groups[group].hashes_per_block
        stop = end // size
        if end % size:
            return self._grouped.groups[group].states_are_told and self._resident(hashes, group, end) is not None
        blocks = range(self._grouped.groups[group].first_needed(stop), stop)
        return all(self._resident(hashes, group, (block + 1) * size) is not None for block in blocks)

    def _last_block(self, hashes: Sequence[BlockHash], group: int, end: int) -> int | None:
        """The node of a copy of the block that `end` lies in: of a state of this end, of attention with all rows in
        front of it."""
        size = self._grouped.groups[group].hashes_per_block
        last = end if group in self._grouped.windows else min(-(-end // size) * size, len(hashes))
        ends = range(last, end - 1, -1)
        return next((node for e in ends if (node := self._resident(hashes, group, e)) is not None), None)

    def _resident(self, hashes: Sequence[BlockHash], group: int, end: int) -> int | None:
        """The node of the copy under the name of this end, if it is there."""
        node = self._grouped.tree.get(self._grouped.end_key(hashes, group, end))
        return node if node is not None and self._tier.node_state(node) is BlockState.RESIDENT else None
