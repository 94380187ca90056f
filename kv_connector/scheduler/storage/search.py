"""How much of a prefix the host and storage have together: what storage is asked, and what follows from its answers.

    full attention       how many blocks it has from the first one on that the host lacks, of each group
    windows and states   which blocks it has of those that ends near that one need, and where none of these ends is
                         whole, of ends farther in front, twice as many each time

A hit may end only where every window is whole, and the farthest end is the likeliest: it is where somebody stopped. So
a store in which each question costs something is asked for a few dozen of thousands of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...index import BlockState, CacheTier, GroupedTree
from ...types import BlockHash
from .grouping import Grouping

_ENDS = 64
"""That the first questions about windows are for."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which of these blocks of a group storage has: of full attention, how many of the leading ones."""

    group: int
    blocks: range


class Search:
    """Of one prefix. Nothing of it is asked or answered twice; it is over when no question is left.

    `host_end`: so many hashes of it can be hit with what the host had, or was to have, at the beginning. `questions`
    are to be asked.
    """

    def __init__(self, grouped: GroupedTree, host: CacheTier, grouping: Grouping, hashes: Sequence[BlockHash]) -> None:
        """A hit has all of `hashes` at most."""
        self._grouped = grouped
        self._host = host
        self.hashes = hashes = hashes[: self._useful(len(hashes))]
        self._keys = [grouped.keys(hashes, group) for group in range(len(grouped.groups))]
        held = {group: self._num_held(group) for group in grouped.full}
        self.first = {group: grouping.start(num_held) for group, num_held in held.items()}
        """By group of full attention: where the object begins that has the first block which the host lacks."""
        self._on_host = held
        self._found = dict.fromkeys(held, 0)  # of each of these groups, what storage has: leading blocks
        sizes = [group.hashes_per_block for group in grouped.groups]
        # No end behind it is whole in every group of full attention.
        self._most = min([len(hashes), *(len(self._keys[group]) * sizes[group] for group in held)])
        on_host = (num_held * sizes[group] for group, num_held in held.items())
        self.host_end = grouped.hit_end(0, min([self._most, *on_host]), self._is_held)
        self._stored: dict[int, set[int]] = {group: set() for group in grouped.windows}
        self._num_ends = _ENDS
        self._low = self._most  # windows of ends behind it have been asked about
        ranges = [(group, range(self.first[group], len(self._keys[group]))) for group in grouped.full]
        self.questions = [Question(group, blocks) for group, blocks in ranges if held[group] < blocks.stop]
        self._num_open = len(self.questions)
        if not self.questions:
            self._ask_on()

    def take(self) -> list[Question]:
        """The questions, which are being asked."""
        taken, self.questions = self.questions, []
        return taken

    def stop(self) -> None:
        """Storage is asked no more."""
        self.questions = []
        self._num_open = 0

    def answer(self, question: Question, found: int) -> bool:
        """Storage has those of the blocks whose bits are set. Whether the search is over; else there may be more
        questions."""
        if question.group in self._stored:
            self._stored[question.group].update(b for i, b in enumerate(question.blocks) if found >> i & 1)
        else:
            num_leading = (~found & found + 1).bit_length() - 1
            self._found[question.group] = num_found = question.blocks.start + num_leading
            num_blocks = max(self._on_host[question.group], num_found)
            most = min(self._most, num_blocks * self._grouped.groups[question.group].hashes_per_block)
            self._low = self._most = self._useful(most)
        self._num_open -= 1
        if not self._num_open:
            self._ask_on()
        return not self._num_open

    def fit(self, most: int | None = None) -> int:
        """The farthest end of a hit for which no more than `most` blocks have to come; no farther than `host_end` where
        there is none."""
        grouped, end = self._grouped, self._most
        lacks = {group: self._lacking(group) for group in grouped.full}
        for group, blocks in lacks.items():
            num_found = bisect_left(blocks, self._found[group])
            num_found = num_found if most is None else min(num_found, most)
            if num_found < len(blocks):
                end = min(end, blocks[num_found] * grouped.groups[group].hashes_per_block)
        end = grouped.hit_end(0, end, self._is_there)
        while most is not None and end > self.host_end and self._num_lacking(lacks, end) > most:
            end = grouped.whole_end(0, end - grouped.hashes_per_hit, self._is_there)
        return end

    def stop_of(self, group: int, end: int) -> int:
        """Of full attention, so many blocks have to be there for a hit to end here: with the one that is left to be
        computed behind it. Of windows, all that are `needed`."""
        if group in self._stored:
            return len(self._keys[group])
        return -(-(end + self._grouped.drops_last_block) // self._grouped.groups[group].hashes_per_block)

    def num_lacking(self, end: int) -> int:
        """Blocks that have to come for this end."""
        return self._num_lacking({group: self._lacking(group) for group in self._grouped.full}, end)

    def needed(self, end: int) -> list[Sequence[int]]:
        """By group the blocks that have to be on the host for a hit to end here: of full attention from `first` on, and
        behind them those with which the last of them is stored."""
        here, behind = self._grouped.needed(0, end), self._grouped.needed(0, self._whole_behind(end))
        return [
            range(self.first[group], max(self.stop_of(group, end), self._found[group]))
            if group in self._grouped.full
            else sorted({*blocks, *behind[group]})
            for group, blocks in enumerate(here)
        ]

    def _useful(self, num_hashes: int) -> int:
        """How many of these may make a hit longer: whole blocks of every group, and what is left to be computed."""
        return num_hashes if self._grouped.drops_last_block else num_hashes - num_hashes % self._grouped.hashes_per_hit

    def _whole_behind(self, end: int) -> int:
        """Where windows have to be whole, too, for a hit to end here: nowhere else, but where they alone say that there
        is a block to be left to be computed."""
        if self.first or not self._grouped.drops_last_block:
            return end
        return self._grouped.whole_end(0, self._most, self._is_there)

    def held_windows(self, end: int) -> list[int]:
        """Nodes of what the host has of the windows for this end."""
        needed = self.needed(end)
        return self._grouped.find([self._keys[group][block] for group in self._stored for block in needed[group]])

    def _ask_on(self) -> None:
        """All has been answered that was asked: ask for the windows of ends farther in front, if it matters."""
        self.questions = []
        grouped, high = self._grouped, self._low
        end = grouped.hit_end(0, self._most, self._is_there)
        if not self._stored or end >= high or high <= self.host_end:
            return
        self._low = max(self.host_end, high - self._num_ends * grouped.hashes_per_hit)
        self._num_ends *= 2
        lowest, highest = grouped.needed(0, self._low), grouped.needed(0, high)
        blocks = [(group, range(lowest[group].start, highest[group].stop)) for group in self._stored]
        self.questions = [Question(group, asked) for group, asked in blocks if asked]
        self._num_open = len(self.questions)

    def _num_held(self, group: int) -> int:
        """Leading blocks of full attention that the host has, or is to have."""
        path = self._grouped.tree.match(self._keys[group][:])
        absent = self._host.absent(path)
        return absent[0] if absent else len(path)

    def _lacking(self, group: int) -> list[int]:
        """The blocks of full attention, from `first` on, that are not on the host."""
        first, per_block = self.first[group], self._grouped.groups[group].hashes_per_block
        keys = self._keys[group][first : -(-self._most // per_block)]
        path = self._grouped.tree.match(keys)
        return [first + i for i in (*self._host.absent(path), *range(len(path), len(keys)))]

    def _num_lacking(self, lacks: Mapping[int, Sequence[int]], end: int) -> int:
        needed = self.needed(end)
        num_full = sum(bisect_left(blocks, self.stop_of(group, end)) for group, blocks in lacks.items())
        return num_full + sum(not self._is_held(group, block) for group in self._stored for block in needed[group])

    def _is_held(self, group: int, block: int) -> bool:
        """Whether the host has the block, or is to have it."""
        node = self._grouped.tree.get(self._keys[group][block])
        return node is not None and self._host.node_state(node) is not BlockState.ABSENT

    def _is_there(self, group: int, block: int) -> bool:
        return block in self._stored[group] or self._is_held(group, block)
