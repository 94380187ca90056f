"""Transports whose pushers write into the receiver's pool themselves, each within a lease that the receiver grants."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..base import Arrived, PeerError, PeerPool, Push, Pushed
from ..wire.messages import Filled, Want, WireMessage
from ..wire.peer_info import PeerInfo
from .over_channel import Endpoint, OverChannel


class OneSided(OverChannel):
    """Where the pusher's own copies write: a grant is a number of blocks to check the peer's word against, and a push
    waits for a lease."""

    is_one_sided = True

    def __init__(self, pool: PeerPool, extra: Mapping[str, Any], endpoint: Endpoint) -> None:
        """See `OverChannel`."""
        super().__init__(pool, extra, endpoint)
        self._num_granted: dict[tuple[int, int], int] = {}
        self._waiting: dict[int, deque[Push]] = {}  # for a lease, by link

    def push(self, link: int, push: Push) -> None:
        """See `PeerTransport.push`."""
        ids = push.source_ids
        assert len(ids) and 0 <= ids.min() <= ids.max() < self._pool.num_blocks, f"{ids} of {self._pool.num_blocks}"
        if link in self._met:
            self._waiting.setdefault(link, deque()).append(push)
            self._post_waiting()
        else:
            self._events.append(Pushed(push.number, False))

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """See `PeerTransport.grant`."""
        self._num_granted[link, number] = len(block_ids)

    def revoke(self, link: int, number: int) -> None:
        """See `PeerTransport.revoke`: the peer has to be told, too."""
        self._num_granted.pop((link, number), None)

    def cancel(self, number: int) -> None:
        """See `PeerTransport.cancel`: what was posted ends by itself."""
        for link, waiting in self._waiting.items():
            self._end_waiting(link, [push for push in waiting if push.number == number])

    def quiet_in(self, link: int) -> float:
        """See `PeerTransport.quiet_in`."""
        return self._leases.quiet_in(link)

    def close(self) -> None:
        """See `PeerTransport.close`. Waits for what is being written: it is read from memory that goes."""
        if self._is_closed:
            return
        self._is_closed = True
        end = self._clock.monotonic() + self.longest_transfer_seconds
        while self._finish_writing() and self._clock.monotonic() < end:
            self._leases.turn()
            for event in self._channel.poll(0.0):
                self._take(event)
            self._clock.sleep(self.poll_seconds)
        self._channel.close()
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Free everything; no link is open any more."""

    @abstractmethod
    def _finish_writing(self) -> bool:
        """Tell of writes that have ended; whether others are under way."""

    @abstractmethod
    def _post(self, link: int, push: Push, may_write: Callable[[], bool]) -> bool:
        """Begin to write, and say so; Pushed comes once it is over, at once where the link is lost. While a write is
        made this side may stand still: nothing is begun where `may_write`, asked right in front of it, says no."""

    def _meet(self, link: int, info: PeerInfo) -> None:
        here, there = self._info.identity, info.identity
        if here.pieces != there.pieces:
            raise PeerError(
                f"tp_size is {here.tp_size} here and {there.tp_size} there, and KV heads are divided anew in host "
                'memory only: give both engines peer.route "staged"'
            )

    def _hear(self, link: int, message: WireMessage) -> bool:
        if isinstance(message, Want):
            self._leases.may_write(link)  # asks: the answer is there when the first blocks are computed
        return False

    def _advance(self) -> None:
        self._post_waiting()
        self._finish_writing()

    def _lost(self, link: int) -> None:
        self._num_granted = {key: count for key, count in self._num_granted.items() if key[0] != link}
        self._end_waiting(link, list(self._waiting.get(link, ())))
        self._waiting.pop(link, None)

    def _post_waiting(self) -> None:
        for link in [link for link, waiting in self._waiting.items() if waiting]:
            self._guarded(link, self._post_leased, link)

    def _post_leased(self, link: int) -> None:
        """Post what this side has a lease for; looked at before each write is made, and again in front of it."""
        waiting, may_write = self._waiting[link], partial(self._leases.may_write, link)
        while waiting and link in self._met and may_write():
            push = waiting.popleft()
            if not self._post(link, push, may_write):
                waiting.appendleft(push)

    def _hear_written(self, link: int, told: Filled) -> None:
        """The peer says what it has written. Raises PeerError where that was not granted."""
        arrived = told.arrived(link, len(self._pool.regions))
        granted = self._num_granted.get((link, arrived.grant))
        if granted is None:
            return  # revoked while this was on its way
        check_granted(arrived, granted)
        self._arrived(self._pool, arrived)

    def _end_waiting(self, link: int, pushes: Sequence[Push]) -> None:
        for push in pushes:
            self._waiting[link].remove(push)
            self._events.append(Pushed(push.number, False))


def check_granted(arrived: Arrived, num_blocks: int) -> None:
    """Raises PeerError where it goes beyond the grant's blocks."""
    stop = arrived.first + arrived.count
    if stop > num_blocks:
        raise PeerError(f"it filled blocks {arrived.first} to {stop} of {num_blocks} that were granted")
