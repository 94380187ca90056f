"""How a hit comes to the device: at once, beside other work, on another's load, or not at all.

    sync        the step waits for it layer by layer; for hits that are hidden behind launching or computing the step
    async       the request waits for it while others run; for hits that would hold the others up, unless blocks are
                scarce, and those of the request would lie idle for longer than everybody's in the step
    coalesced   another request's load of the same prefix is under way: ask again, it will be a device hit
    recompute   its tokens are computed, as that is expected to be faster

The choice is made from observed rates; as long as one is unknown the answer is sync, which is how it becomes known.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import NamedTuple

_SMOOTHING = 0.25  # share of a slower observation in a rate
MOST_SKIPPED = 8
"""Hits computed in a row, after which one is loaded all the same: else a rate would never change again."""
_STEPS = 5  # whose durations are remembered
_LOADS = 8  # whose delays are remembered
_LAUNCHES = 8  # whose durations are remembered
_PREFILL_TOKENS = 64  # a step of fewer tokens says nothing about the speed of prefill
_PROMPT_TOKENS = 32
"""Of one request: where a step computes so many, it computes a prompt, and not only drafts."""
_LAUNCHED_TOKENS = 1024
"""Of a step: one that computes more may keep the device busy for so long that the thread waits for room in its queue of
kernels, which is no launching."""
_AS_LONG = 0.75, 1.1
"""Of what a step loads: a thread that was at the forward pass for between so much of that time may have waited for it,
in a model whose layers wait for the device."""
_IDLE = 2.0
"""Times the load, for which a request has blocks that nobody computes on where it is loaded in the background: it waits
behind other loads, and then for a step. Two at a time took 51 ms with loads of 24 (vLLM 0.32, 8B model, H200)."""


class LoadMode(Enum):
    """How a hit comes to the device."""

    SYNC = "sync"
    ASYNC = "async"
    COALESCED = "coalesced"
    RECOMPUTE = "recompute"


class HitLoad(NamedTuple):
    """A hit as the choice sees it: what loading it takes and spares, and whom it may hold up."""

    num_blocks: int  # to copy, of all groups
    num_hit_tokens: int  # of the prompt, which need not be computed then
    num_new_tokens: int  # of the prompt behind them, which have to be
    num_others: int  # requests that have blocks on the device
    num_beginning: int = 0  # those of them that were admitted to the step that is being planned


class _Planned(NamedTuple):
    """A step, and what is learned from it."""

    step: int
    at: float
    num_tokens: int
    num_loaded: int  # blocks
    says_speed: bool  # of computing
    says_launch: bool  # what launching a prompt takes
    limits_launch: bool  # what it takes at most


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
        self._steps: deque[_Planned] = deque()  # that say something, in order
        self._launches: deque[float] = deque(maxlen=_LAUNCHES)  # of such steps
        self._last_end = 0.0
        self._last_plan = 0.0
        self._intervals: deque[float] = deque([0.0] * _STEPS, maxlen=_STEPS)  # between the last plans
        self._delays: deque[float] = deque([0.0] * _LOADS, maxlen=_LOADS)
        self._num_skipped = 0

    @property
    def delay_seconds(self) -> float:
        """How much later loads end than by their rate alone, as they do not begin with their admission. Of the last
        ones the second latest counts: one may have been unusual."""
        return sorted(self._delays)[-2]

    def observe_delay(self, seconds: float) -> None:
        """A load that had the link for itself was seen under way so long after its end by the rate alone; less than 0
        where that was still to come. It has ended up to a step later, so nothing counts that is not proven."""
        self._delays.append(max(0.0, seconds))

    def observe_no_more_delay(self, seconds: float) -> None:
        """A load behind others ended so long after its end by the rate alone, or sooner. That only says something where
        it is less than what is expected: without it, what was learned while the link was idle would stay as long as it
        is busy."""
        if seconds < self.delay_seconds:
            self._delays.append(max(0.0, seconds))

    def lead_seconds(self, num_steps: int) -> float:
        """A load that ends within this time will be there `num_steps` steps from now, or holds a step up no longer than
        it may. Of the last steps the median counts: one may have been unusual."""
        return max(num_steps * median(self._intervals), self._max_stall)

    def observe_load(self, num_blocks: int, seconds: float) -> None:
        """A load of so many blocks took so long on the slowest rank."""
        self._loading.observe(num_blocks, seconds)

    @property
    def launch_seconds(self) -> float:
        """What a step that computes prompts takes the model-runner thread at least: of the last ones the shortest
        counts, as others had more to launch, or something to compile. 0 as long as none is known."""
        return min(self._launches, default=0.0)

    def step_planned(self, step: int, num_tokens: int, most_tokens: int, num_loaded: int, now: float) -> None:
        """A step was planned that computes so many tokens, at most so many of one request, and loads so many blocks.
        One that loads says nothing about the speed of computing."""
        self._intervals.append(now - self._last_plan)
        self._last_plan = now
        says_speed = num_tokens >= _PREFILL_TOKENS and not num_loaded
        says_launch = most_tokens >= _PROMPT_TOKENS and num_tokens <= _LAUNCHED_TOKENS
        limits_launch = most_tokens >= _PROMPT_TOKENS or (num_loaded > 0 and most_tokens > 1)
        if says_speed or limits_launch:
            self._steps.append(_Planned(step, now, num_tokens, num_loaded, says_speed, says_launch, limits_launch))

    def step_ended(self, step: int, now: float, launch_seconds: float = 0.0) -> None:
        """Its report came in, by which its forward pass took the slowest rank's thread so long."""
        while self._steps and self._steps[0].step <= step:
            planned = self._steps.popleft()
            if planned.step == step:
                self._observe_step(planned, now, launch_seconds)
        self._last_end = now

    def _observe_step(self, planned: _Planned, now: float, launch_seconds: float) -> None:
        """Steps overlap, so each began at the end of the one before it at the earliest. One that seems to have taken
        less than its thread did was over before the report of the one before it was looked at: it took less than from
        its plan on. That, and what a thread took that may have waited, for a load or the device, only says something
        where it is less than what is known: without it, what was learned in bad times would stay for good."""
        load_seconds = self._loading.seconds(planned.num_loaded)
        least, most = (0.0, math.inf) if load_seconds is None else (share * load_seconds for share in _AS_LONG)
        may_have_waited = planned.num_loaded > 0 and least <= launch_seconds <= most
        says_launch = planned.says_launch and launch_seconds > 0 and not may_have_waited
        if says_launch or (planned.limits_launch and 0 < launch_seconds < self.launch_seconds):
            self._launches.append(launch_seconds)
        if planned.says_speed:
            seconds = now - max(planned.at, self._last_end)
            known = self.recompute_seconds(planned.num_tokens)
            if seconds > launch_seconds:
                self._prefill.observe(planned.num_tokens, seconds)
            elif known is None or now - planned.at < known:
                self._prefill.observe(planned.num_tokens, now - planned.at)

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
        self, hit: HitLoad, coalesced_seconds: float | None, num_in_step: int = 0, found_no_room: bool = False
    ) -> LoadMode:
        """How a hit comes to the device.

        `coalesced_seconds`: until another's load of the same prefix ends; None where there is none. `num_in_step`:
        blocks that others load in the step that is being planned. `found_no_room`: requests wait for blocks, so what
        counts is for how long requests hold some that nobody computes on, and not the stall alone.
        """
        load, recompute = self._loading.seconds(hit.num_blocks), self.recompute_seconds(hit.num_hit_tokens)
        if coalesced_seconds is not None:
            return LoadMode.RECOMPUTE if recompute is not None and recompute < coalesced_seconds else LoadMode.COALESCED
        if load is None or recompute is None:
            return LoadMode.SYNC
        if recompute < load and self._num_skipped < MOST_SKIPPED:
            return LoadMode.RECOMPUTE
        stall = self._stall(hit, load, self._loading.seconds(num_in_step) or 0.0)
        if not hit.num_others or stall <= self._max_stall:
            return LoadMode.SYNC
        holds_up_less = found_no_room and stall * (1 + hit.num_others) <= _IDLE * load
        return LoadMode.SYNC if holds_up_less else LoadMode.ASYNC

    def _stall(self, hit: HitLoad, load: float, in_step: float) -> float:
        """How long others wait if this load is one of the step's, which loads for `in_step` seconds already.

        A step with this prompt has to be launched and computed in any case, and what it loads meanwhile keeps nobody
        waiting. Who decodes waits for all that the step loads beyond that. Where all others begin in it, too, nobody
        decodes: this load alone counts, and they are spared a later step with this prompt, for which they would have to
        wait. Launching one took 28 ms without a CUDA graph for it, and a step that decodes 2 (vLLM 0.32, 8B model, H200
        with 16 cores, 2026-11-28). So does one that has a single token of a prompt to compute: it looks like one that
        decodes."""
        launch = self.launch_seconds if hit.num_new_tokens > 1 else 0.0
        prompt = max(launch, self._prefill.seconds(hit.num_new_tokens) or 0.0)
        step = max(prompt, in_step + load)
        if hit.num_beginning >= hit.num_others:
            return step - max(prompt, in_step) - prompt
        return step - prompt
