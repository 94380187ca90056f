"""One step of vLLM's scheduler in the words of the halves, and the envelopes that plan and reports travel in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...base import ScheduledRequest, SchedulerOutput, StateBlock
from ...types import NO_BLOCK, StepPlan, StepReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput as VllmOutput

    from .specs import EngineShape

TELLS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")
"""Whether this vLLM takes requests whose load failed; older ones take their blocks, of models with one group."""
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


@dataclass
class ReadyMetadata(KVConnectorHandshakeMetadata):
    """Worker to scheduler before the first step: the host blocks that a rank has ready, so that the first step can
    save."""

    report: StepReport


def to_tables(block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """vLLM's block tables by our block groups."""
    return [[NO_BLOCK if block_id == NULL_BLOCK else block_id for block_id in ids] for ids in block_ids]


def told_states(output: VllmOutput, shape: EngineShape) -> Iterator[StateBlock]:
    """Which device blocks hold which recurrent states once the step has run; see `TELLS_STATES`.

    vLLM tells of a state in the step that caches it, and never again. So those that requests begin with are told of
    here, as blocks of attention are seen anew with every hit: a step copies such a state and goes on with the copy.
    Inside of a block it goes on with it in place, and vLLM has copied what it hit there.
    """
    block_state = getattr(output, "kv_connector_block_state", None)
    if block_state is None or not shape.has_states:
        return
    for request_id, offers in block_state.boundary_state_offloads.items():
        for group_id, block_id, num_tokens in offers:
            if group_id in shape.group_ids:
                yield StateBlock(request_id, shape.group_ids.index(group_id), block_id, num_tokens)
    for request_id, block_ids, num_tokens in _begun(output):
        for index, (group, size) in enumerate(zip(shape.groups, shape.block_sizes, strict=True)):
            if group.states_are_told and num_tokens:
                block_id = block_ids[shape.group_ids[index]][(num_tokens - 1) // size]
                if num_tokens % size:
                    block_id = _copied(output).get(block_id, NULL_BLOCK)
                if block_id != NULL_BLOCK:
                    yield StateBlock(request_id, index, block_id, num_tokens)


def told_ends(output: VllmOutput, shape: EngineShape, states: Iterable[StateBlock]) -> Iterator[StateBlock]:
    """Of full attention the blocks that these states' ends lie in, where no block ends there.

    They are those of the request's table, also where vLLM has copied what it hit: the step appends to the copy, and the
    block that was hit goes on with the rows of another prompt.
    """
    block_state = output.kv_connector_block_state
    assert block_state is not None
    for request_id, num_tokens in dict.fromkeys((state.request_id, state.num_tokens) for state in states):
        tables = block_state.get_block_ids(request_id)
        for index, (group, size) in enumerate(zip(shape.groups, shape.block_sizes, strict=True)):
            if tables is not None and group.is_full and num_tokens % size:
                yield StateBlock(request_id, index, tables[shape.group_ids[index]][num_tokens // size], num_tokens)


def _copied(output: VllmOutput) -> dict[int, int]:
    """By device blocks that vLLM fills in front of the step, those that it copies."""
    return {copy.dst_block_id: copy.src_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ()}


def _begun(output: VllmOutput) -> Iterator[tuple[str, Sequence[Sequence[int]], int]]:
    """Requests that begin with this step, their whole block tables, and how many tokens they have computed."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, block_ids, num_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if request_id in cached.resumed_req_ids and block_ids is not None:
            yield request_id, block_ids, num_tokens


def to_step(
    output: VllmOutput,
    group_ids: Sequence[int],
    told: Mapping[str, Sequence[Sequence[int]]],
    states: Sequence[StateBlock] = (),
) -> SchedulerOutput:
    """What the step computes. `told`: block tables of requests that were admitted since the last step, by our groups.

    MultiConnector before 0.32 tells a child no table of a request that another child loads: the step has it.
    """

    def untold(request_id: str, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        known = told.get(request_id, [()] * len(group_ids))
        return to_tables([block_ids[g][len(ids) :] for g, ids in zip(group_ids, known, strict=True)])

    counts = output.num_scheduled_tokens
    scheduled = [
        ScheduledRequest(r.req_id, r.num_computed_tokens, counts[r.req_id], untold(r.req_id, r.block_ids))
        for r in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for request_id, new_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        tables: Sequence[Sequence[int]] = ()
        if new_ids is not None and request_id in cached.resumed_req_ids:
            tables = untold(request_id, new_ids)
        elif new_ids is not None:
            tables = to_tables([new_ids[g] for g in group_ids])
        scheduled.append(ScheduledRequest(request_id, num_computed, counts[request_id], tables))
    return SchedulerOutput(scheduled, getattr(output, "preempted_req_ids", None) or (), states)
