"""The live requests of the engine, their block tables, and what becomes of both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..base import Request
from ..index import PLAIN, BlockGroup, Terms
from ..metrics import CacheMetrics
from ..types import NO_BLOCK, CopyJob
from .control.hints import NO_HINTS, Hints
from .loads.leases import LoadLease, LoadLeases
from .saves.reachable import Reach
from .steps import InFlightSteps
from .tables import BlockTable

_NUM_DRAFTED = 2
"""Blocks, of each group, for the tokens that an engine drafts beyond those that it knows."""
_MOST_STATES = 8
"""Of a recurrent group at once: that which a request goes on with and the one before it, one from within a step, and
one for each token that is drafted."""


@dataclass(slots=True)
class RequestState:
    """What this half remembers of a live request."""

    request: Request
    admission: int = 0  # number of the latest
    is_counted: bool = False  # its hits and tokens are in the statistics
    tables: list[BlockTable] = field(default_factory=list)  # by block group
    num_hit_hashes: int = 0  # of leading blocks that were valid, or are loaded, when it was admitted
    load: LoadLease | None = None  # to be planned
    awaits_load: bool = False  # it is admitted once more when what it waits for is there
    awaits_both: bool = False  # a load, and what a companion brings behind it
    is_held: bool = False  # for the next step alone, see `SchedulerHalf.hold_computed`: what that leaves is not saved
    is_stale: bool = False  # what its blocks hold was computed before a reset: nothing of it is saved
    hints: Hints = NO_HINTS
    terms: Terms = PLAIN  # of its blocks
    is_saved: bool = True  # anything of it
    reach: Reach = field(default_factory=Reach)

    def num_missing(self, groups: Sequence[BlockGroup], block_size: int) -> int:
        """Device blocks that it would take over those that it holds, if it began anew; see `num_blocks_of`."""
        held = (len(table.block_ids) - table.block_ids.count(NO_BLOCK) for table in self.tables)
        needed = num_blocks_of(self.request, groups, block_size)
        return sum(max(0, need - has) for need, has in zip(needed, held, strict=False))

    @property
    def num_unsaved(self) -> int:
        """Blocks that the write policy wants and that found no room."""
        return sum(len(table.unsaved) for table in self.tables)


def num_blocks_of(request: Request, groups: Sequence[BlockGroup], block_size: int) -> list[int]:
    """Device blocks that it takes of each group, with drafts, if it is computed from its first token on. `block_size`:
    tokens of a block hash."""
    sizes = (block_size * group.hashes_per_block for group in groups)
    needed = [-(-request.num_tokens // size) + _NUM_DRAFTED for size in sizes]
    pairs = zip(groups, needed, strict=True)
    return [min(need, _MOST_STATES) if group.states_are_told else need for group, need in pairs]


class RequestTable:
    """Owns the state of requests from their first admission to their end: whoever takes blocks away does it here."""

    def __init__(self, leases: LoadLeases, steps: InFlightSteps, metrics: CacheMetrics) -> None:
        self._leases = leases
        self._steps = steps
        self._metrics = metrics
        self._states: dict[str, RequestState] = {}
        self._num_admissions = 0
        self._admitted: dict[str, RequestState] = {}  # since the last step was planned, that still have their blocks

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def holding(self, block_ids: Collection[int]) -> list[str]:
        """Requests that hold any of these device blocks, or were preempted of them since a load was planned that is to
        fill them."""
        wanted = set(block_ids)
        held = [(request_id, [t.block_ids for t in state.tables]) for request_id, state in self._states.items()]
        lost = ((request_id, tables) for request_id, tables in self._leases.dropped_since(wanted) if request_id in self)
        return [i for i, tables in (*held, *lost) if any(not wanted.isdisjoint(ids) for ids in tables)]

    def num_missing(self, groups: Sequence[BlockGroup], block_size: int) -> int:
        """Device blocks that requests which wait for a load would take over those that they hold, if they began anew:
        those that their windows have left behind, and what they have not reached."""
        return sum(state.num_missing(groups, block_size) for state in self if state.awaits_load)

    def lose(self, block_ids: Sequence[int]) -> None:
        """Loads were to fill these blocks and have not: see `LoadLeases.lose`. Who has them computes them anew, and the
        write policy sees all of its blocks anew: of those in front, this step has saved none."""
        self._leases.lose(block_ids, [[table.block_ids for table in state.tables] for state in self])
        lost = set(block_ids)
        for state in self:
            if any(not lost.isdisjoint(table.block_ids) for table in state.tables):
                for table in state.tables:
                    table.next_block = 0
                    table.unsaved.clear()

    def admit(self, request: Request, block_ids: Sequence[Sequence[int]], num_hit_hashes: int) -> RequestState:
        """The request has these device blocks, by group, whatever it had before."""
        state = self._states.setdefault(request.request_id, RequestState(request))
        assert state.load is None, f"request {request.request_id} is admitted twice without a step in between"
        self._num_admissions += 1
        state.admission = self._num_admissions
        # Who has not lost its blocks comes with the same ones once more: what they hold is as old as it was.
        state.is_stale &= bool(state.tables) and _go_on(state.tables, block_ids)
        state.tables = [BlockTable(list(ids)) for ids in block_ids]
        state.num_hit_hashes = num_hit_hashes
        state.reach = Reach()
        self._admitted[request.request_id] = state
        return state

    @property
    def num_beginning(self) -> int:
        """Those admitted since the last step was planned that still have their blocks."""
        return len(self._admitted)

    def take_admitted(self) -> list[RequestState]:
        """Those admitted since the last call that still have their blocks."""
        admitted, self._admitted = self._admitted, {}
        return list(admitted.values())

    def plan_loads(self) -> tuple[tuple[CopyJob, ...], tuple[CopyJob, ...]]:
        """Jobs of those admitted since the last call: those that the step waits for, and those that run behind it."""
        loads: list[CopyJob] = []
        background: list[CopyJob] = []
        admitted = [state for state in self.take_admitted() if state.load is not None]
        used = self._steps.used() if admitted else frozenset()
        for state in admitted:
            load, state.load = state.load, None
            assert load is not None
            job = self._leases.open(load, state.request.request_id, state.admission, used)
            (loads if load.background is None else background).append(job)
        self._metrics.sync_loads += len(loads)
        self._metrics.async_loads += len(background)
        return tuple(loads), tuple(background)

    def may_preempt(self, request_id: str) -> bool:
        """Whether blocks are known that the engine took. A request that was preempted between two steps may have been
        admitted again since: then its blocks are new ones."""
        state = self._states.get(request_id)
        return state is not None and bool(state.tables) and request_id not in self._admitted

    def is_silently_preempted(self, request_id: str, block_ids: Sequence[Sequence[int]], num_local_tokens: int) -> bool:
        """Whether a request that is being admitted with these blocks has lost other ones before, and nobody said so:
        not where it was waiting for a load of them, or goes on with them, as a session whose next input has come."""
        if not self.may_preempt(request_id) or self._states[request_id].awaits_load:
            return False
        return not num_local_tokens or not _go_on(self._states[request_id].tables, block_ids)

    def preempt(self, request_id: str) -> None:
        """The engine took the request's blocks, which steps in flight may still use."""
        state = self._states[request_id]
        self._steps.freed(chain.from_iterable(table.block_ids for table in state.tables))
        self._drop_blocks(state)

    def finish(self, request_id: str) -> RequestState | None:
        """The request has ended; None where it was never admitted."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._drop_blocks(state)
        return state

    def reset(self) -> None:
        """What the requests have computed until now is not saved any more."""
        for state in self._states.values():
            self.spoil(state)

    def spoil(self, state: RequestState) -> None:
        """What the request has computed until now is not saved any more."""
        state.is_stale = bool(state.tables)
        for table in state.tables:
            table.unsaved.clear()

    def _drop_blocks(self, state: RequestState) -> None:
        self._leases.dropped(state.request.request_id, [table.block_ids for table in state.tables])
        if state.load is not None:
            self._leases.drop(state.load)
            state.load = None
        self._metrics.dropped_saves_blocks += state.num_unsaved
        self._admitted.pop(state.request.request_id, None)
        state.tables = []
        state.awaits_load = False


def _go_on(tables: Sequence[BlockTable], block_ids: Sequence[Sequence[int]]) -> bool:
    """Whether these tables begin with the blocks of those, less what has left a window since."""
    return all(
        len(ids) >= len(table.block_ids)
        and all(new in (old, NO_BLOCK) for old, new in zip(table.block_ids, ids, strict=False))
        for table, ids in zip(tables, block_ids, strict=True)
    )
