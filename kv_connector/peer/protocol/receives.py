"""The consumer's part of KV transfers: producers are asked for blocks, and jobs end when the last byte has arrived.

Where the KV heads of this rank are divided over several ranks of the producer, each of them is asked for its own: the
job has a part for each, under one number, and ends when all parts have. With one of them all fail.

A job that will not be served fails: the producer refuses, its link is lost, or nothing has come for too long. Where the
producer's own copies write into our pool it fails only once they cannot any more: the producer has said that it
stopped, or the fence is over (`PeerTransport.quiet_in`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ...log_limiter import LogLimiter
from ...types import PeerJob
from ..base import Arrived, Connected, PeerError, PeerTransport
from ..identity import PeerIdentity
from ..shards import Shard
from ..wire.messages import Nothing, Refused, Stop, Stopped, Want, WireMessage


class _Phase(Enum):
    CONNECTING = "connecting"
    ASKED = "asked"
    STOPPING = "stopping"  # the producer was told to stop, and may still write


@dataclass(slots=True)
class _Receiving:
    """A job, and its parts that have not ended."""

    job: PeerJob
    parts: list[_Part] = field(default_factory=list)
    ok: bool = True


@dataclass(slots=True, eq=False)
class _Part:
    """What comes from one rank of the producer, `shard`; nothing where it is not `wanted`."""

    receiving: _Receiving
    shard: Shard
    wanted: bool
    address: tuple[str, int]
    link: int
    deadline: float
    missing: NDArray[np.bool_]  # (num_blocks, num_regions)
    phase: _Phase = _Phase.CONNECTING

    @property
    def job(self) -> PeerJob:
        return self.receiving.job


class Receives:
    """The consumer's side: asks for blocks, counts arrivals, and fails overdue jobs. `ended` collects (job id, ok) for
    the owner to take."""

    def __init__(
        self,
        transport: PeerTransport,
        identity: PeerIdentity,
        seconds: float,
        stop_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`seconds`: how long a job may go without data before it fails; `stop_seconds`: for a producer to stop
        writing."""
        self.ended: list[tuple[int, bool]] = []
        self._transport = transport
        self._identity = identity
        self._num_regions = len(identity.pieces)
        self._seconds = seconds
        self._stop_seconds = stop_seconds
        self._clock = clock
        self._links: dict[tuple[str, int], int] = {}
        self._peers: dict[int, Shard] = {}  # by open link
        self._jobs: dict[int, _Receiving] = {}
        self._log_limiter = LogLimiter(clock)

    def receive(self, job: PeerJob) -> None:
        """Ask the producer for the job's blocks, which nothing uses any more."""
        receiving = self._jobs[job.job_id] = _Receiving(job)
        ranks = self._identity.shard.partners(job.tp_size)
        if not ranks or ranks.stop > len(job.ports):
            reason = f"it has {len(job.ports)} ranks, which do not divide what the ranks here hold: blocks are computed"
            self._log_limiter.fault(job.host, reason)
            self._fail(receiving)
            return
        for rank in ranks:
            receiving.parts.append(self._part(receiving, Shard(rank, job.tp_size)))
        for part in list(receiving.parts):
            if part.link in self._peers:
                self._ask(part)

    def cancel(self, job_id: int) -> None:
        """Nobody waits for the job any more."""
        self._fail(self._jobs[job_id])

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def connected(self, peer: Connected) -> None:
        """A link is open."""
        self._peers[peer.link] = peer.shard
        for part in self._parts():
            if part.link == peer.link and part.phase is _Phase.CONNECTING:
                self._ask(part)

    def lost(self, link: int) -> None:
        """A link is gone."""
        self._peers.pop(link, None)
        self._links = {address: other for address, other in self._links.items() if other != link}
        for part in [part for part in self._parts() if part.link == link]:
            if part.phase is _Phase.CONNECTING or not self._transport.quiet_in(link):
                self._end(part, ok=False)
            else:
                part.phase = _Phase.STOPPING
                self._fail(part.receiving)

    def hear(self, link: int, message: WireMessage) -> bool:
        """Take a message if it is for consumers."""
        if not isinstance(message, (Refused, Stopped)):
            return False
        part = self._part_of(message.grant, link)
        if part is None:
            return True  # it has ended meanwhile
        if isinstance(message, Refused):
            self._log_limiter.fault(_shown(part), f"refuses blocks, they will be computed here: {message.reason}")
            self._fail(part.receiving)
        elif part.phase is _Phase.STOPPING:
            self._end(part, ok=False)
        return True

    def arrived(self, event: Arrived) -> None:
        """Bytes are there."""
        part = self._part_of(event.grant, event.link)
        if part is None or part.phase is not _Phase.ASKED:
            return
        stop, regions = event.first + event.count, event.regions
        if stop > part.job.num_blocks or regions.stop > self._num_regions:
            self._transport.drop(event.link, f"it filled blocks up to {stop} of {part.job.num_blocks}")
            return
        part.missing[event.first : stop, regions.start : regions.stop] = False
        part.deadline = self._clock() + self._seconds
        if not part.missing.any():
            self._log_limiter.well(_shown(part))
            self._end(part, ok=True)

    def give_up_overdue(self) -> None:
        """Fail what nothing came for in time."""
        now = self._clock()
        for part in self._parts():
            if part.phase is _Phase.STOPPING and part.link not in self._peers:
                if not self._transport.quiet_in(part.link):
                    self._end(part, ok=False)
            elif part.deadline <= now and part.phase is _Phase.STOPPING:
                self._transport.drop(part.link, "it did not stop to write")
            elif part.deadline <= now:
                reason = f"nothing has come for {self._seconds:g} s: blocks are computed here"
                self._log_limiter.fault(_shown(part), reason)
                self._fail(part.receiving)

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def cancel_all(self) -> None:
        """Nothing is waited for any more."""
        for receiving in list(self._jobs.values()):
            self._fail(receiving)

    @property
    def quiet_in(self) -> float:
        """In how many seconds nothing can be written any more for a job that has not ended, its link being lost."""
        return max((self._transport.quiet_in(part.link) for part in self._parts()), default=0.0)

    def close(self) -> None:
        """Every job fails: nothing can write any more."""
        self.ended += [(job_id, False) for job_id in self._jobs]
        self._jobs.clear()

    def _part(self, receiving: _Receiving, shard: Shard) -> _Part:
        """What is to come from a rank of the producer, over a link that may be open."""
        job = receiving.job
        address = job.host, job.ports[shard.rank]
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._transport.connect(*address)
        missing = np.ones((job.num_blocks, self._num_regions), dtype=np.bool_)
        wanted = bool(job.num_blocks) and self._identity.needs(shard)
        return _Part(receiving, shard, wanted, address, link, self._clock() + self._seconds, missing)

    def _parts(self) -> list[_Part]:
        return [part for receiving in self._jobs.values() for part in receiving.parts]

    def _part_of(self, job_id: int, link: int) -> _Part | None:
        receiving = self._jobs.get(job_id)
        parts = receiving.parts if receiving is not None else ()
        return next((part for part in parts if part.link == link and part.phase is not _Phase.CONNECTING), None)

    def _ask(self, part: _Part) -> None:
        job = part.job
        if part not in part.receiving.parts:
            return  # another one has failed
        if self._peers[part.link] != part.shard:
            reason = f"is {self._peers[part.link]}, where {part.shard} was asked for: blocks are computed here"
            self._log_limiter.fault(_shown(part), reason)
            self._end(part, ok=False)
        elif not part.wanted:
            self._say(part, Nothing(job.transfer_id, job.engine_id, job.names, job.group))
            self._end(part, ok=True)
        else:
            part.phase = _Phase.ASKED
            block_ids = tuple(job.device_ids.tolist())
            self._transport.grant(part.link, job.job_id, block_ids)
            what = job.first, job.first + job.num_blocks, job.names, block_ids, job.group
            self._say(part, Want(job.transfer_id, job.engine_id, job.job_id, *what))

    def _fail(self, receiving: _Receiving) -> None:
        """Every part is called off; those that the producer may still write end when it cannot any more."""
        receiving.ok = False
        for part in [part for part in receiving.parts if part.phase is not _Phase.STOPPING]:
            if part.phase is _Phase.ASKED:
                self._transport.revoke(part.link, part.job.job_id)
                self._say(part, Stop(part.job.job_id))
            if part.phase is _Phase.ASKED and self._transport.is_one_sided:
                part.phase = _Phase.STOPPING
                part.deadline = self._clock() + self._stop_seconds
            else:
                receiving.parts.remove(part)
        if not receiving.parts:
            self._end_job(receiving)

    def _end(self, part: _Part, ok: bool) -> None:
        """Nothing comes for it any more, and nothing is written."""
        receiving = part.receiving
        if part not in receiving.parts:
            return
        receiving.parts.remove(part)
        if part.phase is not _Phase.CONNECTING:
            self._transport.revoke(part.link, part.job.job_id)
        if not ok:
            self._fail(receiving)
        elif not receiving.parts:
            self._end_job(receiving)

    def _end_job(self, receiving: _Receiving) -> None:
        if self._jobs.pop(receiving.job.job_id, None) is not None:
            self.ended.append((receiving.job.job_id, receiving.ok))

    def _say(self, part: _Part, message: WireMessage) -> None:
        try:
            self._transport.send(part.link, message)
        except PeerError as error:
            self._transport.drop(part.link, str(error))


def _shown(part: _Part) -> str:
    return f"{part.address[0]}:{part.address[1]}"
