"""KV transfer between engines: what this one offers, what it asks for, and when it gives up.

The two are named to each other by `kv_transfer_params`, in the form that vLLM's own connectors and proxies use. Only
whole blocks travel, of every block group what a hit needs that ends at the last of them (`transfer_end`); the consumer
computes what is behind it, at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...base import Request, ScheduledRequest, StateBlock
from ...config import PeerConfig
from ...errors import ConfigError
from ...types import BlockHash, PeerAction, PeerJob, StepPlan, StepReport
from ..companion import Admission, Companion
from ..ledger import EndedJob
from ..names import Roots
from ..shared import Shared
from ..tables import BlockTable
from .incoming import Incoming
from .outgoing import Outgoing


class PeerCompanion(Companion):
    """What the scheduler half knows of other engines. `engine_id` names this start of the engine, `roots` what its own
    hashes leave out."""

    def __init__(
        self, config: PeerConfig, shared: Shared, roots: Roots, engine_id: str, world_size: int, tp_size: int
    ) -> None:
        if world_size % tp_size:
            raise ConfigError(
                f"tp_size={tp_size} cannot be: world_size={world_size} is no multiple of it; give a divisor"
            )
        self._outgoing = Outgoing(config, shared, roots, engine_id, self)
        self._incoming = Incoming(config, shared, roots, self, tp_size, world_size // tp_size)
        self._tp_size = tp_size
        self._host = config.host
        self._ports = [config.port + rank if config.port else 0 for rank in range(world_size)]
        self._counters: dict[int, dict[str, float]] = {}  # by rank

    def arrived(self, request: Request) -> bool:
        """Whether the request is to come from another engine."""
        return self._incoming.num_hashes(request) > 0

    def is_awaited(self, request_id: str) -> bool:
        """Never: other engines bring blocks to the device."""
        return False

    def num_hashes(self, request: Request) -> int:
        """Leading block hashes whose blocks another engine has, as far as is known."""
        return self._incoming.num_hashes(request)

    def admitted(self, admission: Admission) -> None:
        """What another engine is to continue is offered from now on, unless a reset has made it stale."""
        if not admission.is_stale:
            self._outgoing.admitted(admission.request)
        self._incoming.admitted(admission)

    def scheduled(self, item: ScheduledRequest, tables: Sequence[BlockTable], states: Sequence[StateBlock]) -> None:
        """What the step completes is offered."""
        self._outgoing.scheduled(item, tables, states)

    def preempted(self, request_id: str) -> None:
        """What is offered of the request is let go of, and what it waits for is called off: else requests that hold
        each other's blocks wait for one another."""
        self._outgoing.suspend(request_id)
        self._incoming.lost_blocks(request_id)

    def given_up(self, request_id: str) -> None:
        """Nobody will ask for its blocks."""
        self._outgoing.withdraw(request_id)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """What another engine has to be told to continue the request, if one is to."""
        self._incoming.finished(request)
        return self._outgoing.finished(request, self._host, self._ports, self._tp_size)

    def saved(self, host_ids: Sequence[int]) -> None:
        """Nothing follows: what travels lies on the device."""

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return self._outgoing.is_busy or self._incoming.is_busy

    def plan(self, plan: StepPlan) -> StepPlan:
        """Jobs that begin, and what ends before its time."""
        plan = self._outgoing.plan(plan)
        receives, cancelled = self._incoming.plan()
        return replace(plan, peer=(*plan.peer, *receives), cancelled_peer=cancelled)

    def reported(self, report: StepReport) -> None:
        """Where a rank listens, and what its links have counted since its start. Where they are broken, nothing is
        offered or promised any more."""
        if report.peers_are_broken:
            self._outgoing.is_stopped = self._incoming.is_stopped = True
        if report.peer_port:
            self._ports[report.rank] = report.peer_port
        if report.peer_counters:
            self._counters[report.rank] = dict(report.peer_counters)

    def end(self, ended: EndedJob) -> None:
        """A peer job was reported by every rank."""
        assert isinstance(ended.job, PeerJob)
        (self._outgoing if ended.job.action is PeerAction.SEND else self._incoming).end(ended)

    @property
    def may_warm(self) -> bool:
        """Never: other engines are asked for requests alone."""
        return False

    def warm(self, block_hashes: Sequence[BlockHash], tenant: int) -> bool:
        """See `may_warm`."""
        return False

    def drain(self) -> int | None:
        """Nothing is written to other engines."""
        return None

    def reset(self) -> bool:
        """Nothing is offered, and nothing that is on its way is waited for."""
        self._incoming.reset()
        return self._outgoing.reset()

    def stats(self) -> dict[str, float]:
        """Counters over all ranks."""
        names = sorted(set().union(*self._counters.values()))
        return {f"peer_{name}": sum(rank.get(name, 0.0) for rank in self._counters.values()) for name in names}
