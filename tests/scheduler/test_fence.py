"""Blocks that an idle engine's copies still read are let go of; whoever writes to them next waits for those copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_connector.config import Config
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepReport
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, report, run, save

FAR = {
    "do_remote_prefill": True,
    "transfer_id": "transfer",
    "remote_engine_id": "far",
    "remote_host": "here",
    "remote_port": 7000,
}


@dataclass
class Continued(Asked):
    """A request whose prompt another engine has computed."""

    kv_transfer_params: dict[str, Any] = field(default_factory=lambda: dict(FAR))


def idle_with_a_save(**settings: object) -> SchedulerHalf:
    """A prefix of two blocks is cached; the last request has ended, and its save is under way."""
    half, blocks = make_half(num_host_blocks=50, load_choice="async", **settings)
    save(half, Asked("warm", list(range(9))), first_block=40)
    last = Asked("last", list(range(100, 109)))
    admit(half, last)
    assert run(half, last).saves
    half.request_finished(last)
    assert blocks.pins() == {}, "an idle engine may be reset"
    return half


@pytest.mark.parametrize("what", ["computes", "loads", "receives"])
def test_the_first_step_that_writes_waits_and_no_other(what: str) -> None:
    peer: dict[str, object] = {"peer": {"secret": "x" * 20, "role": "consumer"}} if what == "receives" else {}
    half = idle_with_a_save(**peer)
    assert not run(half).fence, "it writes to nothing"
    tokens = list(range(200, 217)) if what != "loads" else list(range(9))
    request = Continued("next", tokens) if what == "receives" else Asked("next", tokens)
    admit(half, request)
    plan = run(half, request) if what == "computes" else run(half)
    assert (bool(plan.background_loads), bool(plan.peer)) == (what == "loads", what == "receives")
    assert plan.fence
    assert not run(half).fence


def test_an_engine_that_goes_idle_again_before_any_step_still_waits() -> None:
    """A request comes and is aborted before it is scheduled: that no copy was pinned at its end says nothing of those
    that were let go of before."""
    half = idle_with_a_save()
    aborted = Asked("aborted", list(range(300, 309)))
    admit(half, aborted, 20)
    half.request_finished(aborted)
    request = Asked("next", list(range(200, 209)))
    admit(half, request)
    assert run(half, request).fence, "the save still reads blocks 0 and 1"


def test_an_engine_that_writes_to_blocks_before_any_fence_has_them_pinned() -> None:
    """One that zeroes blocks as it hands them out: no step's wait comes in front of that."""
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through"})
    half, blocks = SchedulerHalf(config, 4, unpins_when_idle=False), ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10)])
    request = Asked("last", list(range(9)))
    admit(half, request)
    plan = run(half, request)
    half.request_finished(request)
    assert blocks.pins() == {0: 1, 1: 1}
    report(half, plan)
    assert blocks.pins() == {}
