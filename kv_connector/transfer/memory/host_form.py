"""How the pieces of a block lie in a host block, whatever they are like on the device.

A host block holds every region's piece, in layer order:

    host block    | layer 0: piece, piece | layer 1: piece | ... | padding to 4 KiB |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .layout import CacheLayout

PIECE_ALIGN = 16
"""A piece's offset in its host block is a multiple of this, the widest load of a GPU thread."""
BLOCK_ALIGN = 4096
"""Host blocks start on pages, as page locking and direct I/O want it."""


class HostForm:
    """Where the pieces of `layout` lie in a host block, and in how many bytes. It never changes.

    offsets: by region, where its piece starts in a host block, in bytes.
    stored_bytes: by region, how many bytes its piece has there.
    block_bytes: size of a host block, a multiple of `BLOCK_ALIGN`.
    moved_bytes: that a copy of one block moves over the link: `block_bytes` less the padding.
    """

    def __init__(self, layout: CacheLayout, stored_bytes: Sequence[int]) -> None:
        """Of so many bytes for each region of the layout; engines use `raw_form`."""
        offsets: list[int] = []
        end = 0
        for num_bytes in stored_bytes:
            offsets.append(_round_up(end, PIECE_ALIGN))
            end = offsets[-1] + num_bytes
        self.layout = layout
        self.offsets = tuple(offsets)
        self.stored_bytes = tuple(stored_bytes)
        self.block_bytes = _round_up(end, BLOCK_ALIGN)
        self._bytes_before = [0, *accumulate(stored_bytes)]  # of each region
        self.moved_bytes = self._bytes_before[-1]

    def bytes_of(self, regions: range) -> int:
        """Bytes of one block's pieces in these consecutive regions, paddings left out."""
        return self._bytes_before[regions.stop] - self._bytes_before[regions.start]

    def host_slice(self, regions: range) -> tuple[int, int]:
        """Offset and length, in bytes, of the part of a host block that holds these consecutive regions."""
        start, last = self.offsets[regions.start], regions.stop - 1
        return start, self.offsets[last] + self.stored_bytes[last] - start

    def columns(self, host: torch.Tensor) -> list[torch.Tensor]:
        """By region, its pieces in host blocks: of `host`, uint8 of shape (num_blocks, block_bytes), views of shape
        (num_blocks, stored_bytes)."""
        return [host[:, at : at + size] for at, size in zip(self.offsets, self.stored_bytes, strict=True)]


def raw_form(layout: CacheLayout) -> HostForm:
    """Pieces lie on the host as they do on the device."""
    return HostForm(layout, [region.piece_bytes for region in layout.regions])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
