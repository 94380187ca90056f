"""Which hits are loaded how, and the loads in the background.

A load in the background is announced to the engine before it ends: in the step that the engine will have taken note of
when the bytes are expected to be there. Should they be late, the step that reads them waits, on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...config import Config, LoadChoice
from ...metrics import CacheMetrics
from ...types import CopyJob
from ..watchdog import OVERDUE_SECONDS
from .rates import HitLoad, LoadEstimate, LoadMode

_LIGHT = 16
"""Tokens that are loaded for one that is computed, in a light step. An 8B model computes a token of a prompt in 27 us
and loads one in 2.4 (H200, bf16); larger ones have more to compute for each byte of their cache. With a sixteenth of
the tokens to compute, their layers wait for the link."""


def is_light(loads: Sequence[CopyJob], block_size: int, num_computed_tokens: int) -> bool:
    """Whether a step is light: it computes at most a sixteenth of the tokens of these `loads`, so it waits for most of
    what they take."""
    num_loaded_tokens = sum(job.num_blocks for job in loads) * block_size
    return 0 < num_loaded_tokens >= _LIGHT * num_computed_tokens


@dataclass(slots=True, eq=False)
class BackgroundLoad:
    """A load that no step waits for, from its request's admission on, until it is announced and the engine may have
    taken note."""

    host_ids: Sequence[int]
    reserved_at: float
    seconds: float  # that it is expected to take
    expected_end: float | None  # None where the rate is unknown
    may_announce: bool
    is_alone: bool  # nothing was in front of it on the link
    seen_at: float = 0.0  # under way, when it was the first on the link
    overdue: float = 0.0  # seconds by which `seen_at` has moved `expected_end`
    is_over: bool = False
    is_wanted: bool = True  # its request waits for it
    announced_in: int | None = None  # step
    engine_knows: bool = False
    is_counted_as_awaited: bool = False


class LoadPlanner:
    """Chooses how each hit is loaded, and follows the loads in the background. `LoadLeases` owns their blocks."""

    def __init__(
        self, config: Config, metrics: CacheMetrics, clock: Callable[[], float], fails_by_block: bool = True
    ) -> None:
        """Without `fails_by_block` the engine is told of failed loads by request only: all run in the background and
        none is announced, so that one that fails has kept its own request waiting, and nobody else has read a byte."""
        self.estimate = LoadEstimate(config.max_load_stall_ms / 1e3)
        self._choice = config.load_choice
        self._metrics = metrics
        self._clock = clock
        self._fails_by_block = fails_by_block
        self._asked: dict[str, LoadMode] = {}  # what waiting requests were answered last
        self._coalesced: dict[str, BackgroundLoad] = {}  # by waiting request
        self._reading: dict[int, BackgroundLoad] = {}  # by host block that is read in the background
        self._background: dict[int, BackgroundLoad] = {}  # by job, in the order of the link
        self._busy_until = 0.0  # the link, with loads in the background
        self._num_in_step = 0  # blocks that are loaded in the step that is being planned
        self._reported_step = 0
        self._planned: deque[tuple[int, float]] = deque()  # steps with loads in the background, and when
        self._expected_seconds = 0.0  # of those that ended since the last observation
        self._overdue = 0.0  # of the same

    @property
    def any_in_background(self) -> bool:
        """Whether a hit may lie on a load that is under way."""
        return bool(self._reading)

    def is_coalesced(self, request_id: str) -> bool:
        """Whether the load that the request was told to wait for is still under way. Costs no lookup."""
        load = self._coalesced.get(request_id)
        return load is not None and not load.is_over and not self._is_overdue(load)

    def choose(self, request_id: str, hit: HitLoad, first_blocks: Sequence[int], may_wait: bool = True) -> LoadMode:
        """How this hit comes to the device. `first_blocks`: host blocks of the first group where it begins. A request
        that asks again has found no room on the device. One that may not wait, since it has waited in vain, is loaded
        in the step or computed: an engine may refuse blocks to a request that waits for as long as others behind it
        hold theirs, and those may have waited in vain, too."""
        load = self._reading.get(first_blocks[0]) if first_blocks else None
        if load is not None and self._is_overdue(load):
            load = None
        before = self._asked.get(request_id)
        found_no_room = before not in (None, LoadMode.COALESCED)
        mode = self._choose(hit, load, found_no_room)
        if mode is LoadMode.ASYNC and not may_wait:
            mode = LoadMode.SYNC if self._fails_by_block else LoadMode.RECOMPUTE
        self._asked[request_id] = mode
        if mode is LoadMode.COALESCED and load is not None:
            self._coalesced[request_id] = load
            self._metrics.coalesced_loads += before is not mode
        else:
            self._coalesced.pop(request_id, None)
        return mode

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """How long computing so many tokens would take; None where that is unknown, or does not matter because every
        hit is to be loaded."""
        return self.estimate.recompute_seconds(num_tokens) if self._choice is LoadChoice.AUTO else None

    def withdraw(self, request_id: str) -> None:
        """The request has nothing to load any more."""
        self._asked.pop(request_id, None)
        self._coalesced.pop(request_id, None)

    def admit(self, request_id: str) -> LoadMode | None:
        """The request is admitted on the last choice; None where there was none."""
        self._coalesced.pop(request_id, None)
        mode = self._asked.pop(request_id, None)
        if mode is not None:
            self.estimate.admitted(mode)
        return mode

    def load_in_step(self, num_blocks: int) -> None:
        """So many more blocks, or fewer where it is less than 0, are loaded in the step that is being planned, until
        `announce`."""
        self._num_in_step += num_blocks

    def reserve(self, host_ids: Sequence[int], may_announce: bool = True) -> BackgroundLoad:
        """A load of these blocks will run in the background, behind those before it. Without `may_announce` it is over
        when it has ended, and not before."""
        now, seconds = self._clock(), self.estimate.load_seconds(len(host_ids))
        end, is_alone = None, not self._background and self._busy_until <= now
        if seconds is not None:
            self._busy_until = end = max(now + self.estimate.delay_seconds, self._busy_until) + seconds
        load = BackgroundLoad(host_ids, now, seconds or 0.0, end, may_announce and self._fails_by_block, is_alone)
        self._reading |= dict.fromkeys(host_ids, load)
        return load

    def release(self, load: BackgroundLoad) -> None:
        """It was reserved and will not be planned."""
        self._set_over(load)
        self._see_free_link()

    def begin(self, load: BackgroundLoad, job_id: int) -> None:
        """A load that was reserved is planned now."""
        self._background[job_id] = load

    def unwanted(self, job_id: int) -> None:
        """The request that waited for this load has lost its blocks: the engine is not told that it is received."""
        self._background[job_id].is_wanted = False

    def end(self, job: CopyJob, ok: bool = True) -> None:
        """A load in the background was reported by every rank. What one has taken that failed is not known. Those
        behind it are told when it is known how long it has taken, as that counts once: `observe`, `note_reported`."""
        load = self._background.pop(job.job_id)
        self._set_over(load)
        if not ok:
            return
        self._expected_seconds += load.seconds
        self._overdue += load.overdue
        if load.expected_end is None:
            return
        if load.is_alone:
            self.estimate.observe_delay(load.seen_at - load.reserved_at - load.seconds)
        else:  # which counts what was in front of it, too
            self.estimate.observe_no_more_delay(self._clock() - load.reserved_at - load.seconds)

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Loads of so many blocks ended that took so long together: those behind them end that much later."""
        self.estimate.observe_load(num_blocks, seconds)
        late, self._expected_seconds = seconds - self._expected_seconds, 0.0
        if self._overdue:  # those behind were told as much already
            late, self._overdue = max(0.0, late - self._overdue), 0.0
        self._delay(late)
        self._see_free_link()

    def announce(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Loads to announce in this step, and announced ones that the step has to wait for, as it may read them. The
        step is planned: what is loaded in one from now on is loaded in the next."""
        self._num_in_step = 0
        if not self._background:
            return (), ()
        now = self._clock()
        self._planned.append((step, now))
        in_flight = step - 1 - self._reported_step  # an engine that plans ahead takes note of this step that much later
        limit = now + self.estimate.lead_seconds(1 + in_flight)
        announced, awaited = [], []
        for job_id, load in self._background.items():
            may_announce = load.may_announce and load.is_wanted and load.announced_in is None
            if may_announce and load.expected_end is not None and load.expected_end <= limit:
                load.announced_in = step
                announced.append(job_id)
            if load.engine_knows:
                awaited.append(job_id)
                self._metrics.awaited_async_loads += not load.is_counted_as_awaited
                load.is_counted_as_awaited = True
        return tuple(announced), tuple(awaited)

    def note_reported(self, step: int) -> None:
        """The engine took in what ranks said in this step: it may schedule what was announced until then."""
        self._reported_step = step
        for load in self._background.values():
            load.engine_knows |= load.announced_in is not None and load.announced_in <= step
        planned_at = 0.0
        while self._planned and self._planned[0][0] <= step:
            planned_at = self._planned.popleft()[1]
        self._see_free_link()  # also where a load failed, and nothing was observed
        self._see_under_way(planned_at)

    def _set_over(self, load: BackgroundLoad) -> None:
        load.is_over = True
        for block_id in load.host_ids:
            if self._reading.get(block_id) is load:
                del self._reading[block_id]

    def _see_under_way(self, at: float) -> None:
        """Some rank has looked later than that, and the first load on the link had not ended. Where it should have, it
        and those behind it end later."""
        load = next(iter(self._background.values()), None)
        if load is None or load.expected_end is None:
            return
        load.seen_at = max(load.seen_at, at)
        overdue = load.seen_at - load.expected_end
        if overdue > 0:
            load.overdue += overdue
            self._delay(overdue)

    def _see_free_link(self) -> None:
        """Nothing is in front of the first load on the link now, whatever was expected of those that were: they began
        sooner, failed, or were dropped. So it begins at once, unless it was admitted a moment ago."""
        now = self._clock()
        load = next(iter(self._background.values()), None)
        if load is None and not self._reading:  # nor will any load be planned
            self._busy_until = min(self._busy_until, now)
        if load is not None and load.expected_end is not None:
            begin = max(now, load.reserved_at + self.estimate.delay_seconds)
            self._delay(min(0.0, begin + load.seconds - load.expected_end))

    def _delay(self, seconds: float) -> None:
        """All loads under way end so much later; sooner, where it is less than 0."""
        self._busy_until += seconds
        for load in self._background.values():
            if load.expected_end is not None:
                load.expected_end += seconds

    def _is_overdue(self, load: BackgroundLoad) -> bool:
        return self._clock() - load.reserved_at > OVERDUE_SECONDS

    def _choose(self, hit: HitLoad, load: BackgroundLoad | None, found_no_room: bool) -> LoadMode:
        if self._choice is LoadChoice.SYNC and self._fails_by_block:
            mode = LoadMode.SYNC
        elif self._choice is not LoadChoice.AUTO:
            mode = LoadMode.ASYNC if load is None else LoadMode.COALESCED
        else:
            coalesced_seconds = None if load is None else 0.0
            if load is not None and load.expected_end is not None:
                coalesced_seconds = max(0.0, load.expected_end - self._clock())
            mode = self.estimate.choose(hit, coalesced_seconds, self._num_in_step, found_no_room)
        return LoadMode.ASYNC if mode is LoadMode.SYNC and not self._fails_by_block else mode
