"""What of a request can be loaded: the longest prefix whose bytes every block group still has on a tier.

Layers that share a block table are a group. One of full attention needs every block of the prefix; one with a sliding
window needs the last few, and the engine gives it no block at all for the others. Blocks of different groups are
different copies, so each has a key of its own: the block's hash, and behind it the group where that is not the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from ..types import BlockHash
from .states import BlockState
from .tier import CacheTier
from .tree import PrefixTree


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share a block table. `window_blocks`: blocks that a prefix's last ones must hold for the window to
    be whole; None for full attention."""

    window_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """Of group g the blocks `indices[g]` are loaded, which are the nodes `nodes[g]`."""

    indices: tuple[range, ...]
    nodes: tuple[list[int], ...]


def group_key(block_hash: BlockHash, group: int) -> BlockHash:
    """The name of a group's copy of a block."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def split_key(key: BlockHash) -> tuple[BlockHash, int]:
    """Hash and group of a key. Hashes have an even number of bytes, so an odd one ends in a group."""
    return (BlockHash(key[:-1]), key[-1]) if len(key) % 2 else (key, 0)


class GroupKeys(Sequence[BlockHash]):
    """Names of a group's copies of blocks. A slice is a list: nobody pays for the names of a prefix's other blocks."""

    __slots__ = ("_group", "_hashes")

    def __init__(self, hashes: Sequence[BlockHash], group: int) -> None:
        self._hashes = hashes
        self._group = group

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [group_key(block_hash, self._group) for block_hash in self._hashes[index]]
        return group_key(self._hashes[index], self._group)


class GroupedTree:
    """The tree as groups see it. Nodes of windows have no parent: the blocks of a window come and go one by one."""

    def __init__(self, tree: PrefixTree, groups: Sequence[BlockGroup]) -> None:
        self.tree = tree
        self.groups = tuple(groups)

    @property
    def has_windows(self) -> bool:
        """Whether some group keeps only the newest blocks of a prefix."""
        return any(group.window_blocks is not None for group in self.groups)

    def keys(self, hashes: Sequence[BlockHash], group: int) -> Sequence[BlockHash]:
        """Names of the group's copies of these blocks, made as they are looked at."""
        return GroupKeys(hashes, group) if group else hashes

    def insert(self, hashes: Sequence[BlockHash], group: int, now: float, first: int = 0) -> list[int]:
        """The group's nodes of `hashes[first:]`, made where they are not known."""
        if self.groups[group].window_blocks is None:
            return self.tree.insert_path(self.keys(hashes, group), now, first)
        return [self.tree.insert_path((key,), now)[0] for key in self.keys(hashes[first:], group)]

    def find(self, hashes: Sequence[BlockHash], group: int) -> list[int]:
        """The group's nodes of these blocks, those that are known."""
        return [node for key in self.keys(hashes, group) if (node := self.tree.get(key)) is not None]

    def known(self, hashes: Sequence[BlockHash], num_hit_blocks: int) -> list[int]:
        """Nodes that a request makes use of: its known prefix, and of windows what lies in front of its hit's end."""
        nodes: list[int] = []
        for index, group in enumerate(self.groups):
            if group.window_blocks is None:
                nodes += self.tree.match(self.keys(hashes, index))
            else:
                tail = hashes[max(0, num_hit_blocks - group.window_blocks) : num_hit_blocks]
                nodes += self.find(tail, index)
        return nodes


class Lookup:
    """Searches one tier; changes nothing."""

    def __init__(self, grouped: GroupedTree, tier: CacheTier, drop_last_block: bool = False) -> None:
        """`drop_last_block` leaves the hit's last block to be computed: a draft layer's last row depends on the token
        behind it, which the block's hash does not cover."""
        self._grouped = grouped
        self._tier = tier
        self._drop_last_block = drop_last_block
        self._windows = [(g, w) for g, group in enumerate(grouped.groups) if (w := group.window_blocks) is not None]

    def find(self, hashes: Sequence[BlockHash], first: int, stop: int) -> int:
        """How many blocks from `first` on, in front of `stop`, can be loaded."""
        tree, grouped = self._grouped.tree, self._grouped
        end = min(stop, len(hashes))
        for index, group in enumerate(grouped.groups):
            if group.window_blocks is None:
                path = tree.match(grouped.keys(hashes[first:end], index))
                end = min(end, first + self._tier.resident_prefix(path))
        end = self._fit_windows(hashes, first, max(end, first))
        if self._drop_last_block:
            end = self._fit_windows(hashes, first, max(end - 1, first))
        return end - first

    def hit(self, hashes: Sequence[BlockHash], first: int, num_blocks: int) -> Hit:
        """The copies that a hit of `num_blocks`, no more than `find` says, is made of."""
        end = first + num_blocks
        indices = []
        nodes = []
        for index, group in enumerate(self._grouped.groups):
            if group.window_blocks is None:
                start = first
                nodes.append(self._grouped.tree.match(self._grouped.keys(hashes[start:end], index)))
            else:
                start = max(first, end - group.window_blocks)
                nodes.append(self._grouped.find(hashes[start:end], index))
            indices.append(range(start, end))
        return Hit(tuple(indices), tuple(nodes))

    def _fit_windows(self, hashes: Sequence[BlockHash], first: int, end: int) -> int:
        """The largest end at which every window is whole."""
        fitted = end
        while True:
            for group, window in self._windows:
                fitted = self._fit_window(group, window, hashes, first, fitted)
            if fitted == end:
                return end
            end = fitted

    def _fit_window(self, group: int, window: int, hashes: Sequence[BlockHash], first: int, end: int) -> int:
        index = end - 1
        while index >= max(first, end - window):
            node = self._grouped.tree.get(group_key(hashes[index], group))
            if node is None or self._tier.node_state(node) is not BlockState.RESIDENT:
                end = index
            index -= 1
        return end
