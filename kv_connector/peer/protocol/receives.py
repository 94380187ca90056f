"""The consumer's part of KV transfers: producers are asked for blocks, and jobs end when the last byte has arrived.

A job that will not be served fails: the producer refuses, its link is lost, or nothing has come for too long. Where the
producer's own copies write into our pool it fails only once they cannot any more: the producer has said that it
stopped, or the fence is over (`PeerTransport.quiet_in`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ...log_limiter import LogLimiter
from ...types import PeerJob
from ..base import Arrived, PeerError, PeerTransport
from ..wire.messages import Nothing, Refused, Stop, Stopped, Want, WireMessage


class _Phase(Enum):
    CONNECTING = "connecting"
    ASKED = "asked"
    STOPPING = "stopping"  # the producer was told to stop, and may still write


@dataclass(slots=True)
class _Receiving:
    job: PeerJob
    address: tuple[str, int]
    link: int
    deadline: float
    missing: NDArray[np.bool_]  # (num_blocks, num_regions)
    phase: _Phase = _Phase.CONNECTING


class Receives:
    """Asks, counts what arrives and gives up. `ended` collects (job id, ok) for the owner to take."""

    def __init__(
        self,
        transport: PeerTransport,
        num_regions: int,
        rank: int,
        seconds: float,
        stop_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`seconds`: without anything arriving, until a job is given up; `stop_seconds`: for a producer to stop."""
        self.ended: list[tuple[int, bool]] = []
        self._transport = transport
        self._num_regions = num_regions
        self._rank = rank
        self._seconds = seconds
        self._stop_seconds = stop_seconds
        self._clock = clock
        self._links: dict[tuple[str, int], int] = {}
        self._open_links: set[int] = set()
        self._jobs: dict[int, _Receiving] = {}
        self._log_limiter = LogLimiter(clock)

    def receive(self, job: PeerJob) -> None:
        """Ask the producer for the job's blocks, which nothing uses any more."""
        port = job.ports[self._rank] if self._rank < len(job.ports) else job.ports[0] + self._rank
        address = job.host, port
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._transport.connect(job.host, port)
        missing = np.ones((job.num_blocks, self._num_regions), dtype=np.bool_)
        entry = _Receiving(job, address, link, self._clock() + self._seconds, missing)
        self._jobs[job.job_id] = entry
        if link in self._open_links:
            self._ask(entry)

    def cancel(self, job_id: int) -> None:
        """Nobody waits for the job any more."""
        self._stop(self._jobs[job_id])

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def connected(self, link: int) -> None:
        """A link is open."""
        self._open_links.add(link)
        for entry in [e for e in self._jobs.values() if e.link == link and e.phase is _Phase.CONNECTING]:
            self._ask(entry)

    def lost(self, link: int) -> None:
        """A link is gone."""
        self._open_links.discard(link)
        self._links = {address: other for address, other in self._links.items() if other != link}
        for entry in [e for e in self._jobs.values() if e.link == link]:
            if entry.phase is _Phase.CONNECTING or not self._transport.quiet_in(link):
                self._end(entry, ok=False)
            else:
                entry.phase = _Phase.STOPPING

    def hear(self, link: int, message: WireMessage) -> bool:
        """Take a message if it is for consumers."""
        if not isinstance(message, (Refused, Stopped)):
            return False
        entry = self._jobs.get(message.grant)
        if entry is None or entry.link != link:
            return True  # it has ended meanwhile
        if isinstance(message, Refused):
            self._log_limiter.fault(_shown(entry), f"refuses blocks, they will be computed here: {message.reason}")
            self._stop(entry)
        elif entry.phase is _Phase.STOPPING:
            self._end(entry, ok=False)
        return True

    def arrived(self, event: Arrived) -> None:
        """Bytes are there."""
        entry = self._jobs.get(event.grant)
        if entry is None or entry.link != event.link or entry.phase is not _Phase.ASKED:
            return
        stop, regions = event.first + event.count, event.regions
        if stop > entry.job.num_blocks or regions.stop > self._num_regions:
            self._transport.drop(event.link, f"it filled blocks up to {stop} of {entry.job.num_blocks}")
            return
        entry.missing[event.first : stop, regions.start : regions.stop] = False
        entry.deadline = self._clock() + self._seconds
        if not entry.missing.any():
            self._log_limiter.well(_shown(entry))
            self._end(entry, ok=True)

    def give_up_overdue(self) -> None:
        """Fail what nothing came for in time."""
        now = self._clock()
        for entry in list(self._jobs.values()):
            if entry.phase is _Phase.STOPPING and entry.link not in self._open_links:
                if not self._transport.quiet_in(entry.link):
                    self._end(entry, ok=False)
            elif entry.deadline <= now and entry.phase is _Phase.STOPPING:
                self._transport.drop(entry.link, "it did not stop to write")
            elif entry.deadline <= now:
                reason = f"nothing has come for {self._seconds:g} s: blocks are computed here"
                self._log_limiter.fault(_shown(entry), reason)
                self._stop(entry)

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def cancel_all(self) -> None:
        """Nothing is waited for any more."""
        for entry in list(self._jobs.values()):
            self._stop(entry)

    @property
    def quiet_in(self) -> float:
        """In how many seconds nothing can be written any more for a job that has not ended, its link being lost."""
        return max((self._transport.quiet_in(entry.link) for entry in self._jobs.values()), default=0.0)

    def close(self) -> None:
        """Every job fails: nothing can write any more."""
        self.ended += [(job_id, False) for job_id in self._jobs]
        self._jobs.clear()

    def _ask(self, entry: _Receiving) -> None:
        job = entry.job
        if not job.num_blocks:
            self._say(entry, Nothing(job.transfer_id, job.engine_id, job.names, job.group))
            self._end(entry, ok=True)
            return
        entry.phase = _Phase.ASKED
        block_ids = tuple(job.device_ids.tolist())
        self._transport.grant(entry.link, job.job_id, block_ids)
        stop = job.first + job.num_blocks
        what = job.first, stop, job.names, block_ids, job.group
        self._say(entry, Want(job.transfer_id, job.engine_id, job.job_id, *what))

    def _stop(self, entry: _Receiving) -> None:
        if entry.phase is _Phase.STOPPING:
            return
        if entry.phase is _Phase.ASKED:
            self._transport.revoke(entry.link, entry.job.job_id)
            self._say(entry, Stop(entry.job.job_id))
        if entry.phase is _Phase.ASKED and self._transport.is_one_sided and entry.job.job_id in self._jobs:
            entry.phase = _Phase.STOPPING
            entry.deadline = self._clock() + self._stop_seconds
        else:
            self._end(entry, ok=False)

    def _end(self, entry: _Receiving, ok: bool) -> None:
        if self._jobs.pop(entry.job.job_id, None) is None:
            return
        self._transport.revoke(entry.link, entry.job.job_id)
        self.ended.append((entry.job.job_id, ok))

    def _say(self, entry: _Receiving, message: WireMessage) -> None:
        try:
            self._transport.send(entry.link, message)
        except PeerError as error:
            self._transport.drop(entry.link, str(error))


def _shown(entry: _Receiving) -> str:
    return f"{entry.address[0]}:{entry.address[1]}"
