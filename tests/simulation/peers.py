"""A rank's process with the real peer protocol and a real transport, on a simulated network.

    staged      `StagedTransport`: the receiver copies out of slots that both sides have mapped
    nixl        `NixlTransport`: its agent writes into the consumer's pool, parts of writes land in any order
    cuda_ipc    `CudaIpcTransport`: copies of one stream, one behind the other, into the consumer's pool

What each does at `grant`, `revoke` and when a link is lost is its own code. Simulated is what lies below them: the side
channel, NIXL's agent, the driver's handles and the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from kv_connector.peer.base import Ids, PeerPool, Push
from kv_connector.peer.carriers.cuda_ipc import CudaIpcTransport
from kv_connector.peer.carriers.nixl import NixlTransport
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.transport import StagedTransport
from kv_connector.peer.identity import PeerIdentity
from kv_connector.peer.protocol.jobs import PeerJobs
from kv_connector.peer.wire.peer_info import PeerInfo

from .carriers import Allocations, SharedSlots, SimulatedAgent, SimulatedDriver, Stream
from .network import Network, Process, SimulatedChannel

CARRIERS = ("staged", "nixl", "cuda_ipc")
_GATED_SECONDS = 1e-3
_IDLE_SECONDS = 0.25


class _Staged(StagedTransport):
    """With the slots below, instead of shared memory or NIXL."""

    transport = "simulated slots"


class VirtualClock:
    """See `peer.base.Clock`. Who sleeps lets everybody else go on."""

    def __init__(self, network: Network) -> None:
        self._time = network.time

    def monotonic(self) -> float:
        return self._time.now()

    def sleep(self, seconds: float, /) -> None:
        self._time.run_until(self._time.now() + seconds)


@dataclass(frozen=True)
class _PeerProcess:
    """See `leases.Process`."""

    process: SimulatedPeers
    start: int

    @property
    def has_ended(self) -> bool:
        return not self.process.is_alive or self.process.start != self.start


class SimulatedPeers(Process):
    """One rank's process: `open_peers` is what a worker half is built with; `jobs.port` is where others reach it.

    A process that was closed or killed may open again: then it is another start of the engine, with another id.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        carrier: str = "staged",
        model: str = "model",
        rank: int = 0,
        tp_size: int = 1,
        deadline_seconds: float = 10.0,
        timeout_seconds: float = 5.0,
        staging_bytes: int = 8 * 8192,
        secret: bytes = b"secret",
        engine_id: str = "",
        port: int = 0,
        groups: str = "",
    ) -> None:
        """`engine_id`: of the only start; else each start has an id of its own."""
        super().__init__(network, name)
        self.carrier = carrier
        self.jobs: PeerJobs | None = None
        self.engine_id = ""
        self.on_write: Callable[[Ids], None] = lambda block_ids: None
        """Told of blocks of this pool that another's copies have written to, as they land."""
        self._identity = partial(PeerIdentity, model, "float32", "NHD", 16, tp_size, 1, rank, groups=groups)
        self._rank = rank
        self._seconds = deadline_seconds, timeout_seconds
        self._staging_bytes = staging_bytes
        self._secret = secret
        self._given_id = engine_id
        self._port = port
        self._num_starts = 0
        self._transport: Any = None
        self._channel: SimulatedChannel | None = None
        self._below: Any = None  # slots, agent or stream: what the transport uses

    def open_peers(self, pool: PeerPool) -> PeerJobs:
        """The real jobs over the real transport, in a new process; turns are taken in virtual time."""
        assert self.jobs is None, f"{self.name} runs already: kill or close it first"
        self._num_starts += 1
        self.is_alive, self.is_frozen = True, False
        self.engine_id = self._given_id or f"{self.name} start {self._num_starts}"
        heads = tuple(region.num_heads for region in pool.regions), tuple(region.head_bytes for region in pool.regions)
        identity = self._identity(pool.pieces, heads=heads[0], head_bytes=heads[1])
        info = PeerInfo(identity, self.engine_id, pool.num_blocks)
        deadline, timeout = self._seconds
        clock = VirtualClock(self.network)
        endpoint = Endpoint(info, "", self._port, self._secret, timeout, self._open_channel, clock)
        if self.carrier == "staged":
            self._below = SharedSlots(self.network)
            self._transport = _Staged(self._below, pool, endpoint, self._staging_bytes)
        elif self.carrier == "nixl":
            self._below = SimulatedAgent(self, f"{self.engine_id} rank {self._rank}")
            self._transport = NixlTransport(self._below, pool, endpoint)
        else:
            self._below = Stream(self)
            pool = replace(pool, device=0, writer=self._below.writer, mark=self._below.mark)
            driver = SimulatedDriver(Allocations.of(self.network), self, pool)
            self._below.driver = driver
            self._transport = CudaIpcTransport(pool, endpoint, lambda device: driver)
        if self.carrier != "staged":
            self._name_pushes()
        self._transport._process_of = self._process_of
        self.jobs = PeerJobs(self._transport, self.engine_id, identity, deadline, timeout, clock)
        return self.jobs

    def turn(self) -> None:
        """See `Process.turn`. Whatever it raises is a fault: production would go on without peers."""
        jobs = self.jobs
        if jobs is None or jobs.is_broken:
            return
        jobs.turn(0.0)
        assert not self._transport.counters.link_faults, "an error of this side has cost a link"
        assert self._channel is not None
        if self._transport._events:
            self.wake()
        elif jobs._gated:
            self.wake(_GATED_SECONDS)
        elif (
            jobs._receives.num_open
            or any(jobs._offers._early._nones.values())
            or self._transport._is_busy()
            or not self._channel.is_quiet
            or any(link.quiet_at > self._transport._leases._ran for link in self._transport._leases._links.values())
        ):
            self.wake(_IDLE_SECONDS)  # for what tells nothing by itself: deadlines, and that this side runs

    def close(self) -> None:
        """As the worker half does; then the process is gone. Virtual time may pass."""
        if self.jobs is not None:
            jobs, self.is_alive = self.jobs, False
            jobs.close()
            # What a close does not wait for any longer goes with the process, and what it uses.
            is_busy = self.carrier != "staged" and self._transport._writing
            assert is_busy or not self._below.left_behind, f"{self.name} has left {self._below.left_behind}"
            self._below.abandon()
            self._gone()

    def kill(self) -> None:
        """The process is gone at once, and so is its memory. The kernel closes its links; what it has handed to devices
        and networks may still land, or not."""
        if self.jobs is not None:
            assert self._channel is not None
            self.is_alive = False
            self._channel.close()
            self._below.abandon()
            self._gone()

    def break_down(self) -> None:
        """The peer thread ends, as after an error that nobody thought of; the process goes on. Time may pass."""
        if self.jobs is not None and not self.jobs.is_broken:
            self.jobs._close()

    def accepts(self, start: int, grant: int) -> bool:
        """Whether what was granted in a start of this process is still being received."""
        return self.jobs is not None and self._num_starts == start and grant in self.jobs._receives

    @property
    def start(self) -> int:
        """Which start this is."""
        return self._num_starts

    def check_at_rest(self) -> None:
        """No job is open, nothing is offered, wanted, refused or granted, no copy is under way and nothing waits to be
        said."""
        jobs = self.jobs
        if jobs is None or jobs.is_broken:
            return
        offers, receives, transport = jobs._offers, jobs._receives, self._transport
        left: dict[str, object] = {
            "jobs": jobs._open,
            "words": [*jobs._words, *jobs._gated, *jobs._waiting, *jobs._called_off],
            "offers": offers._offers,
            "sends": [*offers._by_job, *offers._by_push],
            "stops": offers._stops,
            "wants": [*chain.from_iterable(offers._early._wants.values())],
            "nones": [*chain.from_iterable(offers._early._nones.values())],
            "receives": receives._jobs,
            "events": transport._events,
            "lost links": [link for link in receives._peers if link not in transport._channel.ends],
        }
        if self.carrier == "staged":
            left["grants"] = [entry.receiver._grants for entry in transport._links.values() if entry.receiver._grants]
            left["slots"] = [*transport._ending, *(e for e in transport._links.values() if e.sender.is_busy)]
        else:
            left["grants"] = transport._num_granted
            left["writes"] = [
                *transport._writing,
                *(push for waiting in transport._waiting.values() for push in waiting),
            ]
        left = {what: entry for what, entry in left.items() if entry}
        assert not left, f"{self.name} is not at rest: {left}"
        assert transport._channel.is_quiet, f"{self.name} has links under way"

    def _open_channel(self, *arguments: Any) -> SimulatedChannel:
        self._channel = SimulatedChannel(self, *arguments)
        return self._channel

    def _name_pushes(self) -> None:
        """What lies below is told which push the next write belongs to, and which end of its link is the consumer's."""
        post_on = self._transport._post

        def post(link: int, push: Push, may_write: Callable[[], bool]) -> bool:
            assert self._channel is not None
            end = self._channel.ends.get(link)
            self._below.push = push, end.other if end is not None and end.pair is not None else None
            return bool(post_on(link, push, may_write))

        self._transport._post = post

    def _process_of(self, info: PeerInfo) -> _PeerProcess:
        told = info.engine_id, info.identity.rank
        peers = [process for process in self.network.processes if isinstance(process, SimulatedPeers)]
        (process,) = [process for process in peers if (process.engine_id, process._rank) == told]
        return _PeerProcess(process, process.start)

    def _gone(self) -> None:
        self.is_alive = False
        self.jobs = self._transport = self._below = None
