"""Storage as the scheduler half sees it: plans read, and reports written, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kv_connector.config import Config
from kv_connector.errors import ConfigError
from kv_connector.events import BlockStored
from kv_connector.index import BlockGroup, BlockPool
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepReport, StorageAction, StorageJob, Tier
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, run, save

PROMPT = list(range(41))  # ten blocks, and a token to compute


class Ticks:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def make_half(
    num_host_blocks: int = 100,
    world_size: int = 1,
    load_choice: str = "sync",
    groups: Sequence[BlockGroup] = (BlockGroup(),),
    tenants: Mapping[str, object] | None = None,
    **storage: object,
) -> tuple[SchedulerHalf, ForeignBlocks, Ticks]:
    settings = {"path": "unused", "capacity": 8 << 20, "prefetch": "wait_complete"} | storage
    given = {"host_memory": 1 << 20, "write_policy": "write_through", "load_choice": load_choice, "storage": settings}
    config = Config.from_mapping({**given, "tenants": tenants or {}})
    ticks = Ticks()
    half = SchedulerHalf(config, 4, world_size, clock=ticks, groups=groups)
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_connector_output([StepReport(0, rank, num_host_blocks=num_host_blocks) for rank in range(world_size)])
    return half, blocks, ticks


def arrive(half: SchedulerHalf, request: Asked) -> StorageJob:
    """The look-up that a request's arrival leads to."""
    half.on_new_request(request)
    (job,) = step(half)
    assert job.action is StorageAction.LOOK_UP
    return job


def step(half: SchedulerHalf) -> tuple[StorageJob, ...]:
    """Storage jobs of a step without requests."""
    return run(half).storage


def report(
    half: SchedulerHalf,
    done: Sequence[StorageJob] = (),
    failed: Sequence[StorageJob] = (),
    found: int | None = None,
    rank: int = 0,
    missing: tuple[int, ...] = (),
) -> None:
    """Storage jobs have ended on a rank, but for blocks at these places in them; of look-ups so many leading keys were
    found."""
    lost = tuple((job.job_id, tuple(job.host_ids[list(missing)].tolist())) for job in done if missing)
    half.update_connector_output(
        [
            StepReport(
                half._step,
                rank,
                tuple(job.job_id for job in done),
                tuple(job.job_id for job in failed),
                num_host_blocks=half.host.pool.capacity,
                found=tuple((job.job_id, (1 << found) - 1) for job in done) if found is not None else (),
                missing=lost,
            )
        ]
    )


def matched(half: SchedulerHalf, request: Asked) -> int | None:
    return half.get_num_new_matched_tokens(request, 0)[0]


def compute(half: SchedulerHalf, request: Asked) -> None:
    """A whole life of a request that storage knows nothing of; its blocks are saved."""
    report(half, [arrive(half, request)], found=0)
    save(half, request)


def fetch(half: SchedulerHalf, request: Asked, found: int = 10) -> tuple[StorageJob, ...]:
    """Arrival, and a look-up that finds blocks; returns the fetches."""
    report(half, [arrive(half, request)], found=found)
    return step(half)


def test_what_storage_has_is_a_host_hit_once_it_is_there() -> None:
    half, _, _ = make_half()
    request = Asked("a", PROMPT)
    (job,) = fetch(half, request)
    assert (job.action, job.num_blocks, len(job.split_keys())) == (StorageAction.FETCH, 10, 10)
    assert matched(half, request) is None, "it waits"
    report(half, [job])
    assert matched(half, request) == 40
    assert half.get_kv_connector_stats()["fetched_blocks"] == 10
    assert step(half) == (), "asked once"
    half.check()


def test_only_what_the_host_lacks_is_looked_up() -> None:
    half, _, _ = make_half()
    compute(half, Asked("before", PROMPT[:17]))
    drain(half)
    job = arrive(half, Asked("a", PROMPT))
    assert len(job.split_keys()) == 10 - 4
    half.on_new_request(Asked("b", PROMPT[:17]))
    assert step(half) == (), "all of it is on the host"


def drain(half: SchedulerHalf) -> None:
    """Let every backup end."""
    while jobs := step(half):
        report(half, jobs)


@pytest.mark.parametrize(
    ("prefetch", "at_once", "later"), [("best_effort", 0, 0), ("timeout", None, 0), ("wait_complete", None, None)]
)
def test_how_long_a_request_waits(prefetch: str, at_once: int | None, later: int | None) -> None:
    half, _, ticks = make_half(prefetch=prefetch, timeout_ms=200)
    request = Asked("a", PROMPT)
    fetch(half, request)
    assert matched(half, request) == at_once
    ticks.now += 0.25
    assert matched(half, request) == later


@pytest.mark.parametrize("prefetch", ["timeout", "wait_complete"])
def test_storage_that_hangs_holds_up_one_request_and_no_other(prefetch: str, caplog: pytest.LogCaptureFixture) -> None:
    half, _, ticks = make_half(prefetch=prefetch, timeout_ms=10_000)
    first = Asked("first", PROMPT)
    job = arrive(half, first)
    for _ in range(4):
        assert matched(half, first) is None
        ticks.now += 0.5
    assert matched(half, first) == 0, "computed"
    for number in range(3):
        other = Asked(f"other {number}", prompt(number + 1))
        half.on_new_request(other)
        assert step(half) == (), "it is not even asked"
        assert matched(half, other) == 0
    assert len(caplog.records) == 1 and "has not answered for 2 s" in caplog.text
    report(half, [job], found=0)
    assert arrive(half, Asked("later", prompt(5))), "it answers again"
    half.check()


@pytest.mark.parametrize("prefetch", ["timeout", "wait_complete"])
def test_an_engine_that_stood_still_itself_goes_on_waiting_for_storage(prefetch: str) -> None:
    half, _, ticks = make_half(prefetch=prefetch, timeout_ms=60_000)
    request = Asked("a", PROMPT)
    fetch(half, request)
    assert matched(half, request) is None
    ticks.now += 20.0
    assert matched(half, request) is None, "what was answered meanwhile is yet to be told"
    other = Asked("other", prompt(1))
    half.on_new_request(other)
    assert step(half) and matched(half, other) is None, "it is asked as well"
    half.check()


def test_what_was_called_off_is_no_answer_of_storage() -> None:
    """Clients hang up faster than storage would be found to hang, and none of their look-ups reaches it."""
    half, _, ticks = make_half(prefetch="wait_complete")
    first = Asked("first", PROMPT)
    arrive(half, first)
    for number in range(4):
        assert matched(half, first) is None
        other = Asked(f"other {number}", prompt(number + 1))
        job = arrive(half, other)
        half.request_finished(other)
        assert run(half).cancelled_storage == (job.job_id,)
        ticks.now += 0.5
        report(half, failed=[job])
    assert matched(half, first) == 0, "computed"
    half.check()


@pytest.mark.parametrize(("prefetch", "timeout_ms"), [("wait_complete", 200), ("timeout", 500)])
def test_storage_that_is_dead_holds_requests_up_for_two_seconds_in_all(prefetch: str, timeout_ms: int) -> None:
    """Each comes once the one before it has gone on, whose look-up is called off: storage has never come to it."""
    half, _, ticks = make_half(1000, prefetch=prefetch, timeout_ms=timeout_ms)
    waited = 0.0
    for number in range(20):
        request = Asked(f"request {number}", prompt(number))
        job = arrive(half, request)
        since = ticks.now
        while matched(half, request) is None:
            ticks.now += 0.1
        waited += ticks.now - since
        admit(half, request)
        assert run(half, request).cancelled_storage == (job.job_id,), "by which it would be found again"
        report(half, failed=[job])
        half.request_finished(request)
        ticks.now += 1.0
    assert waited < 2.5
    request = Asked("later", prompt(50))
    report(half, [arrive(half, request)], found=10)
    (job,) = step(half)
    assert job.action is StorageAction.FETCH and matched(half, request) is None, "it answers again, and is waited for"
    half.check()


def test_the_first_request_of_an_engine_finds_what_storage_has() -> None:
    """The step that answers its look-up is also the one that says how much host memory there is."""
    config = Config.from_mapping({"host_memory": 1 << 20, "storage": {"path": "unused", "capacity": "8MiB"}})
    half = SchedulerHalf(config, 4)
    half.bind_block_pool(ForeignBlocks())
    job = arrive(half, Asked("a", PROMPT))
    half.update_connector_output(
        [StepReport(1, 0, (job.job_id,), num_host_blocks=100, found=((job.job_id, (1 << 10) - 1),))],
    )
    (fetch_job,) = step(half)
    assert fetch_job.num_blocks == 10


def test_a_request_rides_on_what_is_fetched_for_another() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    (job,) = fetch(half, first)
    half.on_new_request(second)
    assert step(half) == (), "it is on its way"
    assert matched(half, second) is None
    report(half, [job])
    assert matched(half, second) == 40
    admit(half, second)
    assert half.get_kv_connector_stats()["storage_hit_tokens"] == 40


def test_two_that_arrive_together_fetch_once() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", [*PROMPT, *range(100, 108)])
    half.on_new_request(first)
    half.on_new_request(second)
    look_ups = step(half)
    assert [job.action for job in look_ups] == [StorageAction.LOOK_UP] * 2
    for job, found in zip(look_ups, (10, 12), strict=True):
        report(half, [job], found=found)
    jobs = step(half)
    assert [job.num_blocks for job in jobs] == [10, 2]
    report(half, jobs)
    assert (matched(half, first), matched(half, second)) == (40, 48)
    half.check()


def test_what_nobody_waits_for_any_more_is_called_off() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    (job,) = fetch(half, first)
    half.on_new_request(second)
    half.request_finished(first)
    assert run(half).cancelled_storage == (), "the second one waits"
    half.request_finished(second)
    assert half.has_pending_push_work()
    assert run(half).cancelled_storage == (job.job_id,)
    report(half, failed=[job])
    stats = half.get_kv_connector_stats()
    assert (stats["cancelled_fetch_jobs"], stats["failed_fetch_jobs"]) == (1, 0)
    assert not half.has_pending_push_work()
    assert not half.host.pool.live_ids()
    half.check()


@pytest.mark.parametrize(("prefetch", "is_called_off"), [("timeout", True), ("best_effort", False)])
def test_a_request_that_starts_without_them_wants_its_blocks_no_more(prefetch: str, is_called_off: bool) -> None:
    half, _, ticks = make_half(prefetch=prefetch, timeout_ms=100)
    request = Asked("a", PROMPT)
    (job,) = fetch(half, request)
    ticks.now += 0.2
    assert admit(half, request) == 0
    plan = run(half, request)
    assert plan.cancelled_storage == ((job.job_id,) if is_called_off else ())


@pytest.mark.parametrize("found", [(7, 3), (3, 7)])
def test_ranks_agree_on_the_shortest_prefix(found: tuple[int, int]) -> None:
    """Whichever of them says so first."""
    half, _, _ = make_half(world_size=2)
    request = Asked("a", PROMPT)
    job = arrive(half, request)
    report(half, [job], found=found[0], rank=0)
    assert step(half) == ()
    report(half, [job], found=found[1], rank=1)
    (job,) = step(half)
    assert job.num_blocks == 3
    report(half, [job], rank=0)
    assert matched(half, request) is None
    report(half, failed=[job], rank=1)
    assert matched(half, request) == 0, "a fault on one rank is a fault of the job"
    assert half.get_kv_connector_stats()["failed_fetch_jobs"] == 1
    half.check()


@pytest.mark.parametrize("first", [0, 1])
def test_a_block_that_one_rank_could_not_fetch_is_lost_and_no_other(first: int) -> None:
    """Whichever rank says so, first or last: what is in front of it is a hit, and what is behind it is on the host once
    that block is computed again."""
    half, _, _ = make_half(world_size=2)
    request = Asked("a", PROMPT)
    job = arrive(half, request)
    for rank in range(2):
        report(half, [job], found=10, rank=rank)
    (job,) = step(half)
    report(half, [job], rank=first, missing=(6,))
    report(half, [job], rank=1 - first)
    assert matched(half, request) == 6 * 4
    assert half.get_kv_connector_stats()["fetched_blocks"] == 9
    assert half.get_kv_connector_stats()["failed_fetch_jobs"] == 0
    half.check()


def test_a_long_prefix_comes_in_parts_and_a_part_that_fails_ends_the_hit() -> None:
    half, _, _ = make_half(num_host_blocks=300)
    request = Asked("a", list(range(4 * 200 + 1)))
    jobs = fetch(half, request, found=200)
    assert [job.num_blocks for job in jobs] == [64, 64, 64, 8]
    report(half, [jobs[0], jobs[2], jobs[3]], failed=[jobs[1]])
    assert matched(half, request) == 4 * 64
    half.check()


def test_a_host_that_is_too_small_takes_the_beginning() -> None:
    half, _, _ = make_half(num_host_blocks=6)
    request = Asked("a", PROMPT)
    (job,) = fetch(half, request)
    assert job.num_blocks == 5, "a quarter of the host is left to saves, should storage never answer"
    report(half, [job])
    assert matched(half, request) == 20
    assert half.get_kv_connector_stats()["dropped_fetches_blocks"] == 5


def test_an_abort_ends_the_wish_and_what_is_on_its_way_stays() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    job = arrive(half, first)
    half.request_finished(first)
    report(half, [job], found=10)
    assert step(half) == (), "nobody wants it any more"
    (job,) = fetch(half, second)
    half.request_finished(second)
    report(half, [job])
    assert matched(half, Asked("third", PROMPT)) == 40
    half.check()


def prompt(number: int) -> list[int]:
    """Ten blocks of its own, and a token to compute."""
    return list(range(1000 * number, 1000 * number + 41))


def test_hits_are_counted_by_where_they_came_from() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    report(half, fetch(half, first))
    save(half, first)
    half.on_new_request(second)
    save(half, second)
    stats = half.get_kv_connector_stats()
    assert (stats["host_hit_tokens"], stats["storage_hit_tokens"]) == (80, 40)


def test_what_storage_counts_on_its_ranks_is_in_the_statistics() -> None:
    half, _, _ = make_half(world_size=2)
    for rank, num_read in ((0, 5.0), (1, 7.0)):
        counters = (("read_blocks", num_read), ("stored_bytes", 100.0 + rank), ("of_no_interest", 1.0))
        half.update_connector_output([StepReport(1, rank, num_host_blocks=100, storage_counters=counters)])
    stats = half.get_kv_connector_stats()
    assert (stats["storage_read_blocks"], stats["storage_stored_bytes"]) == (12, 101)
    assert "storage_of_no_interest" not in stats


def test_a_prefix_that_is_sooner_computed_is_not_fetched() -> None:
    half, _, ticks = make_half(load_choice="auto")
    first = Asked("first", PROMPT)
    jobs = fetch(half, first)
    ticks.now += 10.0  # a block a second
    report(half, jobs)
    half._loads.estimate._prefill.observe(1000, 1.0)
    skipped = [fetch(half, Asked(f"r{number}", prompt(number + 1))) for number in range(8)]
    assert skipped == [()] * 8
    assert half.get_kv_connector_stats()["recomputed_storage_tokens"] == 8 * 40
    assert fetch(half, Asked("last", prompt(9))), "after so many one is fetched: storage may have become faster"


def test_the_name_of_a_block_is_the_same_for_writing_and_reading_and_for_every_engine() -> None:
    writer, _, _ = make_half()
    compute(writer, Asked("a", PROMPT))
    (backup,) = step(writer)
    reader, _, _ = make_half()
    assert arrive(reader, Asked("b", PROMPT)).split_keys() == backup.split_keys()


def test_after_a_reset_nothing_of_before_is_found() -> None:
    half, _, _ = make_half()
    before = arrive(half, Asked("a", PROMPT)).split_keys()
    report(half, [], found=None)
    assert half.reset_cache()
    half.request_finished(Asked("a", PROMPT))
    assert not set(arrive(half, Asked("b", PROMPT)).split_keys()) & set(before)


def test_a_reset_while_blocks_are_fetched_leaves_nothing_behind() -> None:
    half, _, _ = make_half()
    request = Asked("a", PROMPT)
    (job,) = fetch(half, request)
    assert half.reset_cache()
    report(half, [job])
    assert half.host.num_copies == 0
    assert not half.host.pool.live_ids()
    half.check()


def test_a_preempted_request_may_look_again() -> None:
    half, _, _ = make_half()
    request = Asked("a", PROMPT)
    report(half, [arrive(half, request)], found=0)
    assert admit(half, request) == 0
    plan = run(half, request)
    assert plan.storage == ()
    half.update_connector_output([StepReport(plan.step, 0, (), tuple(job.job_id for job in plan.saves))])
    assert matched(half, request) is None, "it comes again, and storage may have it by now"


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ({"capacity": "1GiB"}, r"storage.path='': give the folder"),
        ({"path": "x"}, r"storage.capacity=0: give how much"),
        ({"path": "x", "capacity": "1GiB", "kind": "floppy"}, r"storage.kind='floppy' is unknown"),
        ({"path": "x", "capcity": "1GiB"}, r"unknown setting 'storage.capcity' \(did you mean 'capacity'\?\)"),
        ({"path": "x", "capacity": "1GiB", "prefetch": "now"}, r"storage.prefetch='now' is unknown"),
        ("/data", r"storage='/data' is not an object"),
    ],
)
def test_settings_that_cannot_be_are_named(storage: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.from_mapping({"host_memory": "1GiB", "storage": storage})
    with pytest.raises(ConfigError, match="host_memory is missing or 0: storage needs it"):
        Config.from_mapping({"storage": {"path": "x", "capacity": "8MiB"}})


def test_one_answer_that_is_lost_hangs_neither_its_request_nor_those_with_its_prefix() -> None:
    """Storage answers everybody else, so that it does not seem to hang."""
    half, _, ticks = make_half()
    unlucky = Asked("unlucky", PROMPT)
    fetch(half, unlucky)
    for number in range(60):
        ticks.now += 1.0
        other = Asked(f"other-{number}", [5000 + 50 * number + i for i in range(41)])
        report(half, [arrive(half, other)], found=0)
        half.request_finished(other)
    assert matched(half, unlucky) == 0
    assert matched(half, Asked("newcomer", PROMPT)) is None, "it is looked up anew"
    (job,) = step(half)
    assert job.action is StorageAction.LOOK_UP
    half.check()


def test_a_fetch_that_was_called_off_is_asked_for_again_by_who_rides_on_it() -> None:
    half, _, ticks = make_half(prefetch="timeout", timeout_ms=200)
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    jobs = fetch(half, first)
    ticks.now += 1
    admit(half, first)
    assert run(half, first).cancelled_storage == tuple(job.job_id for job in jobs)
    half.on_new_request(second)
    report(half, failed=jobs)
    (job,) = step(half)
    assert (job.action, len(job.split_keys())) == (StorageAction.LOOK_UP, 10)


def test_a_fetch_that_is_wanted_again_before_ranks_were_told_is_not_called_off() -> None:
    half, _, _ = make_half()
    first, second = Asked("first", PROMPT), Asked("second", PROMPT)
    jobs = fetch(half, first)
    half.request_finished(first)
    half.on_new_request(second)
    assert run(half).cancelled_storage == ()
    report(half, jobs)
    assert matched(half, second) == 40


def test_routers_hear_of_fetched_blocks() -> None:
    half, _, _ = make_half()
    request = Asked("a", PROMPT)
    report(half, fetch(half, request))
    told = [BlockStored(request.block_hashes, tier) for tier in (Tier.STORAGE, Tier.HOST)]
    assert half.take_events() == told, "they were found in the one and are on the other"


@pytest.mark.parametrize("backup", ["on_save", "at_finish"])
def test_storage_that_never_answers_keeps_a_share_of_the_host_and_no_more(backup: str) -> None:
    half, _, ticks = make_half(backup=backup, prefetch="best_effort")
    for number in range(12):
        request = Asked(f"r{number}", [1000 * number + i for i in range(41)])
        admit(half, request)
        plan = run(half, request)
        half.update_connector_output(
            [StepReport(plan.step, 0, tuple(job.job_id for job in plan.saves), num_host_blocks=100)]
        )
        half.request_finished(request)
        run(half)
        ticks.now += 60.0
    assert half.host.num_available >= 75
    half.reset_cache()
    assert half.host.num_available >= 75
    half.check()


def test_fetches_leave_a_share_of_the_host_to_others() -> None:
    half, _, _ = make_half(prefetch="best_effort")
    for number in range(12):
        fetch(half, Asked(f"r{number}", prompt(number)))
    assert half.host.num_available == 25
    half.check()


def test_a_reset_lets_go_of_what_waits_to_be_written() -> None:
    half, _, _ = make_half(num_host_blocks=4000, backup="on_save", prefetch="best_effort")
    request = Asked("a", list(range(4 * 900 + 1)))
    half._pool.bind(_many())
    admit(half, request)
    plan = run(half, request)
    half.update_connector_output([StepReport(plan.step, 0, tuple(j.job_id for j in plan.saves), num_host_blocks=4000)])
    jobs = step(half)
    assert [job.num_blocks for job in jobs] == [256, 256]
    half.reset_cache()
    assert half.host.num_available == 4000 - 512
    report(half, jobs)
    assert half.host.num_available == 4000


def _many() -> ForeignBlocks:
    blocks = ForeignBlocks()
    blocks.pool = BlockPool(1000)
    blocks.pool.allocate(1000)
    return blocks
