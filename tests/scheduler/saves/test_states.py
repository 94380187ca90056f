"""Recurrent states: saved where the engine says that they are, found at the ends of blocks, loaded with the rest."""

from __future__ import annotations

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput, StateBlock
from kv_connector.config import Config
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import NO_BLOCK, StepPlan, StepReport
from tests.scheduler.test_half import Asked, ForeignBlocks, report

PROMPT = list(range(17))
GROUPS = (BlockGroup(), BlockGroup(window_blocks=1, hashes_per_block=2, states_are_told=True))
"""Blocks of 4 tokens, and states behind every 8."""
INSIDE = (BlockGroup(hashes_per_block=2), BlockGroup(1, 2, states_are_told=True))
STORAGE = {"path": "unused", "capacity": 8 << 20}


def make_hybrid(
    num_host_blocks: int = 64, groups: tuple[BlockGroup, ...] = GROUPS, ends_within: bool = False, **settings: object
) -> SchedulerHalf:
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through", **settings})
    half = SchedulerHalf(config, 4, groups=groups, fails_by_block=False, ends_within=ends_within)
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=num_host_blocks)])
    return half


def step(half: SchedulerHalf, request: Asked, computed: int, scheduled: int, *states: StateBlock) -> StepPlan:
    item = ScheduledRequest(request.request_id, computed, scheduled, ())
    return half.build_connector_meta(SchedulerOutput([item] if scheduled else [], (), states))


def admit(half: SchedulerHalf, request: Asked) -> None:
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4], [NO_BLOCK, 11, 12]], 0, 0)


def saved(plan: StepPlan) -> list[int]:
    """Device blocks that the plan saves."""
    return sorted(device_id for job in plan.saves for device_id in job.device_ids.tolist())


def test_a_state_is_saved_from_where_the_engine_says_and_loaded_to_the_end_of_the_hit() -> None:
    half, request = make_hybrid(), Asked("a", PROMPT)
    admit(half, request)
    plan = step(half, request, 0, 16, StateBlock("a", 1, 11, 16))
    assert saved(plan) == [0, 1, 2, 3, 11]
    report(half, plan)
    half.request_finished(request)
    again = Asked("again", PROMPT)
    assert half.get_num_new_matched_tokens(again, 0) == (16, True)
    half.update_state_after_alloc(again, [[20, 21, 22, 23], [NO_BLOCK, 31]], 0, 16)
    (load,) = half.build_connector_meta(SchedulerOutput()).background_loads
    assert load.device_ids.tolist() == [20, 21, 22, 23, 31]
    (save,) = plan.saves
    assert load.host_ids.tolist()[-1] == save.host_ids[save.device_ids.tolist().index(11)]
    half.check()


def test_a_prefix_without_its_state_is_no_hit() -> None:
    """The engine passed token 8 without a state there, so that only 16 of 17 tokens can be loaded, or none."""
    half, request = make_hybrid(), Asked("a", PROMPT)
    admit(half, request)
    report(half, step(half, request, 0, 16, StateBlock("a", 1, 11, 16)))
    half.request_finished(request)
    shorter = Asked("shorter", PROMPT[:16])
    assert half.get_num_new_matched_tokens(shorter, 0) == (0, False)
    other = Asked("other", [*PROMPT[:8], *range(100, 110)])
    assert half.get_num_new_matched_tokens(other, 0) == (0, False)
    assert half.get_num_new_matched_tokens(Asked("longer", [*PROMPT, 17, 18, 19]), 8) == (8, True)


def test_a_state_that_is_told_late_is_saved_without_a_step_of_its_request() -> None:
    half, request = make_hybrid(), Asked("a", PROMPT)
    admit(half, request)
    report(half, step(half, request, 0, 16))
    assert saved(step(half, request, 0, 0, StateBlock("a", 1, 11, 16))) == [11]


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_state_of_before_a_reset_is_not_saved(is_reset: bool) -> None:
    half, request = make_hybrid(), Asked("a", PROMPT)
    admit(half, request)
    step(half, request, 0, 16)
    if is_reset:
        half.reset_cache()
    assert saved(step(half, request, 16, 1, StateBlock("a", 1, 11, 16))) == ([] if is_reset else [11])


def test_where_there_is_room_for_some_the_state_is_saved_first() -> None:
    """The blocks that it lacks wait for room; the state cannot."""
    half, request = make_hybrid(num_host_blocks=3), Asked("a", PROMPT)
    admit(half, request)
    assert saved(step(half, request, 0, 16, StateBlock("a", 1, 11, 16))) == [0, 1, 11]


def test_a_state_is_saved_once() -> None:
    half = make_hybrid()
    for name, first in (("a", 0), ("b", 40)):
        request = Asked(name, PROMPT)
        tables = [[first + index for index in range(5)], [NO_BLOCK, first + 11, first + 12]]
        half.update_state_after_alloc(request, tables, 0, 0)
        plan = step(half, request, 0, 16, StateBlock(name, 1, first + 11, 16))
        assert len(saved(plan)) == (5 if name == "a" else 0)


def test_nothing_is_saved_behind_a_hole_in_a_group_with_other_blocks() -> None:
    """Of blocks of 8 tokens the second has gone from the host: those of 4 tokens in front of token 8 are reached."""
    groups = (BlockGroup(), BlockGroup(hashes_per_block=2))
    half = make_hybrid(num_host_blocks=12, groups=groups)
    tokens = list(range(33))
    request = Asked("a", tokens)
    half.update_state_after_alloc(request, [list(range(9)), [10, 11, 12, 13, 14]], 0, 0)
    report(half, step(half, request, 0, 16))
    key = half._grouped.keys(request.block_hashes, 1)[1]
    node = half.tree.get(key)
    assert node is not None
    half.host.discard(half.host.blocks_of([node]))
    assert saved(step(half, request, 16, 16)) == []
    assert half._requests["a"].reach.first_unreachable == 2, "the hashes of the block that has gone begin there"


def test_a_state_of_a_request_that_has_lost_its_blocks_is_not_saved() -> None:
    half, request = make_hybrid(), Asked("a", list(range(17)))
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4], [-1, 11, 12]], 0, 0)
    step(half, request, 0, 16)
    plan = half.build_connector_meta(SchedulerOutput((), {"a"}, (StateBlock("a", 1, 11, 16),)))
    assert plan.saves == ()


def test_a_block_of_which_a_part_is_unreachable_is_not_saved() -> None:
    """Of blocks of 4 tokens the fourth has gone: one of 8 tokens that ends with it could not be reached."""
    half = make_hybrid(num_host_blocks=20, groups=(BlockGroup(), BlockGroup(hashes_per_block=2)))
    request = Asked("a", list(range(33)))
    half.update_state_after_alloc(request, [list(range(9)), [10, 11, 12, 13, 14]], 0, 0)
    report(half, step(half, request, 0, 12))
    node = half.tree.get(request.block_hashes[2])
    assert node is not None
    half.host.discard(half.host.blocks_of([node]))
    assert [job.device_ids.tolist() for job in step(half, request, 12, 4).saves] == []


@pytest.mark.parametrize("num_tokens", [12, 24])
def test_what_has_no_name_is_not_saved_as_something_else(num_tokens: int) -> None:
    """A state within a block of 8 tokens, and one behind tokens that have no hash yet."""
    half, request = make_hybrid(), Asked("a", PROMPT)
    admit(half, request)
    assert saved(step(half, request, 0, 16, StateBlock("a", 1, 11, num_tokens))) == [0, 1, 2, 3]


def make_inside(**settings: object) -> tuple[SchedulerHalf, Asked]:
    """Blocks of 8 tokens, hashes of 4, and a prompt that ends behind 13: its last hash ends inside of blocks. What the
    engine tells there is saved."""
    half, request = make_hybrid(groups=INSIDE, ends_within=True, **settings), Asked("a", PROMPT[:13])
    half.update_state_after_alloc(request, [[0, 1], [10, 11]], 0, 0)
    report(half, step(half, request, 0, 12))
    plan = step(half, request, 12, 1, StateBlock("a", 1, 15, 12), StateBlock("a", 0, 1, 12))
    assert saved(plan) == [1, 15]
    report(half, plan)
    half.request_finished(request)
    return half, request


def test_a_hit_ends_inside_of_blocks_where_a_prompt_has_ended() -> None:
    """For the same prompt, and for one that goes on behind it, but not for one that turns off before."""
    half, _ = make_inside()
    assert half.get_num_new_matched_tokens(Asked("other", [*PROMPT[:11], 90, 91, 92]), 0) == (0, False)
    again = Asked("again", [*PROMPT, *range(50, 70)])
    assert half.get_num_new_matched_tokens(again, 0) == (12, True)
    half.update_state_after_alloc(again, [[20, 21], [NO_BLOCK, 31]], 0, 12)
    (load,) = half.build_connector_meta(SchedulerOutput()).background_loads
    assert load.device_ids.tolist() == [20, 21, 31]
    report(half, StepPlan(0, background_loads=(load,)))
    half.update_state_after_alloc(again, [[20, 21], [NO_BLOCK, 31]], 12, 0)
    assert saved(step(half, again, 12, 4)) == [21], "the block is whole now"
    half.check()


def test_what_the_device_has_up_to_inside_of_a_block_is_not_gone_on_with() -> None:
    half, _ = make_inside()
    longer = Asked("longer", [*PROMPT, 17])
    assert half.get_num_new_matched_tokens(longer, 4) == (0, False)
    assert half.get_num_new_matched_tokens(longer, 8) == (4, True)


def test_ends_inside_of_blocks_stay_on_the_host() -> None:
    """Storage looks for blocks."""
    half, request = make_inside(storage=STORAGE)
    assert half.host.num_copies == 3
    assert half.build_connector_meta(SchedulerOutput()).storage == ()
    leased = [block_id for block_id in half.host.pool.live_ids() if half.host.pool.refs(block_id)]
    assert half.host.hashes_of(leased) == half._grouped.keys(request.block_hashes, 0)[:], "being written"


def test_ends_inside_of_blocks_that_are_saved_before_their_reuse_stay_on_the_host() -> None:
    """Under `write_back` the engine's pool names what goes next: blocks are known by hash alone then."""
    half = make_hybrid(groups=INSIDE, ends_within=True, write_policy="write_back", storage=STORAGE)
    blocks, request = ForeignBlocks(), Asked("a", PROMPT[:13])
    half._pool._blocks = blocks
    half.update_state_after_alloc(request, [[0, 1], [10, 11]], 0, 0)
    report(half, step(half, request, 0, 12))
    report(half, step(half, request, 12, 1, StateBlock("a", 1, 15, 12), StateBlock("a", 0, 1, 12)))
    half.request_finished(request)
    ends = [half._grouped.end_key(request.block_hashes, group, 3) for group in range(2)]
    blocks.order = [(1, ends[0]), (15, ends[1])]
    plan = half.build_connector_meta(SchedulerOutput())
    assert saved(plan) == [1, 15]
    report(half, plan)
    assert half.build_connector_meta(SchedulerOutput()).storage == ()


def test_an_end_inside_of_a_block_is_not_written_in_place_of_what_its_host_block_held() -> None:
    """Three blocks that are to be written before they go are evicted in one step, for a block and two ends inside of
    the next one, which go first."""
    half = make_hybrid(3, INSIDE, ends_within=True, storage=STORAGE | {"backup": "on_eviction"})
    before, after = Asked("before", range(25)), Asked("after", range(100, 113))
    half.update_state_after_alloc(before, [[0, 1, 2, 3], [10, 11, 12, 13]], 0, 0)
    report(half, step(half, before, 0, 24))
    half.update_state_after_alloc(after, [[4, 5], [14, 15]], 0, 0)
    plan = step(half, after, 0, 13, StateBlock("after", 1, 15, 12), StateBlock("after", 0, 5, 12))
    assert saved(plan) == [4, 5, 15]
    report(half, plan)
    assert half.build_connector_meta(SchedulerOutput()).storage == ()
    assert half.get_kv_connector_stats()["dropped_backups_blocks"] == 3


def test_a_state_of_nobody_is_not_saved() -> None:
    assert saved(step(make_hybrid(), Asked("a", PROMPT), 0, 0, StateBlock("a", 1, 11, 16))) == []


def test_a_hit_waits_for_its_load_where_the_device_has_room_for_its_states() -> None:
    """160 tokens take 41 blocks of full attention, and no more than some states, whatever lies in their tables."""
    groups = (BlockGroup(), *(BlockGroup(window_blocks=1, states_are_told=True) for _ in range(3)))
    half, blocks = make_hybrid(groups=groups), ForeignBlocks()
    blocks.num_available = 80
    half._pool._blocks = blocks
    tokens, states = list(range(161)), [NO_BLOCK] * 39
    request = Asked("a", tokens)
    half.update_state_after_alloc(request, [list(range(41)), *([*states, 50 + g, 60 + g] for g in range(3))], 0, 0)
    report(half, step(half, request, 0, 160, *(StateBlock("a", g + 1, 50 + g, 160) for g in range(3))))
    half.request_finished(request)
    assert half.get_num_new_matched_tokens(Asked("again", tokens), 0) == (160, True)
