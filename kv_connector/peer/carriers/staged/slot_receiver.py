"""The receiving half of one link whose blocks come through slots: what is in them is checked and copied out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...base import Arrived, Ids, Marker, PeerError
from ...wire.messages import RingMapped, RingOffered, SlotFilled, SlotFreed, WireMessage
from ..one_sided import check_granted
from .carriers import Incoming
from .forms import SlotForm
from .slot_sender import NUM_SLOTS

_POLL_SECONDS = 0.0002


class SlotReceiver:
    """Calls raise what the link is to be lost for: PeerError, TransferError, or OSError where memory is short.

    `forms` are those of slots that the peer may fill, by what it tells of them, of blocks with `num_regions` regions:
    what it holds of this side's blocks, too. `accept` makes the other end of what the peer offers, and
    the answer; `say` answers it, `tell` takes what arrived.
    """

    def __init__(
        self,
        link: int,
        forms: Mapping[type[SlotFilled], SlotForm],
        num_regions: int,
        most_slot_bytes: int,
        accept: Callable[[RingOffered], tuple[Incoming, RingMapped]],
        say: Callable[[WireMessage], None],
        tell: Callable[[Arrived], None],
    ) -> None:
        self.way: Incoming | None = None
        self._link = link
        self._forms = forms
        self._num_regions = num_regions
        self._most_slot_bytes = most_slot_bytes
        self._accept = accept
        self._say = say
        self._tell = tell
        self._grants: dict[int, Ids] = {}
        self._unpacking: deque[tuple[int, Arrived, Marker]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether slots are being emptied, so that `advance` is to be called soon."""
        return bool(self._unpacking)

    def grant(self, number: int, block_ids: Sequence[int]) -> None:
        """Let the peer fill these blocks; raises nothing."""
        self._grants[number] = np.array(block_ids, dtype=np.int64)

    def revoke(self, number: int) -> None:
        """Nothing is written to the grant's blocks any more; waits for a device's copies out of a slot or two."""
        self._grants.pop(number, None)
        _wait([marker for _, arrived, marker in self._unpacking if arrived.grant == number])

    def offered(self, offered: RingOffered) -> None:
        """The peer has slots."""
        slots, slot_bytes = offered.slots, offered.slot_bytes
        if not (1 <= slots <= NUM_SLOTS and 1 <= slot_bytes <= self._most_slot_bytes):
            raise PeerError(
                f"it offers {slots} slots of {slot_bytes} bytes: {NUM_SLOTS} of {self._most_slot_bytes} at most"
            )
        if self.way is not None:
            raise PeerError("it offers a second ring")
        self.way, answer = self._accept(offered)
        self._say(answer)

    def filled(self, filled: SlotFilled) -> None:
        """The peer has filled a slot."""
        if self.way is None:
            raise PeerError("it filled a slot of a ring that it never sent")
        ring = self.way.ring
        slot = filled.slot
        if slot >= ring.num_slots:
            raise PeerError(f"it filled slot {slot} of {ring.num_slots}")
        form = self._forms.get(type(filled))
        if form is None:
            raise PeerError("it filled a slot with blocks that are coded, which was not agreed on")
        arrived = filled.arrived(self._link, self._num_regions)
        size = form.bytes_of(arrived.regions)
        if arrived.count * size > ring.slot_bytes:
            raise PeerError(f"{arrived.count} blocks of {size} bytes are more than a slot of {ring.slot_bytes}")
        granted = self._grants.get(arrived.grant)
        if granted is None:  # revoked while this was on its way
            self._say(SlotFreed(slot))
            return
        check_granted(arrived, len(granted))
        block_ids = granted[arrived.first : arrived.first + arrived.count]
        marker = form.unpack(block_ids, arrived.regions, ring, slot)
        if marker is not None:
            self._unpacking.append((slot, arrived, marker))
        else:
            self._emptied(slot, arrived)

    def advance(self) -> None:
        """Tell of what has been copied out."""
        while self._unpacking and self._unpacking[0][2].query():
            slot, arrived, _ = self._unpacking.popleft()
            self._emptied(slot, arrived)

    def forget(self) -> None:
        """The link is lost: who hears of it may use the granted blocks for something else at once."""
        self._grants.clear()
        _wait([marker for _, _, marker in self._unpacking])

    def _emptied(self, slot: int, arrived: Arrived) -> None:
        self._say(SlotFreed(slot))
        self._tell(arrived)


def _wait(markers: Sequence[Marker]) -> None:
    for marker in markers:
        while not marker.query():
            time.sleep(_POLL_SECONDS)
