"""What routers learn of storage, whose content nobody tracks."""

from __future__ import annotations

from kv_connector.events import BlockRemoved, BlockStored
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.storage.told import ToldBlocks
from kv_connector.types import BlockHash, StepReport, Tier
from tests.scheduler.storage.test_companion import PROMPT, arrive, compute, drain, fetch, make_half, report, step
from tests.scheduler.test_half import Asked


def in_storage(half: SchedulerHalf, before: frozenset[BlockHash] = frozenset()) -> frozenset[BlockHash]:
    """Blocks that a router believes to be in storage, once it has read all events."""
    held = set(before)
    for event in half.take_events():
        if event.tier is Tier.STORAGE:
            assert isinstance(event, BlockStored | BlockRemoved)
            change = set(event.block_hashes)
            assert change.isdisjoint(held) if isinstance(event, BlockStored) else change <= held, "each told once"
            held = held | change if isinstance(event, BlockStored) else held - change
    return frozenset(held)


def test_what_was_written_is_told_but_for_what_some_rank_has_not_written() -> None:
    half, _, _ = make_half()
    request = Asked("a", PROMPT)
    compute(half, request)
    report(half, step(half), missing=(3,))
    drain(half)
    assert in_storage(half) == {name for place, name in enumerate(request.block_hashes) if place != 3}


def test_a_look_up_tells_what_others_wrote_and_what_is_gone() -> None:
    half, _, _ = make_half(num_host_blocks=40)
    first, again = Asked("first", PROMPT), Asked("again", PROMPT)
    report(half, [arrive(half, first)], found=10)
    held = in_storage(half)
    assert held == set(first.block_hashes[:10])
    half.request_finished(first)
    report(half, step(half))
    half.host.reset()
    report(half, [arrive(half, again)], found=4)
    assert in_storage(half, held) == held - {first.block_hashes[4]}, "nothing is said of what is behind the first gap"


def test_what_a_fetch_does_not_find_is_gone() -> None:
    half, _, _ = make_half()
    request = Asked("a", PROMPT)
    report(half, fetch(half, request), missing=(7, 8))
    assert in_storage(half) == {name for place, name in enumerate(request.block_hashes[:10]) if place not in (7, 8)}


def test_after_a_reset_nothing_is_in_storage_and_what_was_being_written_is_not_told() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", [1000 + token for token in PROMPT])
    compute(half, first)
    drain(half)
    compute(half, second)
    held, writing = in_storage(half), step(half)
    assert writing
    assert half.reset_cache()
    report(half, writing)
    assert in_storage(half, held) == set()


def test_a_fetch_that_begins_behind_a_reset_says_nothing_of_who_has_its_rows_by_then() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", [1000 + token for token in PROMPT])
    report(half, [arrive(half, first)], found=10)  # the next step is to fetch them
    half.request_finished(first)
    half.tree.max_remembered = 0
    assert half.reset_cache()
    half.pin_prefix(second.block_hashes[:1], are_given=False)
    half.unpin_prefix(second.block_hashes[:1])  # which lets the tree forget
    half.pin_prefix(second.block_hashes, are_given=False)
    jobs = step(half)
    report(half, [arrive(half, second)], found=10)
    held = in_storage(half)
    assert held == set(second.block_hashes)
    for job in jobs:
        report(half, [job], missing=tuple(range(job.num_blocks)))
    assert in_storage(half, held) == held


def test_what_is_told_is_bounded_and_the_oldest_go_first() -> None:
    half, _, _ = make_half()
    told = ToldBlocks(half._shared, most=4)
    names = [BlockHash(bytes([number]) * 32) for number in range(6)]
    told._store(names[:3])
    told._store(names[3:])
    assert in_storage(half) == set(names[2:])


def test_nothing_is_kept_where_nobody_listens() -> None:
    half, _, _ = make_half()
    half._events.is_read = False
    compute(half, Asked("a", PROMPT))
    drain(half)
    assert not half._companions._companions[0]._told._told  # type: ignore[attr-defined]
    half.update_connector_output([StepReport(half._step, 0, num_host_blocks=100)])
    assert list(half.take_events()) == []
