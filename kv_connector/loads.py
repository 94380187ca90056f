"""How a hit comes to the device (layer 1): at once, beside other work, on another's load, or not at all.

    sync        the step waits for it layer by layer; for hits that hide behind what the step computes
    async       the request waits for it while others run; for hits that would hold the others up
    ride        another request's load of the same prefix is under way: ask again, it will be a device hit
    recompute   the model is sooner

The choice is made from rates that were observed, never from constants; as long as one is unknown the answer is sync,
which is how it becomes known.

A load in the background is announced to the engine before it ends: in the step that the engine will have taken note of
when the bytes are expected to be there. Should they be late, the step that reads them waits, on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from .config import Config, LoadChoice
from .metrics import CacheMetrics
from .types import CopyJob

_SMOOTHING = 0.25  # share of a slower observation in a rate
MOST_SKIPPED = 8
"""Hits computed in a row, after which one is loaded all the same: else a rate would never change again."""
_STEPS = 5  # whose durations are remembered
_PREFILL_TOKENS = 64  # a step of fewer tokens says nothing about the speed of prefill


class LoadMode(Enum):
    """How a hit comes to the device."""

    SYNC = "sync"
    ASYNC = "async"
    RIDE = "ride"
    RECOMPUTE = "recompute"


@dataclass(slots=True)
class Rate:
    """A quotient that follows faster observations at once and slower ones slowly; 0 where nothing was observed.

    What delays a measurement (another copy, a busy host, a compiler) makes it slower and never faster.
    """

    value: float = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Take in one measurement; those without duration say nothing."""
        if seconds > 0:
            rate = amount / seconds
            self.value = max(rate, self.value + _SMOOTHING * (rate - self.value))

    def seconds(self, amount: float) -> float | None:
        """How long `amount` takes; None where that is unknown."""
        return amount / self.value if self.value else None


class LoadEstimate:
    """Observed speeds of loading and of prefill, and the choice between them. No clock of its own."""

    def __init__(self, max_stall_seconds: float) -> None:
        """`max_stall_seconds`: a load that would hold running requests up for longer is asynchronous."""
        self._max_stall = max_stall_seconds
        self._loading = Rate()  # blocks a second
        self._prefill = Rate()  # tokens a second
        self._steps: dict[int, tuple[float, int]] = {}  # step: (when it was planned, tokens that it computes)
        self._last_end = 0.0
        self._last_plan = 0.0
        self._intervals: deque[float] = deque([0.0] * _STEPS, maxlen=_STEPS)  # between the last plans
        self._num_skipped = 0

    def lead_seconds(self, num_steps: int) -> float:
        """A load that ends within this time will be there `num_steps` steps from now, or holds a step up no longer than
        it may. Of the last steps the median counts: one may have been unusual."""
        return max(num_steps * median(self._intervals), self._max_stall)

    def observe_load(self, num_blocks: int, seconds: float) -> None:
        """A load of so many blocks took so long on the slowest rank."""
        self._loading.observe(num_blocks, seconds)

    def step_planned(self, step: int, num_tokens: int, num_loads: int, now: float) -> None:
        """A step was planned. One that loads says nothing about the speed of computing."""
        self._intervals.append(now - self._last_plan)
        self._last_plan = now
        if num_tokens >= _PREFILL_TOKENS and not num_loads:
            self._steps[step] = (now, num_tokens)

    def step_ended(self, step: int, now: float) -> None:
        """Its report came in. Steps overlap, so each began at the end of the one before it at the earliest."""
        planned = self._steps.pop(step, None)
        if planned is not None:
            self._prefill.observe(planned[1], now - max(planned[0], self._last_end))
        self._last_end = now

    def admitted(self, mode: LoadMode) -> None:
        """A request with a hit was admitted on this choice."""
        self._num_skipped = self._num_skipped + 1 if mode is LoadMode.RECOMPUTE else 0

    def load_seconds(self, num_blocks: int) -> float | None:
        """How long a load of so many blocks will take."""
        return self._loading.seconds(num_blocks)

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """How long computing so many tokens takes; None where that is unknown."""
        return self._prefill.seconds(num_tokens)

    def choose(
        self,
        num_blocks: int,
        num_hit_tokens: int,
        num_new_tokens: int,
        others_running: bool,
        seconds_to_ride: float | None,
    ) -> LoadMode:
        """How `num_blocks` blocks come to the device, which save computing `num_hit_tokens`.

        `seconds_to_ride`: until another's load of the same prefix ends; None where there is none.
        """
        load, recompute = self._loading.seconds(num_blocks), self.recompute_seconds(num_hit_tokens)
        if seconds_to_ride is not None:
            return LoadMode.RECOMPUTE if recompute is not None and recompute < seconds_to_ride else LoadMode.RIDE
        if load is None or recompute is None:
            return LoadMode.SYNC
        if recompute < load and self._num_skipped < MOST_SKIPPED:
            return LoadMode.RECOMPUTE
        hidden = self._prefill.seconds(num_new_tokens) or 0.0
        return LoadMode.ASYNC if others_running and load - hidden > self._max_stall else LoadMode.SYNC


@dataclass(slots=True)
class _BackgroundLoad:
    """A load that no step waits for, until it is announced and the engine may have taken note."""

    seconds: float  # that it is expected to take
    expected_end: float | None  # None where the rate is unknown
    announced_in: int | None = None  # step
    is_noted: bool = False
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class _Ride:
    """What a look-up has found of a request that waits for another's load; `host_id` is of its first block."""

    host_id: int
    num_blocks: int
    num_hit_tokens: int
    num_new_tokens: int


class LoadPlanner:
    """Chooses how each hit is loaded, and follows the loads in the background. The scheduler half owns their leases."""

    def __init__(self, config: Config, metrics: CacheMetrics, clock: Callable[[], float]) -> None:
        self.estimate = LoadEstimate(config.max_load_stall_ms / 1e3)
        self._choice = config.load_choice
        self._metrics = metrics
        self._clock = clock
        self._asked: dict[str, LoadMode] = {}  # what waiting requests were answered last
        self._riding: dict[str, _Ride] = {}  # those of them that wait for another's load
        self._ends: dict[int, float | None] = {}  # host blocks that background loads read, and when those will end
        self._background: dict[int, _BackgroundLoad] = {}  # by job, in the order of the link
        self._busy_until = 0.0  # the link, with loads in the background
        self._reported_step = 0
        self._expected_seconds = 0.0  # of those that ended since the last observation

    @property
    def any_in_background(self) -> bool:
        """Whether a hit may lie on a load that is under way."""
        return bool(self._ends)

    def choose(
        self,
        request_id: str,
        num_blocks: int,
        num_hit_tokens: int,
        num_new_tokens: int,
        others_running: bool,
        first_blocks: Sequence[int],
    ) -> LoadMode:
        """How this hit comes to the device. `first_blocks`: host blocks of its first block, by group."""
        mode = self._choose(num_blocks, num_hit_tokens, num_new_tokens, others_running, first_blocks)
        self._riding.pop(request_id, None)
        if mode is LoadMode.RIDE:
            self._riding[request_id] = _Ride(first_blocks[0], num_blocks, num_hit_tokens, num_new_tokens)
        before, self._asked[request_id] = self._asked.get(request_id), mode
        self._metrics.ridden_loads += mode is LoadMode.RIDE and before is not mode
        return mode

    def still_rides(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request, `num_tokens` of which are not computed, waits on: what it was found to wait for when it
        was looked up goes on, and computing is not sooner. Every waiting request is asked in every step."""
        ride = self._riding.get(request_id)
        if ride is None or ride.num_hit_tokens + ride.num_new_tokens != num_tokens:
            return False
        known = ride.num_blocks, ride.num_hit_tokens, ride.num_new_tokens
        return ride.host_id in self._ends and self._choose(*known, True, (ride.host_id,)) is LoadMode.RIDE

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """How long computing so many tokens would take; None where that is unknown, or does not matter because every
        hit is to be loaded."""
        return self.estimate.recompute_seconds(num_tokens) if self._choice is LoadChoice.AUTO else None

    def withdraw(self, request_id: str) -> None:
        """The request has nothing to load any more."""
        self._asked.pop(request_id, None)
        self._riding.pop(request_id, None)

    def admit(self, request_id: str) -> LoadMode | None:
        """The request is admitted on the last choice; None where there was none."""
        mode = self._asked.pop(request_id, None)
        self._riding.pop(request_id, None)
        if mode is not None:
            self.estimate.admitted(mode)
        return mode

    def reserve(self, host_ids: Sequence[int]) -> None:
        """A load of these blocks will run in the background, behind those before it."""
        seconds = self.estimate.load_seconds(len(host_ids))
        end = None
        if seconds is not None:
            self._busy_until = end = max(self._clock(), self._busy_until) + seconds
        self._ends |= dict.fromkeys(host_ids, end)

    def release(self, host_ids: Iterable[int]) -> None:
        """The load of these blocks ended, or will not be."""
        for block_id in host_ids:
            self._ends.pop(block_id, None)

    def begin(self, job: CopyJob, may_announce: bool = True) -> None:
        """A load whose blocks were reserved is planned now. Without `may_announce` it is over when it has ended."""
        ends = [self._ends.get(block_id) for block_id in job.host_ids.tolist()]
        known = [end for end in ends if end is not None]
        seconds = self.estimate.load_seconds(job.num_blocks) or 0.0
        is_known = may_announce and len(known) == len(ends)
        self._background[job.job_id] = _BackgroundLoad(seconds, max(known) if is_known else None)

    def end(self, job: CopyJob) -> None:
        """A load in the background was reported by every rank."""
        self._expected_seconds += self._background.pop(job.job_id).seconds
        self.release(job.host_ids.tolist())

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Loads of so many blocks ended that took so long together: those behind them end that much later."""
        self.estimate.observe_load(num_blocks, seconds)
        late, self._expected_seconds = seconds - self._expected_seconds, 0.0
        self._busy_until += late
        for load in self._background.values():
            if load.expected_end is not None:
                load.expected_end += late

    def announce(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Loads to announce in this step, and announced ones that the step has to wait for, as it may read them."""
        under_way = step - 1 - self._reported_step  # an engine that plans ahead takes note of this step that much later
        limit = self._clock() + self.estimate.lead_seconds(1 + under_way)
        announced, awaited = [], []
        for job_id, load in self._background.items():
            if load.announced_in is None and load.expected_end is not None and load.expected_end <= limit:
                load.announced_in = step
                announced.append(job_id)
            if load.is_noted:
                awaited.append(job_id)
                self._metrics.awaited_async_loads += not load.is_awaited
                load.is_awaited = True
        return tuple(announced), tuple(awaited)

    def note_reported(self, step: int) -> None:
        """The engine took in what ranks said in this step: it may schedule what was announced until then."""
        self._reported_step = step
        for load in self._background.values():
            load.is_noted |= load.announced_in is not None and load.announced_in <= step

    def _choose(
        self, num_blocks: int, num_hit: int, num_new: int, others_running: bool, first_blocks: Sequence[int]
    ) -> LoadMode:
        if self._choice is LoadChoice.SYNC:
            return LoadMode.SYNC
        rides = bool(first_blocks) and first_blocks[0] in self._ends
        end = self._ends[first_blocks[0]] if rides else None
        if self._choice is LoadChoice.ASYNC:
            return LoadMode.RIDE if rides else LoadMode.ASYNC
        to_ride = (0.0 if end is None else max(0.0, end - self._clock())) if rides else None
        return self.estimate.choose(num_blocks, num_hit, num_new, others_running, to_ride)
