"""How the pins of the engine's last start come back.

An operator's are pinned at once. A request's are pinned one a step, as room permits, for what requests may pin depends
on host memory that is ready; and one prefix a step begins to be read from storage, so that serving goes on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...index import Terms
from ...types import BlockHash, KeptPin
from ..companions import Companions
from ..shared import Shared
from .hints import MOST_TTL
from .pins import PinnedPrefixes


class ReturningPins:
    """Those of the last start that are not pinned yet, or not on the host."""

    def __init__(self, pins: PinnedPrefixes, shared: Shared, companions: Companions) -> None:
        self._pins = pins
        self._shared = shared
        self._companions = companions
        self._waiting: deque[tuple[KeptPin, float]] = deque()  # requests', and when each ends
        self._refused: list[tuple[KeptPin, float]] = []  # those that a larger host may have room for
        self._capacity = 0  # of the host, when they were refused
        self._to_warm: deque[KeptPin] = deque()  # that are pinned again
        self._num_warmed = 0  # blocks that the host lacked of those that began to be read

    def add(self, kept: Sequence[KeptPin]) -> None:
        """Pin an operator's now, and requests' as steps are planned."""
        now = self._shared.clock()
        for pin in kept:
            if pin.is_of_request:
                seconds = MOST_TTL if pin.seconds is None else min(pin.seconds, MOST_TTL)
                self._waiting.append((pin, now + seconds))
            else:
                self._pins.pin(pin.block_hashes, pin.seconds, self._shared.tenants.known(pin.tenant))
                self._to_warm.append(pin)

    @property
    def is_busy(self) -> bool:
        """Whether the next step has something to do here."""
        if not self._shared.host.pool.capacity:
            return False
        return bool(self._waiting) or self._has_grown() or self._may_warm()

    def step(self, now: float) -> None:
        """A step is planned: at most one is pinned in it, and one begins to be read."""
        if not self._shared.host.pool.capacity:
            return
        if self._has_grown():
            self._waiting += self._refused
            self._refused.clear()
        if self._waiting:
            self._return(*self._waiting.popleft(), now)
        if self._may_warm():
            self._warm(self._to_warm.popleft())

    def drop(self, block_hashes: Sequence[BlockHash]) -> None:
        """What requests had pinned of this prompt does not come back."""
        own = [pin for pin in self._all() if len(pin.block_hashes) <= len(block_hashes)]
        self._drop([pin for pin in own if block_hashes[len(pin.block_hashes) - 1] == pin.block_hashes[-1]])

    def drop_tenant(self, tenant: int) -> None:
        """Nor does what those of a tenant had."""
        known = self._shared.tenants.known
        self._drop([pin for pin in self._all() if known(pin.tenant) == tenant])

    def _all(self) -> list[KeptPin]:
        return [pin for pin, _ in (*self._waiting, *self._refused)]

    def _drop(self, pins: Sequence[KeptPin]) -> None:
        for pin in pins:
            self._pins.keeper.ended(pin.name)
        names = {pin.name for pin in pins}
        self._waiting = deque(item for item in self._waiting if item[0].name not in names)
        self._refused = [item for item in self._refused if item[0].name not in names]

    def _return(self, pin: KeptPin, deadline: float, now: float) -> None:
        terms = Terms(self._shared.tenants.known(pin.tenant))
        if deadline <= now:
            self._pins.keeper.ended(pin.name)
        elif self._pins.pin_for_request(pin.block_hashes, terms, deadline - now):
            self._to_warm.append(pin)
        else:
            self._refused.append((pin, deadline))
            self._capacity = self._shared.host.pool.capacity

    def _has_grown(self) -> bool:
        """Whether the host may have room by now for what was refused."""
        return bool(self._refused) and self._shared.host.pool.capacity > self._capacity

    def _may_warm(self) -> bool:
        """Whether the next prefix may begin to be read: as long as it, or all that is pinned, fits."""
        if not self._to_warm or not self._companions.may_warm:
            return False
        capacity = self._shared.host.pool.capacity
        has_room = self._pins.num_blocks <= capacity
        return has_room or self._num_warmed + self._num_lacking(self._to_warm[0].block_hashes) <= capacity

    def _warm(self, pin: KeptPin) -> None:
        if pin.name not in self._pins:
            return  # it was let go of meanwhile
        self._num_warmed += self._num_lacking(pin.block_hashes)
        self._companions.warm(pin.block_hashes, self._shared.tenants.known(pin.tenant))

    def _num_lacking(self, block_hashes: Sequence[BlockHash]) -> int:
        """Blocks of a prefix that is pinned which the host has not."""
        grouped, host = self._shared.grouped, self._shared.host
        nodes = [grouped.find_of(group, grouped.keys(block_hashes, group)) for group in range(len(grouped.groups))]
        return sum(len(host.absent(found)) for found in nodes)
