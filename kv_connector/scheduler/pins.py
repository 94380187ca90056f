"""Prefixes that an operator keeps on the host, each named by its length and its last hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..errors import KVConnectorError
from ..types import BlockHash
from .shared import Shared


class PinnedPrefixes:
    """Owns the pins of tree nodes: whoever pins or unpins one does it here."""

    def __init__(self, shared: Shared) -> None:
        self._grouped = shared.grouped
        self._host = shared.host
        self._clock = shared.clock
        self._num_pins: Counter[tuple[int, BlockHash]] = Counter()

    def pin(self, block_hashes: Sequence[BlockHash]) -> None:
        """Keep the blocks of a prefix, one time more."""
        self._num_pins[_name(block_hashes)] += 1
        for group in range(len(self._grouped.groups)):
            self._grouped.tree.pin(self._grouped.insert(block_hashes, group, self._clock()))

    def unpin(self, block_hashes: Sequence[BlockHash]) -> None:
        """Undo one `pin` of the same prefix. Raises KVConnectorError, and changes nothing, for others."""
        name = _name(block_hashes)
        if name not in self._num_pins:
            raise KVConnectorError(
                f"this prefix of {len(block_hashes)} blocks is not pinned: give all the hashes of one pin_prefix"
            )
        self._num_pins[name] -= 1
        if not self._num_pins[name]:
            del self._num_pins[name]
        for group in range(len(self._grouped.groups)):
            self._host.unpin(self._grouped.find(self._grouped.keys(block_hashes, group)))


def _name(block_hashes: Sequence[BlockHash]) -> tuple[int, BlockHash]:
    """The last hash stands for all in front of it, as far as the prefix goes back to its first block."""
    return len(block_hashes), block_hashes[-1] if block_hashes else BlockHash(b"")
