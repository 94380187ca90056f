"""What the scheduler half tells the choice: of a hit, of the steps it plans, and of what launching them takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.loads.choice import LoadPlanner
from kv_connector.scheduler.loads.rates import HitLoad, LoadMode
from kv_connector.types import StepPlan, StepReport
from tests.scheduler.test_half import Asked, admit, make_half, report, run, save

PROMPT = list(range(21))
WITH_WINDOW = (BlockGroup(), BlockGroup(window_blocks=1))


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[HitLoad]:
    """What was chosen for; all are loaded in the step."""
    seen: list[HitLoad] = []

    def choose(
        planner: LoadPlanner, request_id: str, hit: HitLoad, first_blocks: Sequence[int], may_wait: bool = True
    ) -> LoadMode:
        seen.append(hit)
        planner._asked[request_id] = LoadMode.SYNC
        return LoadMode.SYNC

    monkeypatch.setattr(LoadPlanner, "choose", choose)
    return seen


def warm_up(groups: Sequence[BlockGroup]) -> SchedulerHalf:
    """The host has the first five blocks of 4 tokens of `PROMPT`; room for others there is on the device."""
    half, _ = make_half(num_host_blocks=20, groups=groups)
    warm = Asked("warm", PROMPT)
    half.update_state_after_alloc(warm, [[40 + 10 * i + n for n in range(6)] for i in range(len(groups))], 0, 0)
    report(half, run(half, warm))
    half.request_finished(warm)
    return half


@pytest.mark.parametrize("num_computed", [0, 8])
@pytest.mark.parametrize(("groups", "num_in_windows"), [((BlockGroup(),), 0), (WITH_WINDOW, 1)])
def test_a_hit_is_what_the_host_has_behind_the_computed_tokens(
    groups: Sequence[BlockGroup], num_in_windows: int, num_computed: int, hits: list[HitLoad]
) -> None:
    """Of a sliding window only the last blocks are copied, which saves as many tokens all the same."""
    half = warm_up(groups)
    asked = Asked("asked", [*PROMPT, 5, 6])
    assert half.get_num_new_matched_tokens(asked, num_computed) == (20 - num_computed, False)
    num_blocks = 5 - num_computed // 4
    assert hits == [HitLoad(num_blocks + num_in_windows, 4 * num_blocks, 3, num_others=0, num_beginning=0)]


def test_others_are_all_that_hold_blocks_and_begin_in_the_step_that_is_being_planned(hits: list[HitLoad]) -> None:
    half = warm_up((BlockGroup(),))
    runs, begins, again = Asked("runs", [7] * 9), Asked("begins", [8] * 9), Asked("again", PROMPT)
    admit(half, runs, 10)
    admit(half, again, 20)
    run(half, runs, again, computed=1)
    half.build_connector_meta(SchedulerOutput((), {"again"}))
    admit(half, begins, 30)
    hits.clear()
    half.get_num_new_matched_tokens(again, 0)
    half.get_num_new_matched_tokens(Asked("new", PROMPT), 0)
    counted = [(hit.num_others, hit.num_beginning) for hit in hits]
    assert counted == [(2, 1), (3, 1)], "one that was preempted is not beside itself"


def told(half: SchedulerHalf, plan: StepPlan, *milliseconds: float) -> list[StepReport]:
    """Of each rank, what launching took it; all copies have ended."""
    jobs = tuple(job.job_id for job in (*plan.loads, *plan.saves, *plan.background_loads))
    return [
        StepReport(plan.step, rank, jobs, num_host_blocks=20, launch_milliseconds=each)
        for rank, each in enumerate(milliseconds)
    ]


def step(half: SchedulerHalf, *num_tokens: int) -> StepPlan:
    """One that computes so many tokens of each of some requests that have their blocks."""
    items = [ScheduledRequest(f"{number}", 0, count) for number, count in enumerate(num_tokens)]
    return half.build_connector_meta(SchedulerOutput(items))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [((40, 1), 0.028), ((1, 40), 0.028), ((20, 20), 0.0), ((1000, 40), 0.0)]
)
def test_launching_prompts_takes_as_long_as_the_slowest_rank_says(num_tokens: Sequence[int], expected: float) -> None:
    """Of the step that all have reported: one may be ahead, and two reports come at a time."""
    half, _ = make_half(num_host_blocks=20, world_size=2)
    for number in range(2):
        admit(half, Asked(f"{number}", [number] * 9), 10 * number)
    before = step(half, 1, 1)
    for _ in range(2):
        plan, ahead = step(half, *num_tokens), step(half, 1, 1)
        half.update_connector_output([*told(half, before, 500.0, 500.0), *told(half, plan, 28.0, 10.0)])
        before = ahead
    assert half._loads.estimate.launch_seconds == pytest.approx(expected)


@pytest.mark.parametrize("load_choice", ["sync", "async"])
def test_a_step_beside_which_something_is_loaded_in_the_background_says_what_launching_takes(load_choice: str) -> None:
    """One that loads itself does not, where it is not known how long that takes."""
    half, _ = make_half(num_host_blocks=20, load_choice=load_choice)
    save(half, Asked("warm", PROMPT), 10)
    admit(half, Asked("0", [7] * 50), 20)
    for number in range(8):
        asked = Asked(f"hit {number}", PROMPT)
        admit(half, asked, 60)
        half.update_connector_output(told(half, step(half, 40), 28.0))
        half.request_finished(asked)
    assert half._loads.estimate.launch_seconds == (0.0 if load_choice == "sync" else 0.028)
