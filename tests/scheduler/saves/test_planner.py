"""What is saved where the host is full."""

from __future__ import annotations

from kv_connector.scheduler import SchedulerHalf
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, report, run


def next_to_be_reused(half: SchedulerHalf, blocks: ForeignBlocks, request: Asked, first_block: int) -> int:
    """How many blocks of an ended request are saved now that the engine is about to reuse them."""
    blocks.order = [(first_block + index, request.block_hashes[index]) for index in (1, 0)]
    plan = run(half)
    report(half, plan)
    return sum(job.num_blocks for job in plan.saves)


def test_before_reuse_an_older_block_does_not_push_a_newer_one_off_the_host() -> None:
    """Under write_back, with two host blocks: else what was used last is lost to what was used first."""
    half, blocks = make_half(num_host_blocks=2, write_policy="write_back")
    older, newer = Asked("older", list(range(9))), Asked("newer", list(range(100, 109)))
    for number, request in enumerate((older, newer)):
        admit(half, request, first_block=10 * number)
        run(half, request)
        half.request_finished(request)
    assert next_to_be_reused(half, blocks, newer, 10) == 2
    assert next_to_be_reused(half, blocks, older, 0) == 0
    assert half.get_num_new_matched_tokens(Asked("again", newer.tokens), 0) == (8, False)
