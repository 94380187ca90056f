"""Parts of the scheduler half that a user configures: storage, other engines (layer 2).

    arrived -> is_awaited, num_hashes (any number of times) -> admitted -> scheduled, preempted, admitted -> finished

`Companions` tells each of every event, peers before storage, but for arrivals: the first that claims a request
is the last that hears of it. One that has no use for an event says so in an empty method, and one that forgets it does
not type-check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..base import Request, ScheduledRequest, StateBlock
from ..types import BlockHash, StepPlan, StepReport
from .ledger import EndedJob
from .tables import BlockTable


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was admitted, for the first time or again. Of its block hashes those from `first` on are loaded
    from the host, `num_loaded` of them, and behind these `num_brought` by companions. `tables` are its blocks, by block
    group. `number` tells this admission from others of the same request id. What `is_stale` was computed before a reset
    of the cache."""

    request: Request
    number: int
    first: int
    num_loaded: int
    num_brought: int
    tables: Sequence[BlockTable]
    is_stale: bool


class Companion(Protocol):
    """A part of the scheduler half that is called at every event: storage, peers, a recorder. Called from the
    scheduler's thread. It is the owner of its jobs, too."""

    def arrived(self, request: Request) -> bool:
        """A request has arrived, or is looked up again. True claims it: later companions are not called for it."""

    def is_awaited(self, request_id: str) -> bool:
        """Whether the request should wait for blocks that are being read to the host. Changes nothing."""

    def num_hashes(self, request: Request) -> int:
        """Leading block hashes of the request whose blocks this companion would bring to the device itself."""

    def admitted(self, admission: Admission) -> None:
        """A request has its device blocks."""

    def scheduled(self, item: ScheduledRequest, tables: Sequence[BlockTable], states: Sequence[StateBlock]) -> None:
        """The step that is being planned computes a part of the request, or none of it; once it has run, `states` are
        there."""

    def preempted(self, request_id: str) -> None:
        """The request has lost its device blocks and will be admitted again."""

    def given_up(self, request_id: str) -> None:
        """The request is about to be aborted, and no other engine shall continue it."""

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request has ended, before it was admitted or after; returns the `kv_transfer_params` of its answer, if
        any."""

    def saved(self, host_ids: Sequence[int]) -> None:
        """Host blocks were filled by a save."""

    def plan(self, plan: StepPlan) -> StepPlan:
        """Returns the step's plan with the jobs that this companion begins and cancels. Called once a step."""

    def reported(self, report: StepReport) -> None:
        """The report of one rank, whose ended jobs have been handled already."""

    def end(self, ended: EndedJob) -> None:
        """Every rank has reported one of this companion's jobs, whose leases are released right after."""

    @property
    def may_warm(self) -> bool:
        """Whether prefixes may be read to the host now without a request for them."""

    def warm(self, block_hashes: Sequence[BlockHash], tenant: int) -> bool:
        """Read a tenant's prefix to the host without a request for it; returns whether that has begun."""

    def drain(self) -> int | None:
        """Write all blocks of the host to storage; returns how many blocks are still to be written, None if this
        companion writes none."""

    def reset(self) -> bool:
        """Nothing that was computed until now may be used any more; returns whether that holds already."""

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""

    def stats(self) -> Mapping[str, float]:
        """Counters and gauges over all ranks, under names that `metrics.DOCUMENTATION` has."""
