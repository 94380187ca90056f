"""Block groups: layers that share a block table, the keys of their blocks, and the prefix tree by group.

A group of full attention needs every block of a prefix; one with a sliding window needs the last few, and the engine
gives it no block at all for the others; one whose attention is local to chunks needs those of the chunk that the next
token is in; one with a recurrent state needs the last one, which holds the state at its end. Blocks of different groups
are different copies, so each has a key of its own: the block's hash, and behind it the group where that is not the
first.

Groups may have blocks of different sizes. The engine hashes every so many tokens, no more than the smallest block has:
a block has the hash at its end, which covers all in front of it. Prefixes are counted in hashes, and a hit ends where
blocks of every group do.

Of some engines it may also end inside of blocks: where a prompt has ended, at its last hash, the engine keeps the state
there, and rows of attention are only ever appended to a block. So each group may have a copy of the block that such an
end lies in, under the hash at the end. Of a state it holds the one at that very end; of full attention all rows in
front of it, which serve ends farther in front as well. What the copy holds behind its end is computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

from ..types import BlockHash
from .terms import PLAIN, Terms
from .tree import ROOT, PrefixTree


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share a block table, whose blocks have `hashes_per_block` hashes each. `window_blocks`: how many
    blocks at the end of a prefix a hit needs, 1 for a recurrent state; None for full attention. `states_are_told`: the
    engine names the block of each state (`base.StateBlock`), since its block table is not in the order of tokens.
    `chunk_blocks`: for chunked local attention instead of a window, the blocks of a chunk, of which a hit needs those
    in front of the next token.
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
        """A text that differs between different groups."""
        kind = "full" if self.window_blocks is None else f"window {self.window_blocks}"
        kind = kind if self.chunk_blocks is None else f"chunk {self.chunk_blocks}"
        return f"{'state' if self.states_are_told else kind} of {self.hashes_per_block}"


def describe_groups(groups: Sequence[BlockGroup]) -> str:
    """A text that differs between models with different groups; "" for full attention alone."""
    is_plain = tuple(groups) in ((), (BlockGroup(),))
    return "" if is_plain else ", ".join(group.describe() for group in groups)


def may_truncate(groups: Sequence[BlockGroup]) -> bool:
    """Whether a request whose load failed in part may continue from the blocks in front of the failed ones: with full
    attention alone. Of windows and states a hit loads the last blocks only, and there are none in front of them."""
    return len(groups) == 1 and groups[0].is_full


def group_key(block_hash: BlockHash, group: int) -> BlockHash:
    """The key of a group's copy of a block."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def split_key(key: BlockHash) -> tuple[BlockHash, int]:
    """Hash and group of a key. Hashes have an even number of bytes, so an odd one ends in a group."""
    return (BlockHash(key[:-1]), key[-1]) if len(key) % 2 else (key, 0)


class GroupKeys(Sequence[BlockHash]):
    """Keys of a group's copies of the blocks of a prefix, made lazily; a slice is a list."""

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

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self[:])  # at once, which takes a fraction of one by one


class GroupedTree:
    """The tree by block groups. Nodes of windows have no parent, as the blocks of a window are saved and evicted one by
    one."""

    def __init__(
        self,
        tree: PrefixTree,
        groups: Sequence[BlockGroup],
        drop_last_block: bool = False,
        ends_within: bool = False,
    ) -> None:
        """`drop_last_block` leaves a hit's last block to be computed: a draft layer's last row depends on the token
        behind it, which the block's hash does not cover. `ends_within`: a hit may end inside of blocks; not where its
        last block is left to be computed."""
        self.tree = tree
        self.groups = tuple(groups)
        self.drops_last_block = drop_last_block
        self.ends_within = ends_within and not drop_last_block
        self.hashes_per_hit = math.lcm(*(group.hashes_per_block for group in groups))
        """A hit has a multiple of so many hashes: blocks of every group end there. Where it may end inside of blocks it
        begins at such a multiple, and what storage and other engines bring ends at one."""
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

    def end_key(self, hashes: Sequence[BlockHash], group: int, end: int) -> BlockHash:
        """Name of the group's copy of the block in which the first `end` hashes end."""
        return group_key(hashes[end - 1], group)

    def insert(
        self,
        hashes: Sequence[BlockHash],
        group: int,
        now: float,
        blocks: Sequence[int] | None = None,
        terms: Terms = PLAIN,
    ) -> list[int]:
        """The group's nodes of these blocks of a prefix, of all by default, made where they are not known. Blocks of
        full attention are a range."""
        keys = self.keys(hashes, group)
        blocks = range(len(keys)) if blocks is None else blocks
        if isinstance(blocks, range) and self.groups[group].is_full:
            return self.tree.insert_path(keys, now, blocks.start, blocks.stop, terms)
        return self.tree.insert_apart([keys[block] for block in blocks], now, terms)

    def knows_prefix(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether each of these hashes is known behind the one before it, and the first of them as a prompt's first:
        so far as blocks of full attention end there, for of windows nothing says what they follow. Where prompts end
        inside of blocks, such an end is known like a prompt's first block, and believed to be one: no request looks
        for it there."""
        if len(set(hashes)) < len(hashes) or any(split_key(block_hash)[1] for block_hash in hashes):
            return False  # one is there twice, or the name of another group's copy
        parents = self.tree.parent
        for group in self.full:
            before = ROOT
            for node in map(self.tree.get, self.keys(hashes, group)):
                if node is None or parents[node] != before:
                    return False
                before = node
        return True

    def find(self, keys: Sequence[BlockHash]) -> list[int]:
        """The nodes of these names, those that are known."""
        return [node for key in keys if (node := self.tree.get(key)) is not None]

    def find_of(self, group: int, keys: Sequence[BlockHash]) -> list[int]:
        """The group's nodes of these names: of full attention the leading ones that are known, of windows all that
        are."""
        return self.find(keys) if group in self.windows else self.tree.match(keys)

    def needed(self, first: int, end: int) -> list[range]:
        """Of each group the blocks that a hit from hash `first` to `end` is made of, with the one that it ends in."""
        needed = []
        for group in self.groups:
            rest = end % group.hashes_per_block if self.ends_within else 0
            stop = end // group.hashes_per_block + (rest > 0)
            needed.append(range(max(first // group.hashes_per_block, group.first_needed(stop)), stop))
        return needed

    def may_need(self, group: int, block: int) -> bool:
        """Whether a hit may need this block of a prefix. Of a group that keeps the newest blocks and has smaller ones
        than others have, hits end far apart, and what is not in front of an end is never loaded."""
        if self.ends_within:
            return True
        entry = self.groups[group]
        per_hit = self.hashes_per_hit // entry.hashes_per_block
        return block >= entry.first_needed((block // per_hit + 1) * per_hit)

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
        end; of all the copy under the name of that end, where it is inside of a block."""
        nodes = []
        for index, group in enumerate(self.groups):
            keys, (end, rest) = self.keys(hashes, index), divmod(num_hit_hashes, group.hashes_per_block)
            found = self.find_of(index, keys[group.first_needed(end) : end] if index in self.windows else keys)
            nodes.append(found + self.find([self.end_key(hashes, index, num_hit_hashes)] if rest else []))
        return nodes

    def touch_known(self, hashes: Sequence[BlockHash], num_hit_hashes: int, now: float) -> list[list[int]]:
        """Mark what `known` returns as used."""
        known = self.known(hashes, num_hit_hashes)
        self.tree.touch(chain.from_iterable(known), now)
        return known
