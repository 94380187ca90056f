"""What a request computes anew, behind a failed load or a preemption, is shown to the write policy again."""

from __future__ import annotations

import pytest

from kv_connector.base import SchedulerOutput
from kv_connector.index import BlockGroup
from tests.scheduler.saves.test_declined import admit_both, make, set_block_bytes, step
from tests.scheduler.test_half import Asked, admit, make_half, report, run, save


def test_what_waited_behind_a_failed_load_is_saved_once() -> None:
    half, _ = make_half(save_bandwidth=1)
    set_block_bytes(half, 0)
    request = Asked("first", list(range(17)))
    save(half, Asked("before", request.tokens[:8]), 20)
    assert admit(half, request) == 8
    set_block_bytes(half, 1 << 40)
    plan = run(half, request, computed=8)
    assert plan.saves == ()
    report(half, plan, ok=False, lost_blocks=(0, 1))
    set_block_bytes(half, 0)
    plan = run(half, request)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0, 1, 2, 3]]
    report(half, plan)
    half.check()


@pytest.mark.parametrize("lost", [0, 50])
def test_what_is_computed_anew_is_saved_of_every_group(lost: int) -> None:
    half = make({"write_policy": "write_through"}, (BlockGroup(), BlockGroup()), num_host_blocks=30)
    before, request = Asked("before", list(range(9))), Asked("r", list(range(17)))
    admit_both(half, before)
    report(half, step(half, before, 0, 9))
    half.request_finished(before)
    assert admit_both(half, request) == 8
    report(half, step(half, request, 8, 9), ok=False, lost_blocks=(lost,))
    plan = step(half, request, 0, 17)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0, 1, 2, 3, 50, 51, 52, 53]]
    half.check()


def test_who_begins_anew_is_saved_where_it_was_not() -> None:
    half = make({"write_policy": "write_through"}, (BlockGroup(),), num_host_blocks=4)
    long, other = Asked("long", list(range(16))), Asked("other", [99] * 16)
    admit(half, long)
    report(half, step(half, long, 0, 8))
    admit(half, other, first_block=50)
    report(half, step(half, other, 0, 16))
    half.request_finished(other)
    assert step(half, long, 8, 4).saves == ()
    half.build_connector_meta(SchedulerOutput((), {"long"}))
    admit(half, long)
    plan = step(half, long, 0, 16)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0, 1, 2, 3]]
    half.check()
