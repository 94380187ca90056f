"""Blocks that did not fit into the form of a host block: known only once they were copied, and tried no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...types import BlockHash

_MOST = 1 << 16
"""That are known, the last ones: a few megabytes."""


class Refusals:
    """What a block holds follows from its hash, and so does whether it fits, until a reset."""

    def __init__(self) -> None:
        self._keys: dict[BlockHash, None] = {}  # the oldest first

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[BlockHash]) -> None:
        """These did not fit."""
        self._keys |= dict.fromkeys(keys)
        while len(self._keys) > _MOST:
            del self._keys[next(iter(self._keys))]

    def first_in(self, keys: Sequence[BlockHash]) -> int:
        """Index of the first of these that is known not to fit; their number where none is."""
        if not self._keys:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self._keys), len(keys))

    def reset(self) -> None:
        """The same hashes may stand for other bytes from now on."""
        self._keys.clear()
