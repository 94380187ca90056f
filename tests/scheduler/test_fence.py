"""Blocks that an idle engine's copies still read are let go of; whoever writes to them next waits for those copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_connector.scheduler import SchedulerHalf
from tests.scheduler.test_half import Asked, admit, make_half, run, save

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
