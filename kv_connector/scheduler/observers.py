"""Who hears of requests and jobs and decides nothing (layer 2): histograms, traces.

arrived -> admitted -> preempted, admitted -> finished, of requests of whose arrival an observer wanted to hear more
opened -> ran (once for each rank that knows) -> ended, of jobs whose opening an observer wanted to hear more of
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..histograms import Histogram
from ..metrics import CacheMetrics
from ..types import CopyJob, Direction, PeerAction, PeerJob, StorageAction, StorageJob

if TYPE_CHECKING:
    from ..base import Request
    from .companion import Admission
    from .ledger import EndedJob

logger = logging.getLogger("kv_connector.scheduler")

Job = CopyJob | StorageJob | PeerJob
Kind = Direction | StorageAction | PeerAction

_SERIES: dict[Kind, tuple[str, str]] = {
    Direction.LOAD: ("load_seconds", "host"),
    Direction.SAVE: ("save_seconds", "host"),
    StorageAction.LOOK_UP: ("lookup_seconds", "storage"),
    StorageAction.FETCH: ("load_seconds", "storage"),
    StorageAction.BACK_UP: ("save_seconds", "storage"),
    PeerAction.RECEIVE: ("load_seconds", "peer"),
    PeerAction.SEND: ("save_seconds", "peer"),
}
_RANK_SERIES: dict[Kind, tuple[str, str]] = {
    StorageAction.FETCH: ("storage_read_seconds", "storage"),
    StorageAction.BACK_UP: ("storage_write_seconds", "storage"),
}


def kind_of(job: Job) -> Kind:
    """What a job does."""
    return job.direction if isinstance(job, CopyJob) else job.action


class JobObserver(Protocol):
    """Hears of jobs, from the thread of the scheduler half, and must be quick."""

    def opened(self, job: Job, request_ids: Collection[str]) -> bool:
        """A job is planned, for these requests as far as is known, of which somebody wants to hear, or for none.
        Returns whether to tell what becomes of it."""

    def ran(self, job: Job, rank: int, seconds: float) -> None:
        """It is done on a rank, and took so long there; other jobs may have run with it."""

    def ended(self, ended: EndedJob, seconds: float) -> None:
        """Every rank has reported it, so long after it was opened."""


class Observer(JobObserver, Protocol):
    """Hears of requests, too. One that returns quickly costs a step nothing: it is not told of what steps compute."""

    def arrived(self, request: Request) -> bool:
        """A request has arrived, or is looked up once more and nobody wanted to hear of it before. Returns whether to
        tell what becomes of it."""

    def admitted(self, admission: Admission) -> None:
        """It has its device blocks."""

    def preempted(self, request_id: str) -> None:
        """It has lost them and will be admitted again."""

    def finished(self, request: Request) -> None:
        """It has ended, before it was admitted or after."""


class GuardedObserver:
    """Another observer, for whose faults no engine pays: it hears no more once it has raised something."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def arrived(self, request: Request) -> bool:
        """See `Observer`, as of all below."""
        return bool(self._tell("arrived", request))

    def admitted(self, admission: Admission) -> None:
        """To the other."""
        self._tell("admitted", admission)

    def preempted(self, request_id: str) -> None:
        """To the other."""
        self._tell("preempted", request_id)

    def finished(self, request: Request) -> None:
        """To the other."""
        self._tell("finished", request)

    def opened(self, job: Job, request_ids: Collection[str]) -> bool:
        """To the other."""
        return bool(self._tell("opened", job, request_ids))

    def ran(self, job: Job, rank: int, seconds: float) -> None:
        """To the other."""
        self._tell("ran", job, rank, seconds)

    def ended(self, ended: EndedJob, seconds: float) -> None:
        """To the other."""
        self._tell("ended", ended, seconds)

    def _tell(self, what: str, *told: object) -> object:
        if self._observer is None:
            return None
        try:
            return getattr(self._observer, what)(*told)
        except Exception:  # it may call others' code, such as an exporter of traces
            logger.exception(
                "%s raised and is not called any more, the engine continues", type(self._observer).__name__
            )
            self._observer = None
            return None


class Observers:
    """All of them. A request that none wants to hear of, as nearly all are where a share is traced, costs a look at a
    dictionary from then on, and a job of such requests another one."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self._of: dict[str, list[Observer]] = {}  # who wants to hear of a request

    def arrived(self, request: Request) -> None:
        """To all, until one wants to hear more."""
        if request.request_id in self._of:
            return
        if observers := [observer for observer in self._observers if observer.arrived(request)]:
            self._of[request.request_id] = observers

    def admitted(self, admission: Admission) -> None:
        """To those that want to hear of the request, as of all below."""
        for observer in self._of.get(admission.request.request_id, ()):
            observer.admitted(admission)

    def preempted(self, request_id: str) -> None:
        """See `Observer`."""
        for observer in self._of.get(request_id, ()):
            observer.preempted(request_id)

    def finished(self, request: Request) -> None:
        """See `Observer`."""
        for observer in self._of.pop(request.request_id, ()):
            observer.finished(request)

    def opened(self, job: Job, request_ids: Collection[str]) -> Sequence[JobObserver]:
        """Who wants to hear what becomes of a job."""
        if request_ids and self._of.keys().isdisjoint(request_ids):
            return ()
        return [observer for observer in self._observers if observer.opened(job, request_ids)]


class JobTimes:
    """Histograms of how long all jobs took that were done."""

    def __init__(self, metrics: CacheMetrics) -> None:
        self._of_jobs: Mapping[Kind, Histogram] = {kind: metrics.histograms[key] for kind, key in _SERIES.items()}
        self._of_ranks: Mapping[Kind, Histogram] = {kind: metrics.histograms[key] for kind, key in _RANK_SERIES.items()}

    def ran(self, job: Job, seconds: float) -> None:
        """Storage's own part of a job's time, on a rank."""
        if (histogram := self._of_ranks.get(kind_of(job))) is not None:
            histogram.observe(seconds)

    def ended(self, ended: EndedJob, seconds: float) -> None:
        """What failed is counted elsewhere, and what moves no block, but for lookups, nowhere."""
        kind = kind_of(ended.job)
        if ended.ok and (ended.job.num_blocks or kind is StorageAction.LOOK_UP):
            self._of_jobs[kind].observe(seconds)
