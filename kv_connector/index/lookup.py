"""What of a request can be loaded: the longest prefix whose bytes every block group still has on a tier.

Layers that share a block table are a group. One of full attention needs every block of the prefix; one with a sliding
window needs the last few, and the engine gives it no block at all for the others; one whose attention is local to
chunks needs those of the chunk that the next token is in; one with a recurrent state needs the last one, which holds
the state at its end. Blocks of different groups are different copies, so each has a key of its
own: the block's hash, and behind it the group where that is not the first.

Groups may have blocks of different sizes. The engine hashes every so many tokens, no more than the smallest block has:
a block has the hash at its end, which covers all in front of it. Prefixes are counted in hashes, and a hit ends where
blocks of every group do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from ..types import BlockHash
from .states import BlockState
from .tier import CacheTier
from .tree import PrefixTree


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share a block table, whose blocks have `hashes_per_block` hashes each.

    `window_blocks`: of its blocks those that must be there at the end of a prefix for the window to be whole, 1 for a
    recurrent state; None for full attention. `states_are_told`: a state is where the engine says (`base.StateBlock`),
    since its block table is not in the order of tokens. `chunk_blocks`: in place of a window, the blocks of a chunk of
    local attention, of which those in front of the next token must be there.
    """

    window_blocks: int | None = None
    hashes_per_block: int = 1
    states_are_told: bool = False
    chunk_blocks: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether a prefix needs every block."""
        return self.window_blocks is None and self.chunk_blocks is None

    def first_needed(self, end: int) -> int:
        """Of a prefix of `end` blocks of this group, the first that must be there; `end` where none must."""
        if self.chunk_blocks is not None:
            return end - end % self.chunk_blocks
        return 0 if self.window_blocks is None else max(0, end - self.window_blocks)

    def first_held(self, num_tokens: int, block_tokens: int) -> int:
        """The first block that an engine surely has yet of a request with so many tokens computed, its blocks in front
        of the next token's window or chunk being gone."""
        if self.chunk_blocks is not None:
            return self.first_needed(num_tokens // block_tokens)
        return self.first_needed(-(-num_tokens // block_tokens))

    def describe(self) -> str:
        """In words, of which other groups have others."""
        kind = "full" if self.window_blocks is None else f"window {self.window_blocks}"
        kind = kind if self.chunk_blocks is None else f"chunk {self.chunk_blocks}"
        return f"{'state' if self.states_are_told else kind} of {self.hashes_per_block}"


def describe_groups(groups: Sequence[BlockGroup]) -> str:
    """What differs between models of other groups; "" for full attention alone."""
    is_plain = tuple(groups) in ((), (BlockGroup(),))
    return "" if is_plain else ", ".join(group.describe() for group in groups)


def may_truncate(groups: Sequence[BlockGroup]) -> bool:
    """Whether a request of which some blocks did not come may go on behind those in front of them: with full attention
    alone. Of a window, and of states, a hit brings the last blocks only, and in front of them there are none."""
    return len(groups) == 1 and groups[0].is_full


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

    __slots__ = ("_hashes", "_per_block", "_suffix")

    def __init__(self, hashes: Sequence[BlockHash], group: int, hashes_per_block: int = 1) -> None:
        self._hashes = hashes
        self._suffix = group_key(BlockHash(b""), group)
        self._per_block = hashes_per_block

    def __len__(self) -> int:
        return len(self._hashes) // self._per_block

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        hashes, size, suffix = self._hashes, self._per_block, self._suffix
        blocks = range(size - 1, len(self) * size, size)  # where they end
        if isinstance(index, slice):
            return [BlockHash(hashes[end] + suffix) for end in blocks[index]]
        return BlockHash(hashes[blocks[index]] + suffix)


class GroupedTree:
    """The tree as groups see it. Nodes of windows have no parent: the blocks of a window come and go one by one."""

    def __init__(self, tree: PrefixTree, groups: Sequence[BlockGroup], drop_last_block: bool = False) -> None:
        """`drop_last_block` leaves a hit's last block to be computed: a draft layer's last row depends on the token
        behind it, which the block's hash does not cover."""
        self.tree = tree
        self.groups = tuple(groups)
        self.drops_last_block = drop_last_block
        self.hashes_per_hit = math.lcm(*(group.hashes_per_block for group in groups))
        """A hit has a multiple of so many hashes: blocks of every group end there."""
        self.windows = tuple(g for g, group in enumerate(self.groups) if not group.is_full)
        """Groups that keep only the newest blocks of a prefix."""
        self.full = tuple(g for g in range(len(self.groups)) if g not in self.windows)
        """Groups of full attention."""

    @property
    def has_windows(self) -> bool:
        """Whether some group keeps only the newest blocks of a prefix."""
        return len(self.windows) > 0

    def keys(self, hashes: Sequence[BlockHash], group: int) -> Sequence[BlockHash]:
        """Names of the group's copies of the blocks of a prefix, made as they are looked at."""
        per_block = self.groups[group].hashes_per_block
        return GroupKeys(hashes, group, per_block) if group or per_block > 1 else hashes

    def insert(
        self, hashes: Sequence[BlockHash], group: int, now: float, blocks: Sequence[int] | None = None
    ) -> list[int]:
        """The group's nodes of these blocks of a prefix, of all by default, made where they are not known. Blocks of
        full attention are a range."""
        keys = self.keys(hashes, group)
        blocks = range(len(keys)) if blocks is None else blocks
        if isinstance(blocks, range) and self.groups[group].is_full:
            return self.tree.insert_path(keys, now, blocks.start, blocks.stop)
        return self.tree.insert_apart([keys[block] for block in blocks], now)

    def find(self, keys: Sequence[BlockHash]) -> list[int]:
        """The nodes of these names, those that are known."""
        return [node for key in keys if (node := self.tree.get(key)) is not None]

    def find_of(self, group: int, keys: Sequence[BlockHash]) -> list[int]:
        """The group's nodes of these names: of full attention the leading ones that are known, of windows all that
        are."""
        return self.find(keys) if group in self.windows else self.tree.match(keys)

    def needed(self, first: int, end: int) -> list[range]:
        """Of each group the blocks that a hit from hash `first` to `end` is made of."""
        needed = []
        for group in self.groups:
            stop = end // group.hashes_per_block
            needed.append(range(max(first // group.hashes_per_block, group.first_needed(stop)), stop))
        return needed

    def hit_end(self, first: int, end: int, has: Callable[[int, int], bool]) -> int:
        """As `whole_end`, where a hit ends: where the last block is left to be computed, in front of that, which is the
        last in front of `end` that full attention has. Engines keep recurrent states, of which there may be one alone,
        where a hit ends then."""
        if self.drops_last_block:
            end = (end if self.full else self.whole_end(first, end, has)) - 1
        return self.whole_end(first, max(end, first), has)

    def whole_end(self, first: int, end: int, has: Callable[[int, int], bool]) -> int:
        """The largest end of a hit from hash `first` on, no more than `end`, at which blocks of every group end and
        every window is whole. `has(group, block)` says whether a block of a window is there."""
        while True:
            fitted = end - end % self.hashes_per_hit
            for group in self.windows:
                fitted = self._whole_window(group, first, fitted, has)
            if fitted == end:
                return end
            end = fitted

    def _whole_window(self, index: int, first: int, end: int, has: Callable[[int, int], bool]) -> int:
        group = self.groups[index]
        size = group.hashes_per_block
        stop = end // size
        block = stop - 1
        while block >= max(first // size, group.first_needed(stop)):
            if not has(index, block):
                stop = block
            block -= 1
        return stop * size

    def known(self, hashes: Sequence[BlockHash], num_hit_hashes: int) -> list[list[int]]:
        """Nodes that a request makes use of, by group: its known prefix, and of windows what lies in front of its hit's
        end."""
        nodes = []
        for index, group in enumerate(self.groups):
            keys, end = self.keys(hashes, index), num_hit_hashes // group.hashes_per_block
            nodes.append(self.find_of(index, keys[group.first_needed(end) : end] if index in self.windows else keys))
        return nodes

    def touch_known(self, hashes: Sequence[BlockHash], num_hit_hashes: int, now: float) -> list[list[int]]:
        """Mark what `known` returns as used."""
        known = self.known(hashes, num_hit_hashes)
        self.tree.touch(chain.from_iterable(known), now)
        return known


class Lookup:
    """Searches one tier; changes nothing. Positions in a prefix, and lengths, count its hashes: those of a hit are
    multiples of `GroupedTree.hashes_per_hit`."""

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

        return grouped.hit_end(first, max(end, first), is_resident) - first

    def hit(self, hashes: Sequence[BlockHash], first: int, length: int) -> Hit:
        """The copies that a hit of `length`, no more than `find` says, is made of."""
        indices, nodes = [], []
        for index, blocks in enumerate(self._grouped.needed(first, first + length)):
            nodes.append(self._grouped.find_of(index, self._grouped.keys(hashes, index)[blocks.start : blocks.stop]))
            indices.append(blocks)
        return Hit(tuple(indices), tuple(nodes))

    def num_copies(self, first: int, length: int) -> int:
        """How many copies a hit is made of."""
        return sum(map(len, self._grouped.needed(first, first + length)))
