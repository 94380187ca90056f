"""An operator leaves a share of the link to others: what saves may take of it, and what becomes of the rest."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup, BlockPool
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepPlan, StepReport
from tests.scheduler.test_half import Asked, ForeignBlocks

BLOCK_BYTES = 1000  # over two ranks


class Watch:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_half(
    save_bandwidth: int, groups: tuple[BlockGroup, ...] = (BlockGroup(),), **options: object
) -> tuple[SchedulerHalf, ForeignBlocks, Watch]:
    """Two ranks, each with half of every block, and room for 300 blocks."""
    watch = Watch()
    given = {"host_memory": 1, "write_policy": "write_through", "load_choice": "sync", "save_bandwidth": save_bandwidth}
    half = SchedulerHalf(Config.from_mapping(given | options), 4, world_size=2, clock=watch, groups=groups)
    blocks = ForeignBlocks()
    blocks.pool = BlockPool(300)
    blocks.pool.allocate(300)
    half.bind_block_pool(blocks)
    report(half, 0)
    return half, blocks, watch


def report(half: SchedulerHalf, step: int, done: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> None:
    reports = [StepReport(step, rank, done, failed, 300, BLOCK_BYTES // 2) for rank in range(2)]
    half.update_connector_output(reports)


def admit(half: SchedulerHalf, request: Asked, first_block: int = 0, num_groups: int = 1) -> int:
    """Returns the tokens that are loaded."""
    num_tokens, _ = half.get_num_new_matched_tokens(request, 0)
    count = -(-request.num_tokens // 4)
    tables = [list(range(first_block + g * count, first_block + (g + 1) * count)) for g in range(num_groups)]
    half.update_state_after_alloc(request, tables, 0, num_tokens)
    return num_tokens


def step(half: SchedulerHalf, request: Asked, computed: int, num_tokens: int) -> StepPlan:
    return half.build_connector_meta(SchedulerOutput([ScheduledRequest(request.request_id, computed, num_tokens)]))


def saved(plan: StepPlan) -> list[int]:
    return [block_id for job in plan.saves for block_id in job.device_ids.tolist()]


def test_blocks_over_the_budget_are_saved_in_later_steps() -> None:
    half, _, watch = make_half(20 * BLOCK_BYTES)
    request = Asked("a", list(range(32)))
    admit(half, request)
    assert saved(step(half, request, 0, 32)) == [0, 1], "a tenth of a second's worth"
    assert saved(step(half, request, 32, 0)) == [], "no time has passed"
    watch.now = 0.05
    assert saved(step(half, request, 32, 0)) == [2], "no block was completed, but one may be saved now"
    watch.now = 10.0
    assert saved(step(half, request, 32, 0)) == [3, 4], "what was not used is not saved up"
    assert half.metrics.deferred_saves_blocks == 6, "each is counted once, however often it has to wait"
    assert half.metrics.dropped_saves_blocks == 0
    half.request_finished(request)
    assert half.metrics.dropped_saves_blocks == 3
    half.check()


def test_what_somebody_else_has_saved_meanwhile_takes_nothing_of_the_budget() -> None:
    half, _, watch = make_half(20 * BLOCK_BYTES)
    first, second = Asked("a", list(range(24))), Asked("b", list(range(24)))
    admit(half, first)
    assert saved(step(half, first, 0, 24)) == [0, 1]
    admit(half, second, first_block=50)
    watch.now = 0.1
    assert saved(step(half, second, 0, 24)) == [52, 53], "blocks 0 and 1 are on their way"
    watch.now = 0.2
    assert saved(step(half, first, 24, 0)) == [4, 5]
    half.check()


def test_one_block_at_a_time_is_saved_however_small_the_budget_is() -> None:
    half, _, watch = make_half(BLOCK_BYTES // 2)
    request = Asked("a", list(range(32)))
    admit(half, request)
    assert saved(step(half, request, 0, 32)) == []
    seen = []
    for second in range(1, 9):
        watch.now = float(second)
        seen += [(second, block_id) for block_id in saved(step(half, request, 32, 0))]
    assert seen == [(2, 0), (4, 1), (6, 2), (8, 3)]


def test_without_a_budget_everything_is_saved_at_once() -> None:
    half, _, _ = make_half(0)
    request = Asked("a", list(range(400)))
    admit(half, request)
    assert saved(step(half, request, 0, 400)) == list(range(100))
    assert half.metrics.deferred_saves_blocks == 0


def test_blocks_of_a_window_cannot_wait() -> None:
    half, _, watch = make_half(20 * BLOCK_BYTES, groups=(BlockGroup(window_blocks=2),))
    request = Asked("a", list(range(16)))
    admit(half, request)
    assert saved(step(half, request, 0, 16)) == [2, 3], "those that the window needs"
    assert (half.metrics.dropped_saves_blocks, half.metrics.deferred_saves_blocks) == (2, 0)
    watch.now = 1.0
    assert saved(step(half, request, 16, 0)) == []


def test_windows_come_first_and_full_attention_catches_up() -> None:
    """A hit needs the blocks of both, and only those of full attention can wait."""
    half, _, watch = make_half(20 * BLOCK_BYTES, groups=(BlockGroup(), BlockGroup(window_blocks=2)))
    request = Asked("a", list(range(24)))
    admit(half, request, num_groups=2)
    plans = [step(half, request, 0, 24)]
    assert saved(plans[0]) == [10, 11]
    for tick in range(1, 4):
        watch.now = float(tick)
        plans.append(step(half, request, 24, 0))
    assert [saved(plan) for plan in plans[1:]] == [[0, 1], [2, 3], [4, 5]]
    report(half, 4, tuple(job.job_id for plan in plans for job in plan.saves))
    assert half.get_num_new_matched_tokens(Asked("b", list(range(25))), 0) == (24, False)
    half.check()


def test_saves_before_reuse_are_not_limited() -> None:
    half, blocks, _ = make_half(BLOCK_BYTES, write_policy="write_back")
    request = Asked("a", list(range(32)))
    admit(half, request)
    assert saved(step(half, request, 0, 32)) == []
    half.request_finished(request)
    blocks.order = list(enumerate(request.block_hashes))
    assert saved(half.build_connector_meta(SchedulerOutput(()))) == list(range(8))


def test_blocks_that_wait_are_not_saved_before_they_are_computed_again() -> None:
    """A load fails, and the engine goes back: what it computed behind the load may rest on bytes that never came.
    Somebody else saves what is in front of them."""
    half, _, watch = make_half(20 * BLOCK_BYTES)
    first = Asked("first", list(range(8)))
    admit(half, first)
    plan = step(half, first, 0, 8)
    report(half, 1, tuple(job.job_id for job in plan.saves))
    half.request_finished(first)

    watch.now = 1.0
    again = Asked("again", list(range(32)))
    assert admit(half, again, first_block=50) == 8
    plan = step(half, again, 8, 24)
    assert saved(plan) == [52, 53]
    report(half, 2, failed=tuple(job.job_id for job in (*plan.loads, *plan.saves)))
    other = Asked("other", list(range(16)))
    admit(half, other, first_block=80)
    for second, expected in ((2, [80, 81]), (3, [82, 83])):
        watch.now = float(second)
        assert saved(step(half, other, 0, 16)) == expected
    for second, computed, expected in ((4, 0, []), (5, 4, []), (6, 16, [54]), (7, 20, [55]), (8, 28, [56, 57])):
        watch.now = float(second)
        assert saved(step(half, again, computed, 4 if computed else 0)) == expected
    half.check()


def test_what_a_plan_ahead_saves_behind_a_load_that_failed_is_never_matched() -> None:
    """The engine plans a step before it hears that the load of the one before has failed."""
    half, blocks, watch = make_half(20 * BLOCK_BYTES)
    first = Asked("first", list(range(8)))
    admit(half, first)
    plan = step(half, first, 0, 8)
    report(half, 1, tuple(job.job_id for job in plan.saves))
    half.request_finished(first)

    watch.now = 1.0
    again = Asked("again", list(range(32)))
    admit(half, again, first_block=50)
    plan = step(half, again, 8, 24)
    watch.now = 2.0
    ahead = step(half, again, 32, 0)
    assert saved(ahead) == [54, 55], "they waited, and were computed on what was to be loaded"
    report(half, 2, failed=tuple(job.job_id for job in (*plan.loads, *plan.saves)))
    report(half, 3, done=tuple(job.job_id for job in ahead.saves))
    assert half.host.num_copies == 0
    assert half.metrics.failed_save_jobs == 2
    assert blocks.pins() == {}
    half.check()


@settings(max_examples=60, deadline=None)
@given(
    blocks_a_second=st.integers(1, 400),
    steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=25),
)
def test_no_sequence_of_steps_saves_more_than_the_budget(
    blocks_a_second: int, steps: list[tuple[float, int, int]]
) -> None:
    """Of any run of consecutive steps, and no block is lost: it is saved, or counted when its request ends."""
    half, _, watch = make_half(blocks_a_second * BLOCK_BYTES)
    requests = [Asked(str(i), [i] * 400) for i in range(3)]
    computed = [0, 0, 0]
    for i, request in enumerate(requests):
        admit(half, request, first_block=100 * i)
    times, counts = [], []
    for seconds, which, num_tokens in steps:
        watch.now += seconds
        num_tokens = min(num_tokens, 400 - computed[which])
        counts.append(len(saved(step(half, requests[which], computed[which], num_tokens))))
        times.append(watch.now)
        computed[which] += num_tokens
    half.check()
    burst = max(0.1 * blocks_a_second, 1)
    sums = [0, *accumulate(counts)]
    for first, start in enumerate(times):
        for last in range(first, len(times)):
            spent = sums[last + 1] - sums[first]
            assert spent <= blocks_a_second * (times[last] - start) + burst + 1e-6
    for request in requests:
        half.request_finished(request)
    assert sums[-1] + half.metrics.dropped_saves_blocks == sum(tokens // 4 for tokens in computed)
    assert half.metrics.dropped_saves_blocks <= half.metrics.deferred_saves_blocks
