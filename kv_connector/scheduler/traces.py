"""Traces of a share of the requests (layer 2): from the lookup to the bytes, a span for each job.

    kv_connector.request                     from arrival to end, with what it was admitted with
        kv_connector.load, .save             host memory and device
        kv_connector.storage.look_up, .fetch
        kv_connector.peer.receive, .send     another engine
        kv_connector.storage.back_up         under the save that brought its blocks, which may have ended long ago

Whether a request is traced follows from its trace id where the client or the engine gave it one, so that all engines
trace the same requests; and from its own id where not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias
from zlib import crc32

from ..base import Request
from ..types import Direction, PeerAction, PeerJob, StorageAction, StorageJob
from .observers import Job, kind_of

if TYPE_CHECKING:
    from .companion import Admission
    from .ledger import EndedJob

Attributes: TypeAlias = Mapping[str, "str | int | float | bool"]

_NAMES = {
    Direction.LOAD: "kv_connector.load",
    Direction.SAVE: "kv_connector.save",
    StorageAction.LOOK_UP: "kv_connector.storage.look_up",
    StorageAction.FETCH: "kv_connector.storage.fetch",
    StorageAction.BACK_UP: "kv_connector.storage.back_up",
    PeerAction.RECEIVE: "kv_connector.peer.receive",
    PeerAction.SEND: "kv_connector.peer.send",
}
_MOST_BLOCKS = 1 << 12
"""Host blocks whose save is remembered, for the span of their backup."""
_ALL = 1 << 32


class Span(Protocol):
    """Something that takes time. Calls return at once: what has ended is exported elsewhere."""

    def child(self, name: str, attributes: Attributes) -> Span:
        """Begin a part of it, which may end later than it."""

    def note(self, name: str, attributes: Attributes) -> None:
        """Something has happened in it."""

    def end(self, attributes: Attributes, ok: bool = True) -> None:
        """It is over."""


class Tracer(Protocol):
    """Where spans begin."""

    def begin(self, name: str, trace_headers: Mapping[str, str], attributes: Attributes) -> Span:
        """Begin a span, in the trace that these W3C headers name if they name one."""


class RequestTraces:
    """See `Observer` for the calls."""

    def __init__(self, tracer: Tracer, share: float) -> None:
        """`share` of the requests are traced: from 0 to 1."""
        self._tracer = tracer
        self._below = round(share * _ALL)
        self._requests: dict[str, Span] = {}
        self._jobs: dict[int, list[Span]] = {}
        self._saves: OrderedDict[int, Span] = OrderedDict()  # by host block, the oldest first

    def arrived(self, request: Request) -> bool:
        """The span of one that is traced begins."""
        request_id = request.request_id
        headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
        if _number(request_id, headers) >= self._below:
            return False
        attributes: Attributes = {"kv_connector.request_id": request_id, "kv_connector.tokens": request.num_tokens}
        self._requests[request_id] = self._tracer.begin("kv_connector.request", headers, attributes)
        return True

    def admitted(self, admission: Admission) -> None:
        """Where its blocks come from."""
        if (span := self._requests.get(admission.request.request_id)) is not None:
            counts = {"device": admission.first, "host": admission.num_loaded, "peer": admission.num_brought}
            span.note("admitted", {f"kv_connector.hit_blocks.{tier}": count for tier, count in counts.items()})

    def preempted(self, request_id: str) -> None:
        """It begins anew."""
        if (span := self._requests.get(request_id)) is not None:
            span.note("preempted", {})

    def finished(self, request: Request) -> None:
        """Jobs may be under way that nobody waits for."""
        if (span := self._requests.pop(request.request_id, None)) is not None:
            span.end({"kv_connector.tokens": request.num_tokens})

    def opened(self, job: Job, request_ids: Collection[str]) -> bool:
        """A span under each of the requests that are traced."""
        if isinstance(job, StorageJob) and job.action is StorageAction.BACK_UP:
            parents = self._take_saves(job)
        elif self._requests.keys().isdisjoint(request_ids):  # nearly always
            return False
        else:
            parents = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        if parents:
            kind = kind_of(job)
            self._jobs[job.job_id] = spans = [span.child(_NAMES[kind], _attributes(job)) for span in parents]
            if kind is Direction.SAVE:
                self._note_save(job, spans[0])
        return bool(parents)

    def ran(self, job: Job, rank: int, seconds: float) -> None:
        """How long the bytes moved."""
        for span in self._jobs[job.job_id]:
            span.note("moved", {"kv_connector.rank": rank, "kv_connector.seconds": seconds})

    def ended(self, ended: EndedJob, seconds: float) -> None:
        """Every rank has reported the job."""
        for span in self._jobs.pop(ended.job.job_id):
            span.end({"kv_connector.missing_blocks": len(ended.missing)}, ended.ok)

    def _note_save(self, job: Job, span: Span) -> None:
        assert not isinstance(job, PeerJob)
        saves = dict.fromkeys(job.host_ids.tolist(), span)
        for host_id in self._saves.keys() & saves.keys():  # what is saved anew is the youngest
            del self._saves[host_id]
        self._saves.update(saves)
        while len(self._saves) > _MOST_BLOCKS:
            self._saves.popitem(last=False)

    def _take_saves(self, job: StorageJob) -> list[Span]:
        """The saves that brought what is written now, each once. A host block that got something else in between is
        taken for what it held: a trace says so at worst, and no more than that."""
        found = [self._saves.pop(host_id, None) for host_id in job.host_ids.tolist()]
        return list({id(span): span for span in found if span is not None}.values())


def _number(request_id: str, headers: Mapping[str, str]) -> int:
    """Evenly spread below 2 ** 32; of a trace its last digits, which are random (W3C Trace Context, level 2)."""
    parts = headers.get("traceparent", "").split("-")
    if len(parts) >= 4 and len(parts[1]) == 32:
        try:
            return int(parts[1][-8:], 16)
        except ValueError:  # anybody may send anything
            pass
    return crc32(request_id.encode())


def _attributes(job: Job) -> Attributes:
    attributes: dict[str, str | int | float | bool] = {"kv_connector.job_id": job.job_id}
    if isinstance(job, StorageJob) and job.action is StorageAction.LOOK_UP:
        return attributes | {"kv_connector.asked_blocks": len(job.keys) // 32}
    if isinstance(job, PeerJob):
        attributes |= {"kv_connector.transfer_id": job.transfer_id}
    return attributes | {"kv_connector.blocks": job.num_blocks}
