"""Sessions: requests whose input streams in, turn by turn, and which keep their blocks in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput as VllmOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Drafted:
    request: Request
    num_tokens: int  # that were known when the step was planned; the drafts stand behind them
    drafts: Sequence[int]


class Sessions:
    """Takes back what vLLM counts as computed of a session that is not.

    Where a turn ends within the drafts that a step has accepted, the cache has rows of the remaining drafts behind the
    turn's last token. vLLM 0.32 without asynchronous scheduling counts these rows as computed: the first tokens of the
    next input are never computed, and blocks are cached from there on under the hashes of other tokens. If the next
    input has no more tokens than there are such rows, the engine ends.
    """

    def __init__(self) -> None:
        self._drafted: dict[str, _Drafted] = {}  # sessions that a step gives drafts to, until it is taken in

    def planned(self, output: VllmOutput, live: Mapping[str, Request]) -> None:
        """vLLM has scheduled a step: the drafts that it gives to sessions are kept."""
        for request_id in self._drafted.keys() & output.num_scheduled_tokens.keys():
            del self._drafted[request_id]
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            request = live[request_id]
            # With asynchronous scheduling drafts are not known yet, and vLLM counts right.
            if getattr(request, "resumable", False) and drafts[0] >= 0:
                self._drafted[request_id] = _Drafted(request, request.num_tokens, list(drafts))

    def taken_in(self) -> None:
        """vLLM has processed the output of a step, and has not scheduled the next one."""
        for request_id, drafted in list(self._drafted.items()):
            if drafted.request.status is not RequestStatus.RUNNING:
                del self._drafted[request_id]
                _take_back(drafted)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._drafted.pop(request_id, None)


def _take_back(drafted: _Drafted) -> None:
    """Of a session whose turn has ended: counts as computed the rows of its own tokens alone. Where its next input has
    come, one token at least is left to compute."""
    request, first = drafted.request, drafted.num_tokens
    tokens = request.all_token_ids[first : request.num_computed_tokens]
    pairs = enumerate(zip(tokens, drafted.drafts, strict=False))
    num_right = next((i for i, (token, draft) in pairs if token != draft), len(tokens))
    most = request.num_tokens - (request.status is RequestStatus.WAITING)
    request.num_computed_tokens = min(request.num_computed_tokens, first + num_right, most)
