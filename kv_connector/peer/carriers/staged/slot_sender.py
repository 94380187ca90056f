"""The sending half of one link whose blocks go through slots: pushes are cut, packed, carried and told, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...base import Marker, PeerCounters, PeerError, PeerPool, Push, Pushed
from ...wire.messages import RingMapped, RingOffered, SlotFilled, SlotFreed, WireMessage
from .carriers import Outgoing
from .chunks import Chunk, cut
from .slots import SlotCopier

NUM_SLOTS = 8


@dataclass(slots=True)
class _Filling:
    """A slot under way: it is packed, and then carried."""

    chunk: Chunk
    slot: int
    marker: Marker | None
    is_packed: bool = False


class SlotSender:
    """Calls raise what the link is to be lost for: PeerError, TransferError, or OSError where memory is short.

    `pool` is what the peer holds of this side's blocks, too. `offer` makes the slots when something is first to be
    sent, and gives what the peer has to be told; `may_carry` is asked in front of each slot; `say` tells the peer,
    `tell` takes pushes that have ended.
    """

    def __init__(
        self,
        pool: PeerPool,
        copier: SlotCopier,
        counters: PeerCounters,
        slot_bytes: int,
        offer: Callable[[int, int], tuple[Outgoing, str]],
        may_carry: Callable[[], bool],
        say: Callable[[WireMessage], None],
        tell: Callable[[Pushed], None],
    ) -> None:
        self.way: Outgoing | None = None
        self._pool = pool
        self._copier = copier
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
        self._cut_short: set[int] = set()  # cancelled pushes of which something is under way

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
        self._chunks += cut(push, self._pool, self._slot_bytes)

    def cancel(self, number: int) -> None:
        """Begin no more of a push; raises nothing."""
        if any(chunk.number == number for chunk in self._chunks):
            self._chunks = deque(chunk for chunk in self._chunks if chunk.number != number)
            if self._is_under_way(number):
                self._cut_short.add(number)
            else:
                self._tell(Pushed(number, False))

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
        while self._chunks and self._free:
            chunk, slot = self._chunks[0], self._free[0]
            marker = self._copier.pack(self._pool, chunk.source_ids, chunk.regions, self.way.ring, slot)
            self._chunks.popleft()
            self._free.popleft()
            self._filling.append(_Filling(chunk, slot, marker))
        for filling in self._filling:
            if not filling.is_packed and _is_over(filling.marker) and self._may_carry():
                num_bytes = len(filling.chunk.source_ids) * self._pool.bytes_of(filling.chunk.regions)
                filling.marker, filling.is_packed = self.way.carry(filling.slot, num_bytes), True
        while self._filling and self._filling[0].is_packed and _is_over(self._filling[0].marker):
            self._carried(self._filling.popleft())

    def forget(self) -> None:
        """The link is lost: every push ends."""
        numbers = {chunk.number for chunk in self._chunks} | {filling.chunk.number for filling in self._filling}
        for number in sorted(numbers):
            self._tell(Pushed(number, False))

    def _carried(self, filling: _Filling) -> None:
        chunk, number, count = filling.chunk, filling.chunk.number, len(filling.chunk.source_ids)
        self._told.add(filling.slot)
        regions = chunk.regions
        self._say(SlotFilled(chunk.grant, chunk.first, count, regions.start, regions.stop, filling.slot))
        self._counters.sent_bytes += count * self._pool.bytes_of(chunk.regions)
        if chunk.is_last:
            self._tell(Pushed(number, True))
        elif number in self._cut_short and not self._is_under_way(number):
            self._cut_short.discard(number)
            self._tell(Pushed(number, False))

    def _is_under_way(self, number: int) -> bool:
        return any(filling.chunk.number == number for filling in self._filling)


def _is_over(marker: Marker | None) -> bool:
    return marker is None or marker.query()
