"""A companion that watches: what requests there were, for a trace that others replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..base import Request, ScheduledRequest, StateBlock
from ..types import BlockHash, StepPlan, StepReport
from .companion import Admission
from .ledger import EndedJob
from .tables import BlockTable

Record = Callable[[float, int, int, Sequence[BlockHash]], object]
"""Takes the second of a request's first admission, the tokens of its prompt and of its answer, and the hashes of its
prompt's whole blocks. It waits for nothing and raises nothing."""


class _Prompt(NamedTuple):
    seconds: float
    num_tokens: int
    hashes: Sequence[BlockHash]


class RequestRecorder:
    """Tells `record` of each admitted request once, when it ends. Takes part in nothing: see `Companion`."""

    is_busy = False

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock
        self._prompts: dict[str, _Prompt] = {}

    def arrived(self, request: Request) -> bool:
        return False

    def is_awaited(self, request_id: str) -> bool:
        return False

    def num_hashes(self, request: Request) -> int:
        return 0

    def admitted(self, admission: Admission) -> None:
        request = admission.request
        if request.request_id not in self._prompts:  # one that was preempted has a part of its answer by now
            prompt = _Prompt(self._clock(), request.num_tokens, list(request.block_hashes))
            self._prompts[request.request_id] = prompt

    def scheduled(self, item: ScheduledRequest, tables: Sequence[BlockTable], states: Sequence[StateBlock]) -> None:
        pass

    def preempted(self, request_id: str) -> None:
        pass

    def given_up(self, request_id: str) -> None:
        pass

    def finished(self, request: Request) -> dict[str, Any] | None:
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self._record(prompt.seconds, prompt.num_tokens, request.num_tokens - prompt.num_tokens, prompt.hashes)
        return None

    def saved(self, host_ids: Sequence[int]) -> None:
        pass

    def plan(self, plan: StepPlan) -> StepPlan:
        return plan

    def reported(self, report: StepReport) -> None:
        pass

    def end(self, ended: EndedJob) -> None:
        raise AssertionError(f"nobody opened {ended} for who only watches")

    def reset(self) -> bool:
        return True

    def stats(self) -> Mapping[str, float]:
        return {}
