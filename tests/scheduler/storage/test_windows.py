"""Storage of models with several block groups: what is asked, which end is fetched, and what is written. Plans are read
and reports written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput, StateBlock
from kv_connector.config import Config
from kv_connector.index import BlockGroup, describe_groups, split_key
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import NO_BLOCK, StepReport, StorageAction, StorageJob
from tests.scheduler.storage.test_companion import Ticks, matched, step
from tests.scheduler.test_half import Asked, ForeignBlocks

PROMPT = list(range(41))  # ten hashes, and a token to compute
WINDOW = (BlockGroup(), BlockGroup(window_blocks=2))
STATE = (BlockGroup(), BlockGroup(window_blocks=1, hashes_per_block=2, states_are_told=True))
COARSE = (BlockGroup(), BlockGroup(hashes_per_block=2))


def make(
    groups: Sequence[BlockGroup] = WINDOW,
    num_host_blocks: int = 100,
    world_size: int = 1,
    group_blocks: int = 1,
    drop_last_block: bool = False,
    load_choice: str = "sync",
    **storage: object,
) -> SchedulerHalf:
    settings = {"path": "unused", "capacity": 8 << 20, "prefetch": "wait_complete"} | storage
    config = Config.from_mapping(
        {"host_memory": 1 << 20, "write_policy": "write_through", "load_choice": load_choice, "storage": settings}
    )
    half = SchedulerHalf(
        config,
        4,
        world_size,
        clock=Ticks(),
        groups=groups,
        fails_by_block=False,
        drop_last_block=drop_last_block,
    )
    half.bind_block_pool(ForeignBlocks())
    ranks = range(world_size)
    half.update_connector_output(
        [StepReport(0, rank, num_host_blocks=num_host_blocks, group_blocks=group_blocks) for rank in ranks]
    )
    return half


def report(
    half: SchedulerHalf,
    jobs: Sequence[StorageJob],
    found: int | None = None,
    rank: int = 0,
    ok: bool = True,
    missing: tuple[int, ...] = (),
) -> None:
    """These jobs have ended, but for blocks at these places; of a look-up, the keys of these bits were found."""
    ids = tuple(job.job_id for job in jobs)
    bits = tuple((job_id, found) for job_id in ids) if found is not None else ()
    lost = tuple((job.job_id, tuple(job.host_ids[list(missing)].tolist())) for job in jobs if missing)
    done, failed = (ids, ()) if ok else ((), ids)
    half.update_connector_output(
        [
            StepReport(
                half._step,
                rank,
                done,
                failed,
                num_host_blocks=half.host.pool.capacity,
                found=bits,
                missing=lost,
            )
        ]
    )


def first(count: int) -> int:
    """The bits of so many leading keys."""
    return (1 << count) - 1


def places(half: SchedulerHalf, job: StorageJob) -> list[tuple[int, int]]:
    """Group and hash of each host block that the job moves, which are those of its keys."""
    keys = half.host.hashes_of(job.host_ids.tolist())
    moved = [key for place, key in enumerate(job.split_keys()) if place not in job.skipped]
    assert b"".join(moved) == half._companions._companions[0]._names.of(keys)  # type: ignore[attr-defined]
    hashes = Asked("x", PROMPT).block_hashes
    return [(split_key(key)[1], hashes.index(split_key(key)[0])) for key in keys]


def fetched(half: SchedulerHalf, jobs: Sequence[StorageJob]) -> list[list[tuple[int, int]]]:
    assert all(job.action is StorageAction.FETCH for job in jobs)
    return [places(half, job) for job in jobs]


def asked(half: SchedulerHalf, request: Asked) -> tuple[StorageJob, ...]:
    half.on_new_request(request)
    return step(half)


def found_full(half: SchedulerHalf, request: Asked, count: int) -> tuple[StorageJob, ...]:
    """Of full attention so many leading blocks are found; what follows."""
    report(half, asked(half, request), found=first(count))
    return step(half)


def compute(half: SchedulerHalf, request: Asked, *states: StateBlock) -> None:
    """A request that storage knows nothing of, whose blocks are all saved."""
    while jobs := (asked(half, request) or step(half)):
        report(half, jobs, found=0)
    size = half._shared.group_sizes
    tables = [list(range(20 * g, 20 * g + -(-request.num_tokens // s))) for g, s in enumerate(size)]
    half.update_state_after_alloc(request, tables, 0, 0)
    item = ScheduledRequest(request.request_id, 0, request.num_tokens, ())
    plan = half.build_connector_meta(SchedulerOutput([item], (), states))
    report(half, plan.saves)  # type: ignore[arg-type]


def test_full_attention_is_asked_first_and_then_what_windows_need_near_its_end() -> None:
    half, request = make(), Asked("a", PROMPT)
    (job,) = asked(half, request)
    assert (job.action, job.singly, len(job.split_keys())) == (StorageAction.LOOK_UP, False, 10)
    report(half, [job], found=first(8))
    (job,) = step(half)
    assert (job.action, job.singly, len(job.split_keys())) == (StorageAction.LOOK_UP, True, 8)
    report(half, [job], found=0b11000000)
    jobs = step(half)
    assert fetched(half, jobs) == [[(0, i) for i in range(8)], [(1, 6), (1, 7)]]
    assert [job.singly for job in jobs] == [False, True]
    assert matched(half, request) is None
    report(half, jobs)
    assert matched(half, request) == 32
    half.check()


@pytest.mark.parametrize(
    ("bits", "end"), [(0b1111111111, 10), (0b0111111111, 9), (0b1011111111, 8), (0b0101001011, 2), (0b1, 1), (0b10, 0)]
)
def test_a_hit_ends_where_the_window_is_whole(bits: int, end: int) -> None:
    half, request = make(), Asked("a", PROMPT)
    (job,) = found_full(half, request, 10)
    report(half, [job], found=bits)
    jobs = step(half)
    windows = [(1, i) for i in range(max(0, end - 2), end)]
    assert fetched(half, jobs) == ([[(0, i) for i in range(end)], windows] if end else [])
    report(half, jobs)
    assert matched(half, request) == 4 * end


def test_a_hit_ends_behind_a_state_and_at_the_ends_of_blocks() -> None:
    half, request = make(STATE), Asked("a", PROMPT)
    (job,) = found_full(half, request, 9)
    assert len(job.split_keys()) == 4, "states behind 8 hashes and earlier"
    report(half, [job], found=0b0101)
    jobs = step(half)
    assert fetched(half, jobs) == [[(0, i) for i in range(6)], [(1, 5)]]
    report(half, jobs)
    assert matched(half, request) == 24


def test_states_alone_are_looked_up_for_every_end() -> None:
    half, request = make(STATE[1:]), Asked("a", PROMPT)
    (job,) = asked(half, request)
    assert (job.singly, len(job.split_keys())) == (True, 5)
    report(half, [job], found=0b1010)
    (job,) = step(half)
    assert places(half, job) == [(0, 7)]
    report(half, [job])
    assert matched(half, request) == 32
    half.update_state_after_alloc(request, [[NO_BLOCK, NO_BLOCK, NO_BLOCK, 3, 4]], 0, 32)
    assert half.get_kv_connector_stats()["storage_hit_tokens"] == 32


def test_a_prefix_that_lacks_all_its_windows_is_not_fetched() -> None:
    half, request = make(), Asked("a", PROMPT)
    report(half, found_full(half, request, 10), found=0)
    assert step(half) == ()
    assert matched(half, request) == 0


def test_groups_of_full_attention_are_asked_at_once_and_the_shortest_decides() -> None:
    half, request = make(COARSE), Asked("a", PROMPT)
    one, other = asked(half, request)
    assert [len(job.split_keys()) for job in (one, other)] == [10, 5]
    report(half, [other], found=first(3))
    assert step(half) == ()
    report(half, [one], found=first(9))
    jobs = step(half)
    assert fetched(half, jobs) == [[(0, i) for i in range(6)], [(1, 1), (1, 3), (1, 5)]]
    report(half, jobs)
    assert matched(half, request) == 24


def test_of_each_block_every_rank_must_have_its_part() -> None:
    """One has the window at the eighth hash, the other that at the fifth; both have the first two."""
    half, request = make(world_size=2), Asked("a", PROMPT)
    jobs = asked(half, request)
    for rank, count in ((0, 9), (1, 10)):
        report(half, jobs, found=first(count), rank=rank)
    jobs = step(half)
    for rank, bits in ((0, 0b011000011), (1, 0b000011011)):
        report(half, jobs, found=bits, rank=rank)
    assert fetched(half, step(half)) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_what_the_host_has_of_a_window_counts_and_is_not_fetched() -> None:
    half, request = make(), Asked("a", PROMPT)
    compute(half, Asked("before", PROMPT[:25]))
    while jobs := step(half):
        report(half, jobs)
    node = half.tree.get(half._grouped.keys(request.block_hashes, 1)[5])
    assert node is not None
    (job,) = asked(half, request)
    assert len(job.split_keys()) == 4
    report(half, [job], found=first(1))
    (job,) = step(half)
    report(half, [job], found=1 << len(job.split_keys()) - 1)
    assert fetched(half, step(half)) == [[(0, 6)], [(1, 6)]], "the host has the window's block in front of it"


def test_a_window_that_the_host_has_lost_is_fetched_alone() -> None:
    half, request = make(), Asked("a", PROMPT)
    compute(half, Asked("before", PROMPT))
    while jobs := step(half):
        report(half, jobs)
    keys = half._grouped.keys(request.block_hashes, 1)
    half.host.discard(half.host.blocks_of(half._grouped.find(keys[:])))
    (job,) = asked(half, request)
    assert job.singly, "full attention is on the host"
    report(half, [job], found=0b1100000)
    (job,) = step(half)
    assert places(half, job) == [(1, 5), (1, 6)]
    report(half, [job])
    assert matched(half, request) == 28


def test_ends_farther_in_front_are_asked_about_where_none_is_whole() -> None:
    tokens = list(range(4 * 300 + 1))
    half, request = make(num_host_blocks=1000), Asked("a", tokens)
    report(half, asked(half, request), found=first(300))
    asked_for = []
    while jobs := step(half):
        job = jobs[0]
        if job.action is StorageAction.FETCH:
            break
        asked_for.append(len(job.split_keys()))
        report(half, [job], found=0b11 if len(asked_for) == 2 else 0)
    assert asked_for == [66, 130], "64 ends, then 128, and what these need in front of them"
    assert sum(job.num_blocks for job in jobs) == 108 + 2


def test_a_host_that_is_too_small_takes_a_hit_that_fits() -> None:
    half, request = make(num_host_blocks=8), Asked("a", PROMPT)  # a quarter is left to others
    (job,) = found_full(half, request, 10)
    report(half, [job], found=first(10))
    assert fetched(half, step(half)) == [[(0, i) for i in range(4)], [(1, 2), (1, 3)]]
    assert half.get_kv_connector_stats()["dropped_fetches_blocks"] == 12 - 6
    half.check()


def test_objects_are_fetched_whole_also_where_a_window_ends_the_hit_within_one() -> None:
    half, request = make(group_blocks=4), Asked("a", PROMPT)
    (job,) = found_full(half, request, 10)
    report(half, [job], found=0b110000)
    full, window = step(half)
    assert (len(full.split_keys()), full.skipped, window.skipped) == (8, (6, 7), ())
    assert fetched(half, [full, window]) == [[(0, i) for i in range(6)], [(1, 4), (1, 5)]]


def test_a_failed_look_up_is_a_miss() -> None:
    half, request = make(COARSE), Asked("a", PROMPT)
    one, other = asked(half, request)
    report(half, [one], found=first(10))
    report(half, [other], ok=False)
    assert step(half) == ()
    assert matched(half, request) == 0


@pytest.mark.parametrize("lost", ["attention", "the state"])
def test_what_has_not_come_costs_the_hit_what_lies_behind_it_alone(lost: str) -> None:
    """A block was damaged, or has gone since it was looked up: storage is asked once more, for an end in front."""
    half, request = make(STATE), Asked("a", PROMPT)
    (job,) = found_full(half, request, 10)
    report(half, [job], found=0b10010)
    full, state = step(half)
    assert places(half, state) == [(1, 9)]
    report(half, [full], missing=(7,) if lost == "attention" else ())
    assert step(half) == (), "the rest is on its way"
    report(half, [state], ok=lost == "attention")
    assert matched(half, request) is None
    if lost == "attention":
        (job,) = step(half)
        report(half, [job], found=0)
    (job,) = step(half)
    report(half, [job], found=0b10)
    (job,) = step(half)
    assert places(half, job) == [(1, 3)]
    report(half, [job])
    assert matched(half, request) == 16
    half.check()


def test_what_never_comes_is_asked_for_twice_and_no_more() -> None:
    half, request = make(STATE), Asked("a", PROMPT)
    (job,) = found_full(half, request, 10)
    for _ in range(2):
        report(half, [job], found=0b10000)
        *others, state = step(half)
        report(half, others)
        assert places(half, state) == [(1, 9)]
        report(half, [state], ok=False)
        (job,) = step(half) or (job,)
    assert matched(half, request) == 0
    assert step(half) == ()
    half.check()


def test_a_look_up_that_is_never_answered_is_given_up() -> None:
    half, request = make(COARSE), Asked("a", PROMPT)
    one, _ = asked(half, request)
    half._shared.clock.now += 40.0  # type: ignore[attr-defined]
    report(half, [one], found=first(10))
    assert step(half) == ()
    assert matched(half, request) == 0


def test_two_that_arrive_together_share_the_fetch_of_a_window() -> None:
    half, one, other = make(), Asked("one", PROMPT), Asked("other", PROMPT)
    report(half, found_full(half, one, 10), found=first(10))
    half.on_new_request(other)
    jobs = step(half)
    assert len(jobs) == 2, "nothing is looked up"
    report(half, jobs)
    for request in (one, other):
        assert matched(half, request) == 40
    half.update_state_after_alloc(other, [list(range(10)), [NO_BLOCK] * 8 + [98, 99]], 0, 40)
    assert half.get_kv_connector_stats()["storage_hit_tokens"] == 40


def test_where_the_last_block_is_computed_a_window_is_fetched_in_front_of_it() -> None:
    half, request = make(drop_last_block=True), Asked("a", PROMPT)
    (job,) = found_full(half, request, 10)
    report(half, [job], found=first(10))
    jobs = step(half)
    assert fetched(half, jobs) == [[(0, i) for i in range(10)], [(1, 7), (1, 8)]]
    report(half, jobs)
    assert matched(half, request) == 36


def test_where_the_last_block_is_computed_one_state_is_enough() -> None:
    """Engines keep the state in front of that block, and none behind it. The block of attention that has the first
    token to compute comes, too: without it nobody knows that the state is at a hit's end."""
    half, request = make(STATE, drop_last_block=True), Asked("a", PROMPT)
    (job,) = found_full(half, request, 10)
    report(half, [job], found=0b1000)
    jobs = step(half)
    assert fetched(half, jobs) == [[(0, i) for i in range(9)], [(1, 7)]]
    report(half, jobs)
    assert matched(half, request) == 32


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_prompt_that_ends_with_a_block_hits_up_to_the_state_in_front_of_it(num_more: int) -> None:
    """As vLLM does with its own prefix cache: the last block is there to be left to be computed."""
    half, request = make(STATE, drop_last_block=True), Asked("a", PROMPT[: 36 + num_more])
    (job,) = found_full(half, request, 9)
    report(half, [job], found=0b1000)
    report(half, step(half))
    assert matched(half, request) == 32


def test_a_token_of_a_prompt_that_ends_with_a_block_is_left_to_compute() -> None:
    half, request = make(STATE), Asked("a", PROMPT[:40])
    (job,) = asked(half, request)
    assert len(job.split_keys()) == 8


def test_where_windows_alone_say_what_there_is_they_are_fetched_for_both_ends() -> None:
    half, request = make((BlockGroup(window_blocks=2),), drop_last_block=True), Asked("a", PROMPT)
    (job,) = asked(half, request)
    report(half, [job], found=first(10))
    jobs = step(half)
    assert fetched(half, jobs) == [[(0, 7), (0, 8), (0, 9)]]
    report(half, jobs)
    assert matched(half, request) == 36


def test_room_is_not_made_of_what_the_hit_needs() -> None:
    """The host is full, and of all that it has the windows of the hit were used longest ago."""
    half, request = make(num_host_blocks=24), Asked("a", PROMPT)
    compute(half, Asked("before", PROMPT[:17]))
    for number in (1, 2):
        compute(half, Asked(f"other{number}", list(range(1000 * number, 1000 * number + 17))))
    while jobs := step(half):
        report(half, jobs)
    half.host.discard(half.host.blocks_of(half._grouped.find(request.block_hashes[3::-1])))
    half.host.allocate(4)  # they are of use to others
    (full,) = asked(half, request)
    report(half, [full], found=first(4))
    assert fetched(half, step(half)) == [[(0, i) for i in range(4)]], "the host has the window at the fourth hash"
    half.host.check()


@pytest.mark.parametrize(("seconds_a_block", "is_fetched"), [(0.6, True), (0.9, False)])
def test_whether_a_prefix_is_sooner_computed_goes_by_its_tokens(seconds_a_block: float, is_fetched: bool) -> None:
    """They are in five blocks, and take 4 seconds to compute."""
    half = make((BlockGroup(hashes_per_block=2),), load_choice="auto")
    half._loads.estimate._prefill.observe(1000, 100.0)
    half._companions._companions[0]._prefetches._reading.rate.observe(1000, 1000 * seconds_a_block)  # type: ignore[attr-defined]
    jobs = asked(half, Asked("a", PROMPT))
    report(half, jobs, found=first(5))
    assert bool(step(half)) is is_fetched
    assert half.get_kv_connector_stats()["recomputed_storage_tokens"] == (0 if is_fetched else 40)


def written(half: SchedulerHalf) -> list[tuple[bool, list[tuple[int, int]]]]:
    """Backups until there are none: whether blocks are kept singly, and which."""
    found = []
    while jobs := step(half):
        assert all(job.action is StorageAction.BACK_UP for job in jobs)
        found += [(job.singly, sorted(places(half, job))) for job in jobs]
        report(half, jobs)
    return sorted(found)


@pytest.mark.parametrize("backup", ["on_save", "at_finish"])
@pytest.mark.parametrize("group_blocks", [1, 4])
def test_windows_are_written_like_the_rest_and_singly(backup: str, group_blocks: int) -> None:
    half, request = make(backup=backup, group_blocks=group_blocks), Asked("a", PROMPT)
    compute(half, request)
    assert backup == "on_save" or written(half) == []
    before = written(half)
    half.request_finished(request)
    found = before + written(half)
    assert sorted(place for singly, ps in found for place in ps if not singly) == [(0, i) for i in range(10)]
    assert [place for singly, ps in found for place in ps if singly] == [(1, i) for i in range(10)]


def test_at_finish_states_are_written_too() -> None:
    half, request = make(STATE, backup="at_finish"), Asked("a", PROMPT)
    compute(half, request, StateBlock("a", 1, 23, 32))
    half.request_finished(request)
    assert written(half) == [(False, [(0, i) for i in range(10)]), (True, [(1, 7)])]


def test_a_window_that_is_next_to_go_is_written() -> None:
    half = make(num_host_blocks=160, backup="on_eviction")
    for number in range(1, 8):
        request = Asked(f"r{number}", [*range(1000 * number, 1000 * number + 40), 0])
        compute(half, request)
        half.request_finished(request)
    compute(half, Asked("a", PROMPT))
    jobs = step(half)
    assert {job.singly for job in jobs} == {False, True}
    report(half, jobs)
    half.check()


def test_identities_say_which_groups_there_are() -> None:
    assert describe_groups([BlockGroup()]) == ""
    shapes = (WINDOW, STATE, COARSE, STATE[1:], WINDOW[1:], WINDOW[:1] + STATE[1:] + WINDOW[1:])
    assert len({describe_groups(groups) for groups in shapes}) == len(shapes)
    assert describe_groups(STATE) == "full of 1, state of 2"
