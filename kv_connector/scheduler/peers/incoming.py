"""What this engine asks for: prompts that another engine has computed.

admitted --a RECEIVE job of each block group for what neither device nor host has--> the request waits for them as for
any load in the background; what fails is computed
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from ...base import Request
from ...config import PeerConfig
from ...index import adopt_hash
from ...log_limiter import LogLimiter
from ...types import NO_BLOCK, PeerAction, PeerJob
from ..companion import Admission
from ..ledger import EndedJob, JobOwner
from ..names import Roots
from ..shared import Shared
from .params import params_of, ports, text, transfer_end


@dataclass(slots=True)
class _Source:
    """Where a request's prompt was computed. It is asked once."""

    transfer_id: str
    engine_id: str
    host: str
    ports: tuple[int, ...]
    is_asked: bool = False


@dataclass(slots=True)
class _Asking:
    """Blocks of a block group of an admitted request that are leased and not yet planned."""

    source: _Source
    request_id: str | None
    admission: int
    group: int
    first: int
    device_ids: list[int]
    name: bytes


class Incoming:
    """`roots` name what the engine's own hashes leave out; `owner` opens the jobs. Each of the engine's `num_stages`
    stages has `tp_size` ranks."""

    def __init__(
        self, config: PeerConfig, shared: Shared, roots: Roots, owner: JobOwner, tp_size: int, num_stages: int
    ) -> None:
        self.is_stopped = False
        """Whether nothing can be received any more, and nothing is promised."""
        self._config = config
        self._shared = shared
        self._roots = roots
        self._owner = owner
        self._tp_size = tp_size
        self._num_stages = num_stages
        self._sources: dict[str, _Source] = {}  # by request
        self._receiving: dict[str, list[int]] = {}  # by request: its jobs under way
        self._asking: list[_Asking] = []
        self._cancelled: list[int] = []
        self._log_limiter = LogLimiter(shared.clock)

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return bool(self._asking or self._cancelled)

    def num_hashes(self, request: Request) -> int:
        """Leading block hashes of the request whose blocks another engine has, as far as is known; 0 where nobody is to
        be asked."""
        source = self._source_of(request)
        if source is None or source.is_asked or self.is_stopped:
            return 0
        return transfer_end(request, self._shared)

    def admitted(self, admission: Admission) -> None:
        """Where nothing is to come, the other engine is told so: it need not hold what it has. Of a prompt without a
        whole block it has nothing to hold."""
        request = admission.request
        source = self._source_of(request)
        if source is None or source.is_asked:
            return
        source.is_asked = True
        self._sources[request.request_id] = source
        if not admission.num_brought:
            self._want_nothing(request, source)
            return
        first = admission.first + admission.num_loaded
        for group, blocks in enumerate(self._shared.grouped.needed(first, first + admission.num_brought)):
            device_ids = _held(admission.tables[group].block_ids[blocks.start : blocks.stop])
            self._shared.pool.touch(device_ids)
            start = blocks.stop - len(device_ids)
            name = self._name(request, group, blocks)
            who = request.request_id, admission.number
            self._asking.append(_Asking(source, *who, group, start, device_ids, name))

    def lost_blocks(self, request_id: str) -> None:
        """The request has lost its blocks: what was not planned is not asked for, and what is under way is called
        off."""
        for asking in self._asking:
            if asking.request_id == request_id and asking.device_ids:
                self._shared.pool.free_blocks(asking.device_ids)
                asking.device_ids, asking.request_id = [], None
        self._cancelled += self._receiving.pop(request_id, ())

    def finished(self, request: Request) -> None:
        """The request has ended. Where that was before it was admitted, the other engine need not wait for it."""
        self.lost_blocks(request.request_id)
        source = self._source_of(request)
        self._sources.pop(request.request_id, None)
        if source is not None and not source.is_asked:
            self._want_nothing(request, source)

    def plan(self) -> tuple[tuple[PeerJob, ...], tuple[int, ...]]:
        """Jobs that begin in this step, and jobs that are called off."""
        jobs = tuple(self._open(asking) for asking in self._asking)
        cancelled, self._cancelled, self._asking = self._cancelled, [], []
        return jobs, tuple(cancelled)

    def end(self, ended: EndedJob) -> None:
        """A RECEIVE was reported by every rank."""
        job, metrics = ended.job, self._shared.metrics
        assert isinstance(job, PeerJob)
        receiving = self._receiving.get(job.request_id or "", [])
        if job.job_id in receiving:
            receiving.remove(job.job_id)
        who = f"{job.host}:{job.ports[0]}"
        if ended.ok:
            metrics.received_blocks += job.num_blocks
            self._log_limiter.well(who)
        elif job.num_blocks:
            metrics.failed_receive_jobs += 1
            example = f"{job.transfer_id!r}, {job.num_blocks} blocks"
            self._log_limiter.fault(who, "KV transfers do not come, their blocks are computed here", example)

    def reset(self) -> None:
        """Nothing that was computed until now may be used any more."""
        self._cancelled += chain.from_iterable(self._receiving.values())
        self._receiving.clear()

    def _want_nothing(self, request: Request, source: _Source) -> None:
        """The other engine may let go of what it has of any group."""
        for group, blocks in enumerate(self._shared.grouped.needed(0, transfer_end(request, self._shared))):
            if blocks:
                self._asking.append(_Asking(source, None, 0, group, 0, [], self._name(request, group, blocks)))

    def _name(self, request: Request, group: int, blocks: range) -> bytes:
        """The name of the last of these blocks."""
        keys = self._shared.grouped.keys(request.block_hashes, group)
        return adopt_hash(self._roots.of(request), keys[blocks.stop - 1])

    def _source_of(self, request: Request) -> _Source | None:
        known = self._sources.get(request.request_id)
        if known is not None or not self._config.consumes:
            return known
        params = params_of(request)
        if not params.get("do_remote_prefill"):
            return None
        transfer_id = text(params, "transfer_id") or text(params, "remote_request_id")
        host, found = text(params, "remote_host"), ports(params, self._tp_size, self._num_stages)
        if not (transfer_id and host and found):
            return None
        return _Source(transfer_id, text(params, "remote_engine_id"), host, found)

    def _open(self, asking: _Asking) -> PeerJob:
        source = asking.source
        tp_size, num_over = divmod(len(source.ports), self._num_stages)
        job = PeerJob(
            self._shared.ledger.next_id(),
            PeerAction.RECEIVE,
            source.transfer_id,
            asking.first,
            np.array(asking.device_ids, dtype=np.int64),
            names=asking.name,
            host=source.host,
            ports=source.ports,
            tp_size=0 if num_over else tp_size,
            engine_id=source.engine_id,
            request_id=asking.request_id if asking.device_ids else None,
            admission=asking.admission,
            group=asking.group,
        )
        self._shared.ledger.open(job, self._owner, (asking.request_id,) if asking.request_id else ())
        if job.request_id is not None:
            self._receiving.setdefault(job.request_id, []).append(job.job_id)
        return job


def _held(device_ids: list[int]) -> list[int]:
    """What an engine holds of a window: what is in front of its first block it has no use for."""
    while NO_BLOCK in device_ids:
        device_ids = device_ids[device_ids.index(NO_BLOCK) + 1 :]
    return device_ids
