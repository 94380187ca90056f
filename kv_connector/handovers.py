"""Blocks handed from engine to engine (layer 1): what this engine offers, what it asks for, and when it gives up.

    producer: request with do_remote_decode --SEND jobs, step by step, as its prompt is computed--> held until they were
              sent, nobody wants them, or the deadline has passed
    consumer: request with do_remote_prefill --one RECEIVE job for what neither device nor host has--> the request waits
              for it as for any load in the background; what fails is computed

The two are named to each other by `kv_transfer_params`, in the form that vLLM's own connectors and proxies use. Only
whole blocks are handed over; the consumer computes what is behind the last, at least one token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import DeviceBlocks, Request, ScheduledRequest
from .config import PeerConfig
from .index import adopt_hash, adopt_hashes
from .jobs import JobLedger
from .metrics import CacheMetrics
from .types import BlockHash, PeerAction, PeerJob

logger = logging.getLogger("kv_connector.scheduler")

_MOST_TEXT = 256


@dataclass(slots=True)
class _Outgoing:
    """What is offered of a request's prompt. `next_block` and following are still to be computed."""

    transfer_id: str
    names: bytes
    num_blocks: int
    next_block: int = 0
    jobs: set[int] = field(default_factory=set)  # under way
    num_failed: int = 0
    deadline: float | None = None  # once the request has ended


@dataclass(slots=True)
class _Incoming:
    """Where a request's prompt was computed. It is asked once."""

    transfer_id: str
    engine_id: str
    host: str
    ports: tuple[int, ...]
    is_asked: bool = False


@dataclass(slots=True)
class _Asking:
    """Blocks of an admitted request that are leased and not yet planned."""

    incoming: _Incoming
    request_id: str | None
    first: int
    device_ids: list[int]
    name: bytes


class HandoverPlanner:
    """What the scheduler half knows of other engines. It puts `plan` into every step and hands every ended job to
    `end`. `engine_id` names this start of the engine, `root` what its own hashes leave out; `clock` gives seconds."""

    def __init__(
        self,
        config: PeerConfig,
        engine_id: str,
        root: BlockHash,
        world_size: int,
        jobs: JobLedger,
        metrics: CacheMetrics,
        clock: Callable[[], float],
        block_size: int,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._root = root
        self._jobs = jobs
        self._metrics = metrics
        self._clock = clock
        self._block_size = block_size
        self._ports = [config.port + rank if config.port else 0 for rank in range(world_size)]
        self._outgoing: dict[str, _Outgoing] = {}  # by transfer id
        self._sending: dict[str, _Outgoing] = {}  # by request that has not ended
        self._incoming: dict[str, _Incoming] = {}  # by request
        self._receiving: dict[str, int] = {}  # by request: its job under way
        self._asking: list[_Asking] = []
        self._begun: list[PeerJob] = []  # sends to be planned
        self._withdrawn: list[str] = []
        self._cancelled: list[int] = []
        self._counters: dict[int, dict[str, float]] = {}  # by rank

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return bool(self._asking or self._begun or self._withdrawn or self._cancelled)

    def note_report(self, rank: int, port: int, counters: Sequence[tuple[str, float]]) -> None:
        """Where a rank listens, and what its links have counted since its start."""
        if port:
            self._ports[rank] = port
        if counters:
            self._counters[rank] = dict(counters)

    def stats(self) -> dict[str, float]:
        """Counters over all ranks."""
        names = sorted(set().union(*self._counters.values()))
        return {f"peer_{name}": sum(rank.get(name, 0.0) for rank in self._counters.values()) for name in names}

    # The producer.

    def admitted(self, request: Request, first: int, device_ids: Sequence[int], pool: DeviceBlocks) -> None:
        """A request was admitted, for the first time or again. Blocks of one that another engine is to continue are
        offered from now on; the blocks `device_ids`, from position `first` on, are to come from another engine."""
        self._offer(request)
        self._receive(request, first, device_ids, pool)

    def _offer(self, request: Request) -> None:
        params = _params(request)
        if not self._config.produces or not params.get("do_remote_decode") or request.request_id in self._sending:
            return
        transfer_id = _text(params, "transfer_id") or request.request_id[:_MOST_TEXT]
        num_blocks = (request.num_tokens - 1) // self._block_size
        if transfer_id in self._outgoing or num_blocks < 1:
            return
        names = adopt_hashes(self._root, request.block_hashes[:num_blocks])
        outgoing = _Outgoing(transfer_id, names, num_blocks)
        self._outgoing[transfer_id] = self._sending[request.request_id] = outgoing

    def scheduled(self, item: ScheduledRequest, block_ids: Sequence[int], pool: DeviceBlocks) -> None:
        """This step computes a part of a request: offer the blocks that it completes, and those in front of them."""
        outgoing = self._sending.get(item.request_id)
        if outgoing is None:
            return
        stop = (item.num_computed_tokens + item.num_scheduled_tokens) // self._block_size
        first, stop = outgoing.next_block, min(stop, outgoing.num_blocks)
        if stop <= first:
            return
        device_ids = block_ids[first:stop]
        pool.touch(device_ids)
        job = self._jobs.open_peer(
            PeerAction.SEND, outgoing.transfer_id, first, device_ids, names=b"" if first else outgoing.names
        )
        outgoing.next_block = stop
        outgoing.jobs.add(job.job_id)
        self._begun.append(job)
        self._metrics.offered_blocks += job.num_blocks

    def withdraw(self, request_id: str) -> None:
        """The request was given up: nobody will ask for its blocks."""
        outgoing = self._sending.get(request_id)
        if outgoing is not None:
            self._withdraw(outgoing)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request has ended; what another engine has to be told to continue it, if one is to."""
        self._finish_incoming(request)
        outgoing = self._sending.pop(request.request_id, None)
        if outgoing is None or outgoing.transfer_id not in self._outgoing:
            return None
        if outgoing.next_block < outgoing.num_blocks:
            self._withdraw(outgoing)  # it was given up before its prompt was computed
            return None
        outgoing.deadline = self._clock() + self._config.deadline_ms / 1e3
        if not outgoing.jobs:
            del self._outgoing[outgoing.transfer_id]
        return self._transfer_params(request, outgoing)

    def _transfer_params(self, request: Request, outgoing: _Outgoing) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": outgoing.transfer_id,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._config.host,
            "remote_port": self._ports[0],
            "remote_ports": list(self._ports),
            "remote_block_ids": [list(range(outgoing.num_blocks))],  # proxies ask only whether there are any
            "remote_num_tokens": outgoing.num_blocks * self._block_size,
            "tp_size": len(self._ports),
        }

    def _withdraw(self, outgoing: _Outgoing) -> None:
        if self._outgoing.pop(outgoing.transfer_id, None) is not None:
            self._withdrawn.append(outgoing.transfer_id)

    # The consumer.

    def num_blocks(self, request: Request) -> int:
        """Leading blocks of the request that another engine has, as far as is known; 0 where nobody is to be asked."""
        incoming = self._incoming_of(request)
        if incoming is None or incoming.is_asked:
            return 0
        return (request.num_tokens - 1) // self._block_size

    def _receive(self, request: Request, first: int, device_ids: Sequence[int], pool: DeviceBlocks) -> None:
        """Where nothing is to come, the other engine is told so: it need not hold what it has."""
        incoming = self._incoming_of(request)
        if incoming is None or incoming.is_asked:
            return
        incoming.is_asked = True
        pool.touch(device_ids)
        name = b""
        if device_ids:
            name = adopt_hash(self._root, request.block_hashes[first + len(device_ids) - 1])
        self._asking.append(_Asking(incoming, request.request_id, first, list(device_ids), name))

    def drop(self, request_id: str, pool: DeviceBlocks) -> None:
        """The request has lost its blocks: what was not planned is not asked for, and what is under way is called
        off."""
        for asking in self._asking:
            if asking.request_id == request_id and asking.device_ids:
                pool.free_blocks(asking.device_ids)
                asking.device_ids, asking.request_id = [], None
        job_id = self._receiving.pop(request_id, None)
        if job_id is not None:
            self._cancelled.append(job_id)

    def _finish_incoming(self, request: Request) -> None:
        incoming = self._incoming_of(request)
        self._incoming.pop(request.request_id, None)
        if incoming is not None and not incoming.is_asked:  # it ended before it was admitted
            self._asking.append(_Asking(incoming, None, 0, [], b""))

    def _incoming_of(self, request: Request) -> _Incoming | None:
        known = self._incoming.get(request.request_id)
        if known is not None or not self._config.consumes:
            return known
        params = _params(request)
        if not params.get("do_remote_prefill"):
            return None
        transfer_id = _text(params, "transfer_id") or _text(params, "remote_request_id")
        host, ports = _text(params, "remote_host"), _ports(params)
        if not (transfer_id and host and ports):
            return None
        incoming = _Incoming(transfer_id, _text(params, "remote_engine_id"), host, ports)
        self._incoming[request.request_id] = incoming
        return incoming

    # Steps.

    def arrived(self, request: Request) -> bool:
        """Whether a request that has arrived is to come from another engine."""
        return self.num_blocks(request) > 0

    def plan(self) -> tuple[tuple[PeerJob, ...], tuple[str, ...], tuple[int, ...]]:
        """Jobs that begin in this step, hand-overs that are withdrawn, and receives that are called off."""
        now = self._clock()
        for outgoing in [o for o in self._outgoing.values() if o.deadline is not None and o.deadline <= now]:
            self._metrics.expired_handovers += 1
            logger.warning("hand-over %s: nobody asked for it in time, its blocks are freed", outgoing.transfer_id)
            self._withdraw(outgoing)
        jobs = [*self._begun, *(self._open_receive(asking) for asking in self._asking)]
        withdrawn, cancelled = tuple(self._withdrawn), tuple(self._cancelled)
        self._begun, self._asking, self._withdrawn, self._cancelled = [], [], [], []
        return tuple(jobs), withdrawn, cancelled

    def _open_receive(self, asking: _Asking) -> PeerJob:
        incoming = asking.incoming
        job = self._jobs.open_peer(
            PeerAction.RECEIVE,
            incoming.transfer_id,
            asking.first,
            asking.device_ids,
            names=asking.name,
            host=incoming.host,
            ports=incoming.ports,
            engine_id=incoming.engine_id,
            request_id=asking.request_id if asking.device_ids else None,
        )
        if job.request_id is not None:
            self._receiving[job.request_id] = job.job_id
        return job

    def end(self, job: PeerJob, ok: bool) -> None:
        """A peer job was reported by every rank; the caller frees its blocks."""
        if job.action is PeerAction.SEND:
            self._end_send(job, ok)
            return
        if job.request_id is not None and self._receiving.get(job.request_id) == job.job_id:
            del self._receiving[job.request_id]
        if ok:
            self._metrics.received_blocks += job.num_blocks
        elif job.num_blocks:
            self._metrics.failed_receive_jobs += 1
            logger.warning("hand-over %s did not come: %d blocks will be computed", job.transfer_id, job.num_blocks)

    def _end_send(self, job: PeerJob, ok: bool) -> None:
        outgoing = self._outgoing.get(job.transfer_id)
        if outgoing is None or job.job_id not in outgoing.jobs:
            return  # withdrawn
        outgoing.jobs.discard(job.job_id)
        if not ok:
            # What it was to offer was not computed after all. Once more, and no livelock.
            outgoing.num_failed += 1
            outgoing.next_block = min(outgoing.next_block, job.first)
            if outgoing.num_failed > 1 or outgoing.deadline is not None:
                self._withdraw(outgoing)
        elif outgoing.deadline is not None and not outgoing.jobs:
            del self._outgoing[job.transfer_id]

    def reset(self) -> None:
        """Nothing that was computed until now may be used any more."""
        for outgoing in list(self._outgoing.values()):
            self._withdraw(outgoing)
        self._cancelled += self._receiving.values()
        self._receiving.clear()


def _params(request: Request) -> Mapping[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, Mapping) else {}


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    return value if isinstance(value, str) and len(value) <= _MOST_TEXT else ""


def _ports(params: Mapping[str, Any]) -> tuple[int, ...]:
    """They come from whoever sends requests: anything but ports is none."""
    ports = params.get("remote_ports") or [params.get("remote_port")]
    if not isinstance(ports, list) or not all(type(port) is int and 0 < port < 1 << 16 for port in ports):
        return ()
    return tuple(ports)
