"""The sending half of one link whose blocks go through slots: pushes are cut, packed, carried and told.

Slots are told of in the order in which they were packed. Blocks that do not fit into the form that was tried are packed
anew as they are, behind what is under way by then; a push has ended when all of it was told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from ...base import Marker, PeerCounters, PeerError, Push, Pushed
from ...wire.messages import RingMapped, RingOffered, SlotFreed, WireMessage
from .carriers import Outgoing
from .chunks import Chunk, cut
from .forms import Packed, SlotForm

NUM_SLOTS = 8


class _Stage(Enum):
    PACKING = auto()
    PACKED = auto()  # and it holds its blocks
    CARRIED = auto()  # once the marker is over


@dataclass(slots=True)
class _Filling:
    """A slot under way; `marker` is of what is being done with it."""

    chunk: Chunk
    slot: int
    packed: Packed
    marker: Marker | None
    stage: _Stage = _Stage.PACKING


@dataclass(slots=True)
class _Pushing:
    """A push that has not ended: how many chunks of it are left to be told of, and whether some were left out."""

    left: int
    is_cancelled: bool = False
    is_cut_short: bool = False


class SlotSender:
    """Calls raise what the link is to be lost for: PeerError, TransferError, or OSError where memory is short.

    `raw` is the form that everything fits into, and `choose` says which one is tried now. `offer` makes the slots when
    something is first to be sent, and gives what the peer has to be told; `may_carry` is asked in front of each slot;
    `say` tells the peer, `tell` takes pushes that have ended.
    """

    def __init__(
        self,
        raw: SlotForm,
        choose: Callable[[], SlotForm],
        counters: PeerCounters,
        slot_bytes: int,
        offer: Callable[[int, int], tuple[Outgoing, str]],
        may_carry: Callable[[], bool],
        say: Callable[[WireMessage], None],
        tell: Callable[[Pushed], None],
    ) -> None:
        self.way: Outgoing | None = None
        self._raw = raw
        self._choose = choose
        self._counters = counters
        self._slot_bytes = slot_bytes
        self._offer = offer
        self._may_carry = may_carry
        self._say = say
        self._tell = tell
        self._is_accepted = False
        self._free: deque[int] = deque()
        self._told: set[int] = set()  # slots that the peer is to empty
        self._chunks: deque[Chunk] = deque()
        self._filling: deque[_Filling] = deque()
        self._pushes: dict[int, _Pushing] = {}

    @property
    def is_busy(self) -> bool:
        """Whether slots are under way, so that `advance` is to be called soon."""
        return bool(self._filling)

    @property
    def markers(self) -> list[Marker]:
        """Of copies that use the slots."""
        return [filling.marker for filling in self._filling if filling.marker is not None]

    def add(self, push: Push) -> None:
        """Begin to push; raises nothing."""
        chunks = cut(push, self._choose(), self._slot_bytes)
        self._pushes[push.number] = _Pushing(len(chunks))
        self._chunks += chunks

    def cancel(self, number: int) -> None:
        """Begin no more of a push; raises nothing."""
        if number in self._pushes:
            self._pushes[number].is_cancelled = True
            left_out = [chunk for chunk in self._chunks if chunk.number == number]
            self._chunks = deque(chunk for chunk in self._chunks if chunk.number != number)
            if left_out:
                self._leave_out(number, len(left_out))

    def accepted(self, mapped: RingMapped) -> None:
        """The peer can be carried to."""
        if self.way is None or self._is_accepted:
            raise PeerError("it mapped a ring that was not offered")
        self.way.accepted(mapped)
        self._is_accepted = True
        self._free.extend(range(NUM_SLOTS))

    def freed(self, freed: SlotFreed) -> None:
        """The peer has emptied a slot."""
        if freed.slot not in self._told:
            raise PeerError(f"it frees slot {freed.slot}, which it was not told of")
        self._told.remove(freed.slot)
        self._free.append(freed.slot)

    def advance(self) -> None:
        """Fill the slots that are free; what is packed is carried, and what has been carried is told."""
        if self.way is None and self._chunks:
            self.way, token = self._offer(NUM_SLOTS, self._slot_bytes)
            self._say(RingOffered(NUM_SLOTS, self._slot_bytes, token))
        if self.way is None:
            return
        self._take_packed()
        while self._fill(self.way):
            self._take_packed()  # whose slots may be free again
        for filling in self._filling:
            if filling.stage is _Stage.PACKED and self._may_carry():
                num_bytes = self._bytes_in(filling.chunk)
                filling.marker, filling.stage = self.way.carry(filling.slot, num_bytes), _Stage.CARRIED
        while self._filling and self._filling[0].stage is _Stage.CARRIED and _is_over(self._filling[0].marker):
            self._carried(self._filling.popleft())

    def forget(self) -> None:
        """The link is lost: every push ends."""
        for number in sorted(self._pushes):
            self._tell(Pushed(number, False))
        self._pushes.clear()

    def _fill(self, way: Outgoing) -> bool:
        """Pack into the slots that are free; whether there were any."""
        is_any = False
        while self._chunks and self._free:
            chunk, slot = self._chunks[0], self._free[0]
            if chunk.form is not self._raw and self._choose() is self._raw:
                self._pack_as_it_is(self._chunks.popleft())
                continue
            packed = chunk.form.pack(chunk.source_ids, chunk.regions, way.ring, slot)
            self._chunks.popleft()
            self._free.popleft()
            self._filling.append(_Filling(chunk, slot, packed, packed.marker))
            is_any = True
        return is_any

    def _take_packed(self) -> None:
        """Look whether slots that have been packed hold their blocks. Where one does not it is free, since nobody was
        told of it."""
        for filling in list(self._filling):
            if filling.stage is not _Stage.PACKING or not _is_over(filling.marker):
                continue
            filling.stage = _Stage.PACKED
            if filling.packed.fits():
                continue
            self._filling.remove(filling)
            self._free.append(filling.slot)
            if self._pushes[filling.chunk.number].is_cancelled:
                self._leave_out(filling.chunk.number, 1)
            else:
                self._pack_as_it_is(filling.chunk)

    def _pack_as_it_is(self, chunk: Chunk) -> None:
        """Next of all, in as many slots as that takes."""
        parts = cut(chunk, self._raw, self._slot_bytes)
        self._pushes[chunk.number].left += len(parts) - 1
        self._chunks.extendleft(reversed(parts))

    def _carried(self, filling: _Filling) -> None:
        chunk, count, regions = filling.chunk, len(filling.chunk.source_ids), filling.chunk.regions
        self._told.add(filling.slot)
        self._say(chunk.form.told_as(chunk.grant, chunk.first, count, regions.start, regions.stop, filling.slot))
        self._counters.sent_bytes += count * self._raw.bytes_of(regions)
        self._counters.slot_bytes += self._bytes_in(chunk)
        self._pushes[chunk.number].left -= 1
        self._end_if_over(chunk.number)

    def _leave_out(self, number: int, num_chunks: int) -> None:
        self._pushes[number].left -= num_chunks
        self._pushes[number].is_cut_short = True
        self._end_if_over(number)

    def _end_if_over(self, number: int) -> None:
        push = self._pushes[number]
        if not push.left:
            del self._pushes[number]
            self._tell(Pushed(number, not push.is_cut_short))

    def _bytes_in(self, chunk: Chunk) -> int:
        """Of its slot."""
        return len(chunk.source_ids) * chunk.form.bytes_of(chunk.regions)


def _is_over(marker: Marker | None) -> bool:
    return marker is None or marker.query()
