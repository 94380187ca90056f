"""One step of vLLM's scheduler in the words of the halves, and the envelopes that plan and reports travel in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ...base import ScheduledRequest, SchedulerOutput
from ...types import NO_BLOCK, StepPlan, StepReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput as VllmOutput

NULL_BLOCK = 0
"""vLLM's block 0 stands in a table where there is none."""


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """Scheduler to worker."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: the reports of one step, of one rank or, aggregated, of all."""

    reports: tuple[StepReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.reports + other.reports)


def to_tables(block_ids: Sequence[Sequence[int]], group_ids: Sequence[int]) -> list[list[int]]:
    """Block tables by our groups."""
    return [[NO_BLOCK if b == NULL_BLOCK else b for b in block_ids[group_id]] for group_id in group_ids]


def to_step(output: VllmOutput, group_ids: Sequence[int]) -> SchedulerOutput:
    """What the step computes. Tables of new and resumed requests were told at their admission."""
    scheduled = [
        ScheduledRequest(request.req_id, request.num_computed_tokens, output.num_scheduled_tokens[request.req_id])
        for request in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for request_id, new_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        is_admitted = request_id in cached.resumed_req_ids
        tables: Any = () if new_ids is None or is_admitted else to_tables(new_ids, group_ids)
        scheduled.append(ScheduledRequest(request_id, num_computed, output.num_scheduled_tokens[request_id], tables))
    return SchedulerOutput(scheduled, getattr(output, "preempted_req_ids", None) or ())
