"""How blocks lie in slots: as they lie on the device, or coded, in fewer bytes, where both sides of a link take that.

A coded slot has a row for each block, of a length that follows from its regions alone. Which form a slot has is said
in the message that tells of it, which nobody else can have changed; what lies in the slot decides nothing but the bytes
of the blocks that were granted. A block that does not fit is found out when its slot is packed: all of the slot's
blocks are then sent as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...base import Ids, Marker, PeerPool, SlotCoder
from ...wire.messages import CodedSlotFilled, SlotFilled
from .ring import Ring
from .slots import SlotCopier

JUDGED_SLOTS = 64
"""By so many, the last ones, it is judged whether blocks are like keys and values: half a gigabyte of slots of 8 MiB.
Of those of a model hardly any does not fit."""
ROW_ALIGN = 16
"""Coded rows begin at multiples of this, and so does each slot that has some."""
logger = logging.getLogger("kv_connector.peer")


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Packed:
    """A slot that is being packed. `fits`, to be asked once, when the marker is over: whether it holds the blocks."""

    marker: Marker | None
    fits: Callable[[], bool] = _always


class SlotForm(Protocol):
    """Moves blocks to and from slots; which blocks and slots exist, and that rows fit, whoever calls has checked."""

    @property
    def told_as(self) -> type[SlotFilled]:
        """What tells the receiver of such a slot."""

    def bytes_of(self, regions: range) -> int:
        """Of one block's row in these regions."""

    def pack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Packed:
        """Copy blocks into a slot. Raises PeerError or TransferError; nothing of it is under way then."""

    def unpack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """Copy a slot out to blocks; the marker says when that is done, None at once. Raises as `pack`."""


class RawSlots:
    """See `SlotForm`; `pool` is what the peer holds of this side's blocks."""

    told_as: type[SlotFilled] = SlotFilled

    def __init__(self, pool: PeerPool, copier: SlotCopier) -> None:
        self._pool = pool
        self._copier = copier

    def bytes_of(self, regions: range) -> int:
        """See `SlotForm.bytes_of`."""
        return self._pool.bytes_of(regions)

    def pack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Packed:
        """See `SlotForm.pack`. Everything fits."""
        return Packed(self._copier.pack(self._pool, block_ids, regions, ring, slot))

    def unpack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """See `SlotForm.unpack`."""
        return self._copier.unpack(self._pool, block_ids, regions, ring, slot)


class CodedSlots:
    """See `SlotForm`; for links over which whole pieces go. One for all links, which judges by all of them."""

    told_as: type[SlotFilled] = CodedSlotFilled

    def __init__(self, coder: SlotCoder, copier: SlotCopier) -> None:
        self.form = coder.form
        """As the coder has it: peers decode slots of the same."""
        self.is_worth_it = True
        """Whether enough fits; what is received is decoded either way."""
        self._coder = coder
        self._copier = copier
        self._num_judged = 0
        self._num_refused = 0

    def bytes_of(self, regions: range) -> int:
        """See `SlotForm.bytes_of`."""
        return self._coder.row_bytes(regions)

    def pack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Packed:
        """See `SlotForm.pack`."""
        address = ring.address + slot * ring.slot_bytes
        fits, marker = self._copier.run(ring, lambda locked: self._coder.encode(block_ids, regions, address, locked))
        return Packed(marker, lambda: self._judge(fits()))

    def unpack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """See `SlotForm.unpack`. Raises TransferError too where a row says that it does not fit: none such is sent."""
        address = ring.address + slot * ring.slot_bytes
        _, marker = self._copier.run(ring, lambda locked: self._coder.decode(block_ids, regions, address, locked))
        return marker

    def _judge(self, fits: bool) -> bool:
        self._num_judged += 1
        self._num_refused += not fits
        if self._num_judged == JUDGED_SLOTS:
            if self.is_worth_it and 2 * self._num_refused >= JUDGED_SLOTS:
                self.is_worth_it = False
                logger.warning(
                    "%d of %d slots of blocks for other engines did not fit into the lossless form: they are sent as "
                    'they are from now on; give peer.wire_form="raw"',
                    self._num_refused,
                    JUDGED_SLOTS,
                )
            self._num_judged = self._num_refused = 0
        return fits
