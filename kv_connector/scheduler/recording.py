"""An observer that records requests as a trace for replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..base import Request
from ..types import BlockHash
from .companion import Admission
from .ledger import EndedJob
from .observers import Job

Record = Callable[[float, int, int, Sequence[BlockHash]], object]
"""Takes the second of a request's first admission, the tokens of its prompt and of its answer, and the hashes of its
prompt's whole blocks. It waits for nothing and raises nothing."""


class _Prompt(NamedTuple):
    seconds: float
    num_tokens: int
    hashes: Sequence[BlockHash]


class RequestRecorder:
    """Tells `record` of each admitted request once, when it ends. See `Observer`."""

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock
        self._prompts: dict[str, _Prompt] = {}

    def arrived(self, request: Request) -> bool:
        """It may never be admitted."""
        return True

    def admitted(self, admission: Admission) -> None:
        """One that was preempted has a part of its answer by now: what counts is the first time."""
        request = admission.request
        if request.request_id not in self._prompts:
            prompt = _Prompt(self._clock(), request.num_tokens, list(request.block_hashes))
            self._prompts[request.request_id] = prompt

    def preempted(self, request_id: str) -> None:
        """It comes again."""

    def finished(self, request: Request) -> None:
        """Once, with the length of its answer."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None:
            self._record(prompt.seconds, prompt.num_tokens, request.num_tokens - prompt.num_tokens, prompt.hashes)

    def opened(self, job: Job, request_ids: Collection[str]) -> bool:
        """Jobs are not in a trace."""
        return False

    def ran(self, job: Job, rank: int, seconds: float) -> None:
        """Not told."""

    def ended(self, ended: EndedJob, seconds: float) -> None:
        """Not told."""
