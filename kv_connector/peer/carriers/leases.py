"""The fence of one-sided writes: who may write into another's memory, and when nothing can land there any more.

    writer                                             owner of the memory
    AskLease(number), at its time t    ------------->  answers, at its time a, which it keeps
                                       <-------------  Lease(number, milliseconds)
    posts writes while its clock is before t + lease

A lease is counted from when it was asked for, so however late its answer is read, and whatever stood still in between,
it is over one lease behind `a`. What was posted lands within the carrier's longest transfer or never. So once a link is
lost nothing lands behind a + lease + longest transfer: until then the owner uses the memory for nothing else. Sooner it
may be used where the writer has said that it stopped, where it never had a lease, or where the kernel says that its
process has ended: then nothing can land but what is on its way. What somebody else says of a writer (a connection that
was refused, or reset) proves nothing: whoever is in between can say so.

The fence counts only time in which its owner runs. Over TCP the owner's own processor takes in what was posted: while
the owner stands still (stopped, frozen, moved to another machine) the writer's bytes wait before a window that is shut,
or in the owner's own buffers, and they land once it goes on, within what a transfer takes of its running time. So the
owner tells of each turn that it takes. Of the time between two turns half a second counts at most, however long it was:
nobody can say how much of it the owner ran, and an owner whose turns are always late (its thread waits for Python's
lock, or for a core) runs all the same. As that may count time that it stood still, what was not over by the first turn
begins its longest transfer anew with the second; but all the stalls behind one lease put the fence off by no more than
one longest transfer and the half second:

    counted since the lease was given        0        lease        lease + longest        lease + 2 longest + 0.5
    nothing lands any more                                         without a stall        whatever stalls

So the fence ends, whatever stalls there are. What was posted has by then had a whole longest transfer behind the last
stall; or two in all, and less than one of them really only where the owner stood still (longest / half a second) times
since. For a process that has ended the same holds, with `GONE_SECONDS` instead of lease and longest transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..wire.messages import AskLease, Lease, WireMessage

LEASE_SECONDS = 2.0
"""Short beside what a transfer is waited for, long beside what an engine's process stands still: a writer that stands
still for longer asks again before it goes on."""
GONE_SECONDS = 1.0
"""From when a process is found to have ended until nothing of it is on its way: what the kernel and networks hold, and
this side takes in while it runs."""
STILL_SECONDS = 0.5
"""Between two turns: more, and the owner may have stood still; so much of it counts at most. An idle one takes four
turns a second; and it is less than `GONE_SECONDS`, all of which must not pass unseen."""


class Process(Protocol):
    """A peer's process."""

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""


@dataclass(slots=True)
class _Link:
    """`until` to `is_answered` are of this side's lease to write to the peer, by the clock; `quiet_at` and `latest` are
    of the peer's, in seconds that this side has run."""

    process: Process
    until: float = -math.inf
    asked_at: float = -math.inf
    number: int = 0  # of the last question
    is_answered: bool = True
    quiet_at: float = -math.inf
    latest: float = -math.inf  # that stalls can put `quiet_at` off to
    is_lost: bool = False


class WriteLeases:
    """Leases of both directions, by link. `say` sends a message over a link, and may raise PeerError."""

    def __init__(
        self, say: Callable[[int, WireMessage], None], longest_transfer_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._say = say
        self._longest = longest_transfer_seconds
        self._clock = clock
        self._last_turn = clock()
        self._ran = 0.0  # seconds that count
        self._links: dict[int, _Link] = {}

    def turn(self) -> float:
        """This side runs: to be called at least once in `STILL_SECONDS`, and in front of each look at a fence. How many
        seconds it has run."""
        before, now = self._ran, self._clock()
        passed, self._last_turn = now - self._last_turn, now
        self._ran += min(passed, STILL_SECONDS)
        if passed > STILL_SECONDS:
            for entry in self._links.values():
                if entry.quiet_at > before:
                    entry.quiet_at = min(max(entry.quiet_at, self._ran + self._longest), entry.latest)
        return self._ran

    def met(self, link: int, process: Process) -> None:
        """A link is open, to this process."""
        ran = self.turn()
        self._links = {n: entry for n, entry in self._links.items() if not entry.is_lost or entry.quiet_at > ran}
        self._links[link] = _Link(process)

    def may_write(self, link: int) -> bool:
        """Whether a write may be posted now, over a link that is open; a lease that is missing, or half over, is asked
        for. To be called right in front of each write."""
        entry, now = self._links[link], self._clock()
        is_due = now >= entry.until - LEASE_SECONDS / 2
        if is_due and (entry.is_answered or now >= entry.asked_at + LEASE_SECONDS):
            entry.asked_at, entry.is_answered = now, False
            entry.number += 1
            self._say(link, AskLease(entry.number))
        return now < entry.until

    def hear(self, link: int, message: WireMessage) -> bool:
        """Take a message over an open link if it is about leases."""
        entry = self._links[link]
        if isinstance(message, AskLease):
            entry.quiet_at = self.turn() + LEASE_SECONDS + self._longest
            entry.latest = entry.quiet_at + STILL_SECONDS + self._longest
            self._say(link, Lease(message.number, int(LEASE_SECONDS * 1e3)))
        elif isinstance(message, Lease):
            if entry.number == message.number:  # else it was over before it came
                entry.until, entry.is_answered = entry.asked_at + message.milliseconds / 1e3, True
        else:
            return False
        return True

    def lost(self, link: int) -> None:
        """A link is gone, which may not have been met."""
        if link in self._links:
            self._links[link].is_lost = True

    def quiet_in(self, link: int) -> float:
        """In how many seconds that this side runs nothing can land any more of what the peer of a lost link has
        written; 0 where it is so. It comes nearer where the peer's process is found to have ended, and goes further
        off, but not for ever, where this side stood still: who waits asks again."""
        ran, entry = self.turn(), self._links.get(link)
        if entry is None:
            return 0.0
        if entry.process.has_ended:
            entry.quiet_at = min(entry.quiet_at, ran + GONE_SECONDS)
            entry.latest = min(entry.latest, entry.quiet_at + STILL_SECONDS + GONE_SECONDS)
        return max(0.0, entry.quiet_at - ran)
