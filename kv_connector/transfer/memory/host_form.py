"""The layout of a block's pieces in a host block.

A host block holds every region's piece, in layer order:

    host block    | layer 0: piece, piece | layer 1: piece | ... | padding to 4 KiB |

    raw           pieces have the bytes that they have on the device
    lossless      those of bf16 elements are coded, in about three quarters of their bytes, and come back bit for bit;
                  all others are raw. A block whose numbers lie too far apart does not fit, and is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ...config import HostFormName
from ...errors import ConfigError
from ...triton_kernels.coded_rows import ALIGN, FORMAT, can_code, coded_bytes
from .layout import CacheLayout, Region, in_runs

PIECE_ALIGN = 16
"""A piece's offset in its host block is a multiple of this, the widest load of a GPU thread."""
BLOCK_ALIGN = 4096
"""Host blocks start on pages, as page locking and direct I/O want it."""


class HostForm:
    """Where the pieces of `layout` lie in a host block, and in how many bytes. It never changes.

    name: of the format of coded pieces; empty where all are raw.
    offsets: by region, where its piece starts in a host block, in bytes.
    stored_bytes: by region, how many bytes its piece has there.
    is_coded: by region, whether they are coded.
    block_bytes: size of a host block, a multiple of `BLOCK_ALIGN`.
    arrangement: what the bytes of a host block are: equal text, equal meaning of every byte.
    moved_bytes: that a copy of one block moves over the link: `block_bytes` less the padding.
    """

    def __init__(self, layout: CacheLayout, is_coded: Sequence[bool]) -> None:
        """`is_coded` says which regions are, all of which `can_code`; engines use `make_form`."""
        pieces = [region.piece_bytes for region in layout.regions]
        stored_bytes = [coded_bytes(size) if coded else size for size, coded in zip(pieces, is_coded, strict=True)]
        offsets: list[int] = []
        end = 0
        for num_bytes in stored_bytes:
            offsets.append(_round_up(end, PIECE_ALIGN))
            end = offsets[-1] + num_bytes
        self.layout = layout
        self.name = FORMAT if any(is_coded) else ""
        self.is_coded = tuple(is_coded)
        stored_as = in_runs([FORMAT if coded else "raw" for coded in is_coded])
        self.arrangement = f"{layout.arrangement}; {stored_as}" if self.name else layout.arrangement
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
    return HostForm(layout, [False] * len(layout.regions))


def coded_form(layout: CacheLayout) -> HostForm:
    """All pieces that can be coded are; maybe none."""
    return HostForm(layout, [_can_code(region) for region in layout.regions])


def make_form(layout: CacheLayout, name: HostFormName) -> HostForm:
    """The form that a user names, not `auto`. Raises ConfigError where no piece of the layout can be coded."""
    if name is HostFormName.RAW:
        return raw_form(layout)
    form = coded_form(layout)
    if not form.name:
        raise ConfigError(
            "host_form='lossless' gains nothing here: no cache tensor has bf16 elements in pieces of whole "
            "multiples of 64 bytes; give 'raw'"
        )
    return form


def _can_code(region: Region) -> bool:
    is_aligned = region.data_ptr % ALIGN == 0 and region.block_stride % ALIGN == 0
    return region.dtype is torch.bfloat16 and is_aligned and can_code(region.piece_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
