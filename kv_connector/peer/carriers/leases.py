"""The fence of one-sided writes: who may write into another's memory, and when nothing can land there any more.

    writer                                             owner of the memory
    AskLease(number), at its time t    ------------->  answers, at its time a, which it keeps
                                       <-------------  Lease(number, milliseconds)
    posts writes while its clock is before t + lease

A lease is counted from when it was asked for, so however late its answer is read, and whatever stood still in between,
it is over one lease behind `a`. What was posted lands within the carrier's longest transfer or never. So once a link is
lost nothing lands behind a + lease + longest transfer: until then the owner uses the memory for nothing else. Sooner it
may be used where the writer has said that it stopped, where it never had a lease, or where its process is known to be
gone: then nothing but what a network still holds can land.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..wire.messages import AskLease, Lease, WireMessage

LEASE_SECONDS = 2.0
"""Short beside what a transfer is waited for, long beside what an engine's process stands still: a writer that stands
still for longer asks again before it goes on."""
GONE_SECONDS = 1.0
"""From when a process is known to be gone until nothing of it is on its way: what its machine and ours still hold."""


@dataclass(slots=True)
class _Own:
    """A lease of this side's to write to a peer."""

    until: float = -math.inf
    asked_at: float = -math.inf
    number: int = 0  # of the last question
    is_answered: bool = True


class WriteLeases:
    """Leases of both directions, by link. `say` sends a message over a link, and may raise PeerError."""

    def __init__(
        self, say: Callable[[int, WireMessage], None], longest_transfer_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._say = say
        self._longest = longest_transfer_seconds
        self._clock = clock
        self._own: dict[int, _Own] = {}
        self._quiet_at: dict[int, float] = {}  # of links over which a peer was given a lease

    def may_write(self, link: int) -> bool:
        """Whether a write may be posted now; a lease that is missing, or half over, is asked for. To be called right in
        front of each write."""
        own, now = self._own.setdefault(link, _Own()), self._clock()
        is_due = now >= own.until - LEASE_SECONDS / 2
        if is_due and (own.is_answered or now >= own.asked_at + LEASE_SECONDS):
            own.asked_at, own.is_answered = now, False
            own.number += 1
            self._say(link, AskLease(own.number))
        return now < own.until

    def hear(self, link: int, message: WireMessage) -> bool:
        """Take a message if it is about leases."""
        if isinstance(message, AskLease):
            self._give(link, message.number)
        elif isinstance(message, Lease):
            own = self._own.get(link)
            if own is not None and own.number == message.number:  # else it was over before it came
                own.until, own.is_answered = own.asked_at + message.milliseconds / 1e3, True
        else:
            return False
        return True

    def quiet_at(self, link: int) -> float:
        """When nothing can land any more of what the peer of a lost link has written; on this side's clock."""
        return self._quiet_at.get(link, -math.inf)

    def lost(self, link: int) -> None:
        """A link is gone: this side writes no more over it."""
        self._own.pop(link, None)

    def gone(self, link: int) -> None:
        """The process behind a lost link is known to have ended."""
        if link in self._quiet_at:
            self._quiet_at[link] = min(self._quiet_at[link], self._clock() + GONE_SECONDS)

    def _give(self, link: int, number: int) -> None:
        now = self._clock()
        self._quiet_at = {other: at for other, at in self._quiet_at.items() if at > now}
        self._quiet_at[link] = now + LEASE_SECONDS + self._longest
        self._say(link, Lease(number, int(LEASE_SECONDS * 1e3)))
