"""The paths that a tree has matched last: the same prompt is matched at each step for as long as it waits."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from ..types import BlockHash

_PATHS = 16
"""Remembered at a time. Each is found by its prompt's last block, as that prompt comes again while it waits, and by its
first block, the last such path, as other prompts share a part of it: a system prompt, or all but the end."""


class RecentPaths:
    """Of one tree. A hash names its block and all in front of it, and a node stays for as long as one behind it does.
    So where a node of a path is still there, all in front of it are, and a binary search finds the last one that the
    path shares with a prompt. A node is still there if its row has the hash of before and was not given to a new node
    since."""

    def __init__(self, known: Sequence[BlockHash | None], added: array[int]) -> None:
        """Columns of the tree: hashes, None where there is no node, and in which addition of nodes a row became one."""
        self._known = known
        self._added = added
        self._paths: dict[BlockHash, tuple[list[int], int]] = {}  # by two hashes each: nodes, additions by then

    def shared(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The nodes of a prefix of `hashes`, which is not empty: the longest one that lies on the path of the same
        prompt, or else of the last one with the same first block."""
        paths = self._paths
        nodes, num_additions = paths.get(hashes[-1]) or paths.get(hashes[0]) or ([], 0)
        known, added = self._known, self._added

        def is_other(index: int) -> bool:
            node = nodes[index]
            return added[node] > num_additions or known[node] != hashes[index]

        most = min(len(nodes), len(hashes))
        if most and not is_other(most - 1):
            return nodes[:most]
        return nodes[: bisect_left(range(most), True, key=is_other)]

    def remember(self, hashes: Sequence[BlockHash], nodes: list[int], num_additions: int) -> None:
        """`nodes`, a list that nobody may change any more, are those of the first of `hashes` after so many additions
        of nodes. `hashes` is not empty."""
        for name in (hashes[0], hashes[-1]):
            self._paths.pop(name, None)
            self._paths[name] = nodes, num_additions
        while len(self._paths) > 2 * _PATHS:
            del self._paths[next(iter(self._paths))]
