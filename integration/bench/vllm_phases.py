"""Where the time of a request goes in a vLLM engine of this process, what its connector's calls cost, and how long the
engine's thread takes to launch a step.

Works on any connector through the calls that vLLM makes of it: a request is queued until its blocks are allocated, it
loads until the worker side calls it received, it is idle until the scheduler schedules it, and so on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

from integration.bench.engines import Output

_TIMED = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "build_connector_worker_meta",
)


@dataclass(slots=True)
class _Times:
    """Of one request, in seconds; 0 for what has not happened."""

    arrived: float = 0.0
    admitted: float = 0.0
    received: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of one step: when it was planned, how many requests it runs, and whether each of them computes one token."""

    when: float
    num_requests: int
    only_decodes: bool


class VllmPhases:
    """Follows the requests of one run. `scheduler` and `executor`, of the model, are vLLM's; call `stop` once."""

    def __init__(self, scheduler: Any, executor: Any) -> None:
        self._requests: dict[str, _Times] = defaultdict(_Times)
        self._spent: dict[str, float] = defaultdict(float)
        self._plans: list[_Plan] = []
        self._spent_decoding = 0.0  # of all calls, between the plan of a step that only decodes and the next
        self._external_tokens = 0
        self._undo: list[Callable[[], None]] = []
        self._launches: dict[bool, list[float]] = {True: [], False: []}  # seconds, of steps that only decode or not
        self._wrap(scheduler, "schedule", self._on_schedule)
        self._wrap(executor, "execute_model", self._on_execute)
        if scheduler.connector is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            sides = {id(side): side for side in (scheduler.connector, get_kv_transfer_group())}.values()
            for side in sides:
                for name in _TIMED:
                    if hasattr(side, name):
                        self._wrap(side, name, self._on_call)

    def arrived(self, name: str) -> None:
        """A request was submitted."""
        self._requests[name].arrived = time.perf_counter()

    def answered(self, output: Output) -> None:
        """Output of a request."""
        now, times = time.perf_counter(), self._requests[output.name]
        times.first_token = times.first_token or now
        if output.is_finished:
            times.ended = now

    def stop(self) -> dict[str, float]:
        """Undo all wrapping. Mean ms of each phase over requests that `answered` was told have finished, and of what
        the connector's calls took for each step that computes, under `call_...`, and all of them together for each
        that only decodes; `external_tokens` of prompts came from the connector, by what it told the scheduler. Medians
        of what the engine's thread takes to launch a step, the connector's calls in it included, are under
        `launch_...`."""
        for undo in self._undo:
            undo()
        result = self._phases([times for times in self._requests.values() if times.ended])
        result["external_tokens"] = self._external_tokens
        busy = [plan for plan in self._plans if plan.num_requests]
        result["steps"] = len(busy)
        if not busy:
            return result
        result["requests_per_step"] = mean(plan.num_requests for plan in busy)
        pairs = [pair for pair in pairwise(self._plans) if pair[0].num_requests and pair[1].num_requests]
        decoding = [pair for pair in pairs if pair[0].only_decodes and pair[1].only_decodes]
        result["step_ms"] = 1e3 * mean(b.when - a.when for a, b in pairs) if pairs else 0.0
        # An engine that plans ahead plans the first of them while a prompt is computed.
        result["decode_step_ms"] = 1e3 * median(b.when - a.when for a, b in decoding) if decoding else 0.0
        num_decoding = sum(plan.only_decodes for plan in busy)
        result["decode_steps"] = num_decoding
        result["decode_calls_ms"] = 1e3 * self._spent_decoding / max(1, num_decoding)
        kinds = {"launch_decoding_ms": self._launches[True], "launch_prompts_ms": self._launches[False]}
        result |= {name: 1e3 * median(seconds) for name, seconds in kinds.items() if seconds}
        return result | {f"call_{name}_ms": 1e3 * spent / len(busy) for name, spent in self._spent.items()}

    @staticmethod
    def _phases(ended: Sequence[_Times]) -> dict[str, float]:
        if not ended:
            return {}
        phases = {
            "queued_ms": [t.admitted - t.arrived for t in ended if t.admitted],
            "loading_ms": [t.received - t.admitted for t in ended if t.received],
            "idle_ms": [t.scheduled - max(t.received, t.admitted) for t in ended if t.admitted],
            "prefill_ms": [t.first_token - t.scheduled for t in ended],
            "decoding_ms": [t.ended - t.first_token for t in ended],
        }
        found = {name: 1e3 * mean(values) for name, values in phases.items() if values}
        return found | {"loading_share": sum(t.received > 0 for t in ended) / len(ended)}

    def _wrap(self, owner: Any, name: str, after: Callable[[str, tuple[Any, ...], Any, float], None]) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            after(name, args, result, begin)
            return result

        setattr(owner, name, timed)
        self._undo.append(lambda: delattr(owner, name))

    def _on_schedule(self, name: str, args: tuple[Any, ...], output: Any, begin: float) -> None:
        now = time.perf_counter()
        counts = output.num_scheduled_tokens
        self._plans.append(_Plan(now, len(counts), sum(counts.values()) == len(counts) > 0))
        for request_id in output.num_scheduled_tokens:
            times = self._requests[_name(request_id)]
            times.scheduled = times.scheduled or now

    def _on_execute(self, name: str, args: tuple[Any, ...], output: Any, begin: float) -> None:
        if self._plans and self._plans[-1].num_requests:
            self._launches[self._plans[-1].only_decodes].append(time.perf_counter() - begin)

    def _on_call(self, name: str, args: tuple[Any, ...], result: Any, begin: float) -> None:
        now = time.perf_counter()
        self._spent[name] += now - begin
        if self._plans and self._plans[-1].only_decodes:
            self._spent_decoding += now - begin
        if name == "update_state_after_alloc":
            times = self._requests[_name(args[0].request_id)]
            times.admitted = times.admitted or now
            self._external_tokens += args[2]
        elif name in ("get_finished", "get_transfer_results") and result is not None:
            received = getattr(result, "finished_recving", None) if name != "get_finished" else result[1]
            for request_id in received or ():
                self._requests[_name(request_id)].received = now


def _name(request_id: str) -> str:
    """The name that a request was submitted under: vLLM appends a random part of 8 digits."""
    head, _, tail = request_id.rpartition("-")
    return head if head and len(tail) == 8 else request_id
