"""The companions that a user has configured, told and asked as one: peers before storage; and observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..base import Request, ScheduledRequest, StateBlock
from ..config import Config
from ..errors import KVConnectorError
from ..index import CacheIdentity
from ..types import BlockHash, StepPlan, StepReport
from .companion import Admission, Companion
from .loads.choice import LoadPlanner
from .names import Roots
from .observers import Observers
from .peers.companion import PeerCompanion
from .ranks import RankStates
from .shared import Shared
from .storage.companion import StorageCompanion
from .tables import BlockTable


class Companions:
    """See `Companion` for the calls."""

    def __init__(
        self,
        config: Config,
        shared: Shared,
        loads: LoadPlanner,
        ranks: RankStates,
        identity: CacheIdentity | None,
        adapter_of: Callable[[Request], str],
        engine_id: str,
        world_size: int,
        observers: Observers,
    ) -> None:
        self._observers = observers
        # What another engine brings is not looked up in storage: peers are first.
        self._companions: list[Companion] = []
        if config.peer is not None:
            undivided = identity.undivided() if identity is not None else None
            roots = Roots.named(undivided, adapter_of)
            tp_size = identity.tp_size if identity is not None else world_size
            self._companions.append(PeerCompanion(config.peer, shared, roots, engine_id, world_size, tp_size))
        if config.storage is not None:
            roots = Roots.named(identity, adapter_of)
            self._companions.append(StorageCompanion(config.storage, shared, loads, ranks, roots))

    def arrived(self, request: Request) -> None:
        """The first that claims the request is the last that hears of it."""
        self._observers.arrived(request)
        for companion in self._companions:
            if companion.arrived(request):
                return

    def is_awaited(self, request_id: str) -> bool:
        """Whether one of them wants the request to wait."""
        return any(companion.is_awaited(request_id) for companion in self._companions)

    def num_hashes(self, request: Request) -> int:
        """Leading block hashes of the request whose blocks one of them would bring to the device, the most."""
        return max((companion.num_hashes(request) for companion in self._companions), default=0)

    def admitted(self, admission: Admission) -> None:
        """To all."""
        self._observers.admitted(admission)
        for companion in self._companions:
            companion.admitted(admission)

    def scheduled(self, item: ScheduledRequest, tables: Sequence[BlockTable], states: Sequence[StateBlock]) -> None:
        """To all."""
        for companion in self._companions:
            companion.scheduled(item, tables, states)

    def preempted(self, request_id: str) -> None:
        """To all."""
        self._observers.preempted(request_id)
        for companion in self._companions:
            companion.preempted(request_id)

    def given_up(self, request_id: str) -> None:
        """To all."""
        for companion in self._companions:
            companion.given_up(request_id)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """To all; what the engine returns is what the first of them says that says something."""
        self._observers.finished(request)
        told = [companion.finished(request) for companion in self._companions]
        return next((params for params in told if params is not None), None)

    def saved(self, host_ids: Sequence[int]) -> None:
        """To all."""
        for companion in self._companions:
            companion.saved(host_ids)

    def plan(self, plan: StepPlan) -> StepPlan:
        """The step's plan, with what all of them begin and call off."""
        for companion in self._companions:
            plan = companion.plan(plan)
        return plan

    def reported(self, report: StepReport) -> None:
        """To all."""
        for companion in self._companions:
            companion.reported(report)

    @property
    def may_warm(self) -> bool:
        """Whether one of them may."""
        return any(companion.may_warm for companion in self._companions)

    def warm(self, block_hashes: Sequence[BlockHash], tenant: int) -> bool:
        """Whether one of them has begun to."""
        return any(companion.warm(block_hashes, tenant) for companion in self._companions)

    def drain(self) -> int:
        """Blocks that all have still to write. Raises KVConnectorError where none writes any."""
        left = [num_blocks for companion in self._companions if (num_blocks := companion.drain()) is not None]
        if not left:
            raise KVConnectorError("there is no storage to write to: start the engine with the setting storage")
        return sum(left)

    def reset(self) -> bool:
        """To all; whether all are done."""
        done = [companion.reset() for companion in self._companions]
        return all(done)

    @property
    def is_busy(self) -> bool:
        """Whether something of any waits for the next plan."""
        return any(companion.is_busy for companion in self._companions)

    def stats(self) -> dict[str, float]:
        """Of all."""
        return {name: value for companion in self._companions for name, value in companion.stats().items()}
