"""The scheduler half alone, as a foreign engine has it: a plain pool of device blocks, reports written by hand."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.errors import InvalidBlockError, KVConnectorError
from kv_connector.events import BlockRemoved, BlockStored
from kv_connector.index import BlockGroup, BlockHasher, BlockPool, BlockState, CacheIdentity, SavePolicy, root_hash
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import BlockHash, CopyJob, StepPlan, StepReport, Tier

ROOT = root_hash(CacheIdentity("m", "bf16", "NHD", 4))


@dataclass
class Asked:
    """A request with a fixed prompt."""

    request_id: str
    tokens: list[int]
    hasher: BlockHasher = field(default_factory=lambda: BlockHasher(4, ROOT))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        self.hasher.update(self.tokens)
        return self.hasher.hashes


class ForeignBlocks:
    """Device blocks of an engine that keeps no tree of ours: pins are counted, the reuse order is set by the test."""

    def __init__(self) -> None:
        self.pool = BlockPool(100)
        self.pool.allocate(100)
        self.order: list[tuple[int, BlockHash]] = []
        self.looked_ahead = 0
        self.forgotten: set[int] = set()

    def touch(self, block_ids: Sequence[int]) -> None:
        self.pool.acquire(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        self.pool.release(block_ids)

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        self.looked_ahead = limit
        return self.order[:limit]

    num_available = 100

    def forget(self, block_ids: Collection[int]) -> None:
        self.forgotten |= set(block_ids)

    def pins(self) -> dict[int, int]:
        return {b: self.pool.refs(b) - 1 for b in self.pool.live_ids() if self.pool.refs(b) > 1}


class Clock:
    """One second later at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def make_half(
    num_host_blocks: int = 10,
    world_size: int = 1,
    groups: Sequence[BlockGroup] = (BlockGroup(),),
    **settings: object,
) -> tuple[SchedulerHalf, ForeignBlocks]:
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through", **settings})
    half = SchedulerHalf(config, 4, world_size, clock=Clock(), groups=groups)
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_connector_output([StepReport(0, rank, num_host_blocks=num_host_blocks) for rank in range(world_size)])
    return half, blocks


def admit(half: SchedulerHalf, request: Asked, first_block: int = 0, num_local: int = 0) -> int:
    """Admission as an engine does it; returns the tokens that will be loaded."""
    matched, _ = half.get_num_new_matched_tokens(request, num_local)
    num_blocks = -(-request.num_tokens // 4)
    half.update_state_after_alloc(request, [list(range(first_block, first_block + num_blocks))], num_local, matched)
    return matched


def run(half: SchedulerHalf, *requests: Asked, computed: int = 0) -> StepPlan:
    """A step that computes all the rest of these requests."""
    items = [ScheduledRequest(r.request_id, computed, r.num_tokens - computed) for r in requests]
    return half.build_connector_meta(SchedulerOutput(items))


def report(
    half: SchedulerHalf,
    plan: StepPlan,
    ok: bool = True,
    num_host_blocks: int | None = None,
    rank: int = 0,
    lost_blocks: tuple[int, ...] = (),
) -> None:
    num_host_blocks = half.host.pool.capacity if num_host_blocks is None else num_host_blocks
    jobs = tuple(job.job_id for job in (*plan.loads, *plan.saves))
    done, failed = (jobs, ()) if ok else ((), jobs)
    told = StepReport(plan.step, rank, done, failed, num_host_blocks=num_host_blocks, lost_blocks=lost_blocks)
    half.update_connector_output([told])


def save(half: SchedulerHalf, request: Asked, first_block: int = 0) -> None:
    """A whole life of a request, its blocks saved."""
    admit(half, request, first_block)
    report(half, run(half, request))
    half.request_finished(request)


@pytest.mark.parametrize(("num_scheduled", "num_untold", "expected"), [(3, 1, True), (4, 1, False), (0, 5, False)])
def test_a_step_that_computes_much_is_not_light(num_scheduled: int, num_untold: int, expected: bool) -> None:
    """Whoever computes it. It loads 64 tokens, and a sixteenth of them is little."""
    half, _ = make_half(num_host_blocks=16)
    save(half, Asked("first", list(range(64))))
    again = Asked("again", list(range(80)))
    assert admit(half, again) == 64
    items = [ScheduledRequest("again", 64, num_scheduled)]
    assert half.build_connector_meta(SchedulerOutput(items, num_untold_tokens=num_untold)).is_light is expected


def test_a_conversation_comes_back_from_the_host() -> None:
    half, blocks = make_half()
    first = Asked("first", list(range(10)))
    assert admit(half, first) == 0
    plan = run(half, first)
    (job,) = plan.saves
    assert job.device_ids.tolist() == [0, 1], "two full blocks; the third is not full"
    assert blocks.pins() == {0: 1, 1: 1}
    assert half.get_num_new_matched_tokens(Asked("x", list(range(12))), 0) == (0, False), "not there yet"
    report(half, plan)
    assert blocks.pins() == {}
    half.request_finished(first)

    again = Asked("again", list(range(12)))
    assert admit(half, again, first_block=50) == 8
    plan = run(half, again, computed=8)
    assert [job.device_ids.tolist() for job in plan.loads] == [[50, 51]]
    assert [job.device_ids.tolist() for job in plan.saves] == [[52]], "only what the host does not have"
    assert blocks.pins() == {50: 1, 51: 1, 52: 1}
    report(half, plan)
    assert blocks.pins() == {}
    assert half.metrics.host_hit_tokens == 8
    half.check()


def test_at_least_one_token_is_left_to_compute() -> None:
    half, _ = make_half()
    save(half, Asked("a", list(range(8))))
    assert half.get_num_new_matched_tokens(Asked("same", list(range(8))), 0) == (4, False)
    assert half.get_num_new_matched_tokens(Asked("more", list(range(9))), 0) == (8, False)
    assert half.get_num_new_matched_tokens(Asked("local", list(range(9))), 4) == (4, False)
    assert half.get_num_new_matched_tokens(Asked("odd", list(range(9))), 3) == (0, False)


def test_lookups_change_nothing() -> None:
    half, blocks = make_half()
    save(half, Asked("a", list(range(8))))

    def visible() -> tuple[object, ...]:
        return half.get_kv_connector_stats(), half.host.next_reused(99), list(half.tree.hits), list(half.tree.used)

    before = visible()
    for _ in range(3):
        half.get_num_new_matched_tokens(Asked("b", list(range(9))), 0)
    assert visible() == before
    assert blocks.pins() == {}


def test_a_block_is_saved_when_every_rank_has_it() -> None:
    half, blocks = make_half(world_size=2)
    request, again = Asked("a", list(range(4))), Asked("b", list(range(5)))
    admit(half, request)
    plan = run(half, request)
    report(half, plan, rank=0)
    assert half.get_num_new_matched_tokens(again, 0) == (0, False)
    assert blocks.pins() == {0: 1} and half.has_pending_push_work()
    report(half, plan, rank=1)
    assert half.get_num_new_matched_tokens(again, 0) == (4, False)
    assert blocks.pins() == {} and not half.has_pending_push_work()


def test_a_fault_on_one_rank_is_a_fault_of_the_job() -> None:
    half, blocks = make_half(world_size=2)
    request = Asked("a", list(range(4)))
    admit(half, request)
    plan = run(half, request)
    report(half, plan, ok=False, rank=0)
    report(half, plan, rank=1)
    assert half.get_num_new_matched_tokens(Asked("b", list(range(5))), 0) == (0, False)
    assert blocks.pins() == {}
    assert half.host.num_copies == 0
    half.check()


def test_the_smallest_rank_decides_how_much_host_memory_there_is() -> None:
    half, _ = make_half(world_size=2, num_host_blocks=0)
    half.update_connector_output([StepReport(1, 0, num_host_blocks=8), StepReport(1, 1, num_host_blocks=5)])
    assert half.host.pool.capacity == 5
    half.resize_host(3)
    assert half.host.pool.capacity == 3
    half.resize_host(None)
    assert half.host.pool.capacity == 5


def test_what_an_operator_asks_wrongly_changes_nothing() -> None:
    """A size that is none is not tried again with every report."""
    half, _ = make_half()
    with pytest.raises(InvalidBlockError, match=r"-1 blocks is impossible"):
        half.resize_host(-1)
    half.update_connector_output([StepReport(1, 0, num_host_blocks=7)])
    assert half.host.pool.capacity == 7


def test_a_prefix_is_unpinned_as_it_was_pinned_and_no_other_way() -> None:
    """Neither a part of a pinned prefix nor one that goes on behind it: no pin goes, and none is left behind."""
    half, _ = make_half()
    hashes = Asked("a", list(range(12))).block_hashes
    for _ in range(2):
        half.pin_prefix(hashes[:2], are_given=False)
    for others in (hashes, hashes[:1], hashes[1:2]):
        with pytest.raises(KVConnectorError, match=rf"this prefix of {len(others)} blocks is not pinned"):
            half.unpin_prefix(others)
    assert [half.tree.pins[node] for node in half.tree.match(hashes)] == [2, 2]
    for _ in range(2):
        half.unpin_prefix(hashes[:2])
    assert not any(half.tree.pins)
    with pytest.raises(KVConnectorError, match="this prefix of 2 blocks is not pinned: give all the hashes of one pin"):
        half.unpin_prefix(hashes[:2])
    half.check()


def test_selective_saves_at_the_threshold_and_counts_preempted_requests_once() -> None:
    half, _ = make_half(write_policy="write_through_selective", write_through_threshold=2)
    saves = []
    for turn in range(3):
        request = Asked(f"turn-{turn}", list(range(8)))
        admit(half, request)
        half.build_connector_meta(SchedulerOutput((), {request.request_id}))
        admit(half, request)
        plan = run(half, request)
        saves.append(sum(job.num_blocks for job in plan.saves))
        report(half, plan)
        half.request_finished(request)
    assert saves == [0, 0, 2], "first use computes, the second and third are the two hits"


def test_write_back_saves_what_is_next_in_line_and_nothing_else() -> None:
    """It looks two blocks ahead at least, and twice as far as the largest request needed."""
    half, blocks = make_half(write_policy="write_back", write_back_lookahead=2)
    request = Asked("a", list(range(12)))
    half.update_state_after_alloc(request, [[0]], 0, 0)
    steps = [ScheduledRequest("a", 4 * index, 4, [[index]] if index else ()) for index in range(3)]
    assert all(half.build_connector_meta(SchedulerOutput([step])).is_empty for step in steps)
    half.request_finished(request)
    assert half.has_pending_push_work(), "an idle engine is asked for a step"
    blocks.order = [(2, request.block_hashes[2]), (1, request.block_hashes[1]), (0, request.block_hashes[0])]
    plan = run(half)
    assert [job.device_ids.tolist() for job in plan.saves] == [[2, 1, 0]]
    assert blocks.pins() == {0: 1, 1: 1, 2: 1}
    assert blocks.looked_ahead == 6
    assert run(half).is_empty, "on its way already"
    report(half, plan)
    assert not half.has_pending_push_work()
    assert half.metrics.saves_on_reuse_blocks == 3


def test_of_two_device_blocks_that_hold_the_same_one_is_saved_before_reuse() -> None:
    """Two requests have computed it in one step."""
    half, blocks = make_half(write_policy="write_back")
    twins = [Asked(name, list(range(5))) for name in "ab"]
    for number, request in enumerate(twins):
        admit(half, request, 10 * number)
    run(half, *twins)
    blocks.order = [(10 * number, twins[0].block_hashes[0]) for number in range(2)]
    plan = run(half)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0]]
    report(half, plan)
    half.check()


@pytest.mark.parametrize("policy", ["adaptive", "write_through", "write_through_selective"])
def test_an_engine_that_has_nothing_to_save_before_reuse_rests_when_its_requests_have_ended(policy: str) -> None:
    half, _ = make_half(write_policy=policy)
    save(half, Asked("a", list(range(12))))
    assert not half.has_pending_push_work()


@pytest.mark.parametrize(("num_computed", "num_untold", "expected"), [(4, 0, True), (5, 0, False), (4, 1, False)])
def test_a_step_that_computes_little_beside_what_it_loads_is_light(
    num_computed: int, num_untold: int, expected: bool
) -> None:
    """Its layers wait for the link. What others compute counts, too, of whom the engine does not tell."""
    half, _ = make_half(num_host_blocks=40)
    cached = list(range(64))
    save(half, Asked("first", [*cached, 0]))
    request = Asked("again", [*cached, *range(100, 100 + num_computed)])
    assert admit(half, request, 50) == 64
    items = [ScheduledRequest("again", 64, num_computed)]
    assert half.build_connector_meta(SchedulerOutput(items, num_untold_tokens=num_untold)).is_light is expected


def test_wanted_blocks_wait_for_host_memory_without_leaving_a_hole() -> None:
    """vLLM's connector moves its cursor over blocks that it had no room for (vllm #54415)."""
    half, _ = make_half(num_host_blocks=1)
    request = Asked("a", list(range(12)))
    admit(half, request)
    plan = run(half, request)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0]]
    report(half, plan, num_host_blocks=3)
    plan = half.build_connector_meta(SchedulerOutput([ScheduledRequest("a", 12, 0)]))
    assert [job.device_ids.tolist() for job in plan.saves] == [[1, 2]]


def test_pinned_prefixes_are_saved_under_any_policy_and_kept() -> None:
    half, _ = make_half(num_host_blocks=3, write_policy="write_back")
    system = Asked("system", list(range(8)))
    half.pin_prefix(system.block_hashes, are_given=False)
    save(half, system)
    half._saves._policy = SavePolicy.from_config(Config(write_policy="write_through"))
    for user in range(5):
        save(half, Asked(f"user-{user}", [user] * 8))
    assert half.get_num_new_matched_tokens(Asked("x", list(range(9))), 0) == (8, False)
    half.unpin_prefix(system.block_hashes)
    for user in range(5):
        save(half, Asked(f"other-{user}", [user + 10] * 12))
    assert half.get_num_new_matched_tokens(Asked("x", list(range(9))), 0) == (0, False)
    half.check()


def test_events_tell_a_router_what_can_be_loaded() -> None:
    half, _ = make_half(num_host_blocks=2)
    first, second = Asked("a", list(range(8))), Asked("b", [9] * 4)
    save(half, first)
    assert list(half.take_events()) == [BlockStored(first.block_hashes, Tier.HOST)]
    assert not half._saves.jobs._names_of, "of a save that has ended nothing is kept"
    save(half, second)
    assert list(half.take_events()) == [
        BlockRemoved([first.block_hashes[1]], Tier.HOST),
        BlockStored(second.block_hashes, Tier.HOST),
    ]
    half.reset_cache()
    (removed,) = half.take_events()
    assert isinstance(removed, BlockRemoved) and removed.tier is Tier.HOST
    assert set(removed.block_hashes) == {first.block_hashes[0], *second.block_hashes}, "and nothing of other tiers"


def test_a_router_is_told_of_all_that_a_step_saves_whoever_wanted_it_saved() -> None:
    """Under write_back: what is pinned, as it is computed, and in the same step what is next in line for reuse."""
    half, blocks = make_half(write_policy="write_back")
    old, pinned = Asked("old", [9] * 8), Asked("pinned", list(range(8)))
    half.pin_prefix(pinned.block_hashes, are_given=False)
    save(half, old)
    blocks.order = [*enumerate(old.block_hashes)]
    save(half, pinned, first_block=2)
    (stored,) = half.take_events()
    assert isinstance(stored, BlockStored) and {*stored.block_hashes} == {*old.block_hashes, *pinned.block_hashes}
    assert not half._saves.jobs._names, "of a step that was planned nothing is kept"


def test_a_plan_is_small_plain_and_the_scheduler_keeps_no_reference_into_it() -> None:
    half, _ = make_half(num_host_blocks=2000)
    blocks = ForeignBlocks()
    blocks.pool = BlockPool(4000)
    blocks.pool.allocate(4000)
    half.bind_block_pool(blocks)
    request = Asked("long", list(range(8000)))
    admit(half, request)
    plan = run(half, request)
    data = pickle.dumps(plan)
    assert sum(job.num_blocks for job in plan.saves) == 2000
    assert len(data) < 2000 * 16 + 1000
    copy = pickle.loads(data)
    assert copy.saves[0].host_ids.tolist() == plan.saves[0].host_ids.tolist()
    plan.saves[0].device_ids[:] = 0
    assert half._requests["long"].tables[0].block_ids == list(range(2000))


def test_a_missing_pool_is_named() -> None:
    half = SchedulerHalf(Config(write_policy="write_through"), 4)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=4)])
    half.update_state_after_alloc(Asked("a", [1] * 5), [[0, 1]], 0, 0)
    with pytest.raises(KVConnectorError, match="bind_block_pool"):
        run(half, Asked("a", [1] * 5))


def test_states_can_be_seen_from_outside() -> None:
    half, _ = make_half()
    request = Asked("a", list(range(4)))
    admit(half, request)
    plan = run(half, request)
    (node,) = half.tree.match(request.block_hashes)
    assert half.host.node_state(node) is BlockState.SWAPPING_TO_HOST
    report(half, plan)
    assert half.host.node_state(node) is BlockState.RESIDENT
    half.tree.pin([node])
    half.host.acquire(half.host.blocks_of([node]))
    block_id = half.host.blocks_of([node])[0]
    half.reset_cache()
    assert half.host.state(block_id) is BlockState.DELETING
    half.host.release([block_id])
    assert half.host.state(block_id) is BlockState.ABSENT


def test_a_request_preempted_between_steps_and_admitted_again_keeps_its_new_load() -> None:
    """vLLM names requests that a cache reset preempted in the step that has admitted them anew."""
    half, _ = make_half(write_policy="write_through")
    request = Asked("a", list(range(9)))
    save(half, request)
    again = Asked("b", list(range(9)))
    admit(half, again)
    report(half, run(half, again, computed=8))
    assert admit(half, again, first_block=4) == 8, "reset: its blocks are gone, and it comes back before the next step"
    plan = half.build_connector_meta(SchedulerOutput([ScheduledRequest("b", 8, 1)], {"b"}))
    assert plan.loads[0].device_ids.tolist() == [4, 5]
    report(half, plan)
    plan = half.build_connector_meta(SchedulerOutput((), {"b"}))
    assert plan.is_empty
    half.check()


def admit_to_load(half: SchedulerHalf, request: Asked, block_ids: list[int]) -> CopyJob:
    """Admission with a load in the background; returns its job."""
    matched, is_async = half.get_num_new_matched_tokens(request, 0)
    assert is_async and matched
    half.update_state_after_alloc(request, [block_ids], 0, matched)
    (job,) = run(half).background_loads
    return job


def test_blocks_that_a_step_under_way_writes_are_filled_last() -> None:
    """An engine that plans ahead frees a block while the device still writes the token that nobody wants any more."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("x", list(range(9))), first_block=50)
    ended = Asked("ended", list(range(100, 107)))
    admit(half, ended, first_block=10)
    first = run(half, ended)
    run(half, ended, computed=6)  # planned ahead: it writes to block 11
    report(half, first)
    half.request_finished(ended)
    job = admit_to_load(half, Asked("b", list(range(9))), [11, 20, 21])
    assert (job.device_ids.tolist(), job.num_guarded) == ([20, 11], 1)
    (other,) = [host for host in job.host_ids.tolist() if host != job.host_ids[0]]
    assert half.host.hashes_of([other]) == [Asked("", list(range(9))).block_hashes[0]], "pairs stay pairs"


def test_blocks_of_a_preempted_request_are_guarded_and_those_of_reported_steps_are_not() -> None:
    """What the device computes for it in a step that was planned before counts, so its blocks are still read."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("x", list(range(9))), first_block=50)
    victim = Asked("victim", list(range(100, 109)))
    admit(half, victim, first_block=10)
    first = run(half, victim)
    ahead = run(half, victim, computed=8)
    report(half, first)
    half.build_connector_meta(SchedulerOutput([], ["victim"]))
    job = admit_to_load(half, Asked("b", list(range(9))), [20, 10, 21])
    assert (job.device_ids.tolist(), job.num_guarded) == ([20, 10], 1)
    half.request_finished(Asked("b", list(range(9))))
    other = Asked("other", list(range(200, 203)))
    admit(half, other, first_block=30)
    behind = run(half, other)
    ended = job.job_id, *(j.job_id for j in ahead.saves)
    half.update_connector_output([StepReport(behind.step, 0, ended, num_host_blocks=10)])
    assert admit_to_load(half, Asked("c", list(range(9))), [10, 11, 12]).num_guarded == 0
