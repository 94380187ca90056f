"""KV transfers of models with several block groups: what is offered and asked for of each, and under which names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput, StateBlock
from kv_connector.config import Config
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import NO_BLOCK, PeerAction, PeerJob, StepPlan, StepReport
from tests.scheduler.peers.test_outgoing import Prompted
from tests.scheduler.test_fence import Continued
from tests.scheduler.test_half import Asked, Clock, ForeignBlocks

WINDOW = (BlockGroup(), BlockGroup(window_blocks=2))
SIZES = (BlockGroup(), BlockGroup(hashes_per_block=3))
STATES = (BlockGroup(), BlockGroup(window_blocks=1, states_are_told=True))
Tables = Sequence[Sequence[int]]


def make(groups: Sequence[BlockGroup], role: str, drop_last_block: bool = False) -> tuple[SchedulerHalf, ForeignBlocks]:
    config = Config.from_mapping({"host_memory": 1 << 20, "peer": {"secret": "x" * 20, "role": role}})
    half = SchedulerHalf(config, 4, 1, clock=Clock(), groups=groups, drop_last_block=drop_last_block)
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_connector_output([StepReport(0, 0)])
    return half, blocks


def tables_of(groups: Sequence[BlockGroup], num_tokens: int) -> list[list[int]]:
    """A block for every place of each group, from 0, 20, 40 on."""
    sizes = [4 * group.hashes_per_block for group in groups]
    return [[20 * g + i for i in range(-(-num_tokens // size))] for g, size in enumerate(sizes)]


def compute(half: SchedulerHalf, first: int, count: int, *states: StateBlock) -> StepPlan:
    return half.build_connector_meta(SchedulerOutput([ScheduledRequest("r", first, count)], states=states))


def state(block_id: int, num_tokens: int) -> StateBlock:
    """The step leaves the state behind so many tokens there."""
    return StateBlock("r", 1, block_id, num_tokens)


def parts(plan: StepPlan) -> list[tuple[int, int, list[int], int]]:
    """(group, first block, device blocks, how many names come with it) of each job."""
    return [(job.group, job.first, job.device_ids.tolist(), len(job.names) // 32) for job in plan.peer]


def end(half: SchedulerHalf, plan: StepPlan, ok: bool = True) -> None:
    jobs = tuple(job.job_id for job in plan.peer)
    half.update_connector_output([StepReport(plan.step, 0, *((jobs, ()) if ok else ((), jobs)))])


def offered(groups: Sequence[BlockGroup], num_tokens: int) -> list[PeerJob]:
    """What an engine offers of a prompt that it computes in one step."""
    half, _ = make(groups, "producer")
    request = Prompted("r", list(range(num_tokens)))
    half.update_state_after_alloc(request, tables_of(groups, num_tokens), 0, 0)
    return list(compute(half, 0, num_tokens).peer)


def asked(groups: Sequence[BlockGroup], num_tokens: int, tables: Tables, num_local: int = 0) -> list[PeerJob]:
    """What another engine asks for of this prompt."""
    half, _ = make(groups, "consumer")
    request = Continued("r", list(range(num_tokens)))
    matched, is_async = half.get_num_new_matched_tokens(request, num_local)
    assert matched is not None and is_async == (matched > 0)
    half.update_state_after_alloc(request, tables, num_local, matched)
    return list(half.build_connector_meta(SchedulerOutput()).peer)


def test_of_a_window_its_end_is_offered_as_it_is_computed() -> None:
    """And pinned from then on: the engine gives it to others once later tokens have left it behind."""
    half, blocks = make(WINDOW, "producer")
    request = Prompted("r", list(range(30)))
    half.update_state_after_alloc(request, tables_of(WINDOW, 30), 0, 0)
    plans = [compute(half, 0, 12), compute(half, 12, 12), compute(half, 24, 6)]
    assert parts(plans[0]) == [(0, 0, [0, 1, 2], 7), (1, 5, [], 2)], "what will come of the window is said at once"
    assert parts(plans[1]) == [(0, 3, [3, 4, 5], 0), (1, 5, [25], 0)]
    assert parts(plans[2]) == [(0, 6, [6], 0), (1, 6, [26], 0)]
    assert blocks.pins() == dict.fromkeys([0, 1, 2, 3, 4, 5, 6, 25, 26], 1)
    _, params = half.request_finished(request)
    assert params is not None and params["remote_num_tokens"] == 28
    for plan in plans:
        end(half, plan)
    assert blocks.pins() == {}


def test_a_transfer_ends_where_blocks_of_every_size_do() -> None:
    """Of 31 tokens a hit has 24: six blocks of four tokens, and two of twelve."""
    jobs = offered(SIZES, 31)
    assert [(job.group, job.device_ids.tolist()) for job in jobs] == [(0, [0, 1, 2, 3, 4, 5]), (1, [20, 21])]


@pytest.mark.parametrize("num_tokens", range(17, 34))
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_transfer_ends_with_the_last_state_that_engines_keep(has_drafts: bool, size: int, num_tokens: int) -> None:
    """As vLLM's `get_mamba_prefill_checkpoint_position`: behind the last whole block, or with draft layers in front of
    it; else all of the prompt is withdrawn. Both sides count alike."""
    groups = (BlockGroup(), BlockGroup(1, size, states_are_told=True))
    whole = (num_tokens if has_drafts else num_tokens - 1) // (4 * size) * 4 * size
    kept = whole - 4 * size * has_drafts
    half, _ = make(groups, "producer", has_drafts)
    request = Prompted("r", list(range(num_tokens)))
    half.update_state_after_alloc(request, tables_of(groups, num_tokens), 0, 0)
    compute(half, 0, kept, state(30, kept))
    compute(half, kept, num_tokens - kept)
    _, params = half.request_finished(request)
    assert params is not None and params["remote_num_tokens"] == kept
    consumer, _ = make(groups, "consumer", has_drafts)
    assert consumer.get_num_new_matched_tokens(Continued("r", list(range(num_tokens))), 0) == (kept, True)


def test_what_the_engine_does_not_hold_is_not_offered() -> None:
    """A consumer would wait for it in vain: nothing of the prompt is offered, and nobody is told of it."""
    half, blocks = make(WINDOW, "producer")
    request = Prompted("r", list(range(30)))
    tables = tables_of(WINDOW, 30)
    tables[1][5] = NO_BLOCK
    half.update_state_after_alloc(request, tables, 0, 0)
    first = compute(half, 0, 12)
    second = compute(half, 12, 12)
    assert (second.peer, second.withdrawn) == ((), ("r",))
    end(half, first)
    assert blocks.pins() == {}
    assert half.request_finished(request)[1] is None


@pytest.mark.parametrize("groups", [WINDOW, SIZES])
def test_both_sides_name_the_last_block_of_each_group_alike(groups: tuple[BlockGroup, ...]) -> None:
    """And no two groups have one name."""
    there = [(job.group, job.first + job.num_blocks, job.names[-32:]) for job in offered(groups, 31)]
    here = [(job.group, job.first + job.num_blocks, job.names) for job in asked(groups, 31, tables_of(groups, 31))]
    assert here == there
    assert len({name for *_, name in here}) == 2


def test_what_a_window_has_left_is_not_asked_for() -> None:
    """An engine may hold less of it than a window can need."""
    tables = tables_of(WINDOW, 30)
    tables[1][:6] = [NO_BLOCK] * 6
    jobs = asked(WINDOW, 30, tables)
    assert [(job.group, job.first, job.device_ids.tolist()) for job in jobs] == [(0, 0, list(range(7))), (1, 6, [26])]


def test_what_lies_in_front_of_a_window_is_not_asked_for() -> None:
    tables = tables_of(WINDOW, 30)
    tables[1][:5] = [NO_BLOCK] * 5
    jobs = asked(WINDOW, 30, tables)
    assert [(job.group, job.first, job.device_ids.tolist()) for job in jobs] == [
        (0, 0, list(range(7))),
        (1, 5, [25, 26]),
    ]
    assert {job.admission for job in jobs} == {1} and {job.request_id for job in jobs} == {"r"}


@pytest.mark.parametrize(("num_local", "expected"), [(24, [(0, 6, [6]), (1, 6, [26])]), (8, None), (28, [])])
def test_what_the_device_has_is_not_asked_for(
    num_local: int, expected: list[tuple[int, int, list[int]]] | None
) -> None:
    jobs = asked(WINDOW, 30, tables_of(WINDOW, 30), num_local)
    found = [(job.group, job.first, job.device_ids.tolist()) for job in jobs if job.num_blocks]
    assert found == (expected if expected is not None else [(0, 2, [2, 3, 4, 5, 6]), (1, 5, [25, 26])])


def test_a_hit_that_ends_within_a_block_is_not_continued_from_elsewhere() -> None:
    """The block that it ends in is the engine's, and others may hold it."""
    jobs = asked(SIZES, 31, tables_of(SIZES, 31), num_local=8)
    assert [(job.group, job.num_blocks) for job in jobs] == [(0, 0), (1, 0)], "the producer may let go of both"


def test_a_request_without_room_to_begin_anew_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were its blocks not to come, it would need those in front of its window, too, and wait for them behind others."""
    monkeypatch.setattr(ForeignBlocks, "num_available", 17)
    jobs = asked(WINDOW, 30, tables_of(WINDOW, 30))
    assert [(job.group, job.num_blocks) for job in jobs] == [(0, 0), (1, 0)]


def test_blocks_of_every_group_are_called_off_where_the_request_has_lost_them() -> None:
    half, blocks = make(WINDOW, "consumer")
    request = Continued("r", list(range(30)))
    matched, _ = half.get_num_new_matched_tokens(request, 0)
    assert matched == 28
    half.update_state_after_alloc(request, tables_of(WINDOW, 30), 0, matched)
    plan = half.build_connector_meta(SchedulerOutput())
    lost = half.build_connector_meta(SchedulerOutput((), {"r"}))
    assert lost.cancelled_peer == tuple(job.job_id for job in plan.peer if job.action is PeerAction.RECEIVE)
    assert len(lost.cancelled_peer) == 2
    end(half, plan, ok=False)
    assert blocks.pins() == {}


def with_states(num_local: int = 0, table: Sequence[int] = (NO_BLOCK,) * 6 + (90,)) -> tuple[SchedulerHalf, Prompted]:
    """A prompt of 30 tokens, of which a KV transfer has 28; `table` is that of the recurrent group."""
    half, _ = make(STATES, "producer")
    request = Prompted("r", list(range(30)))
    half.update_state_after_alloc(request, [list(range(8)), list(table)], num_local, 0)
    return half, request


def test_the_state_at_the_end_is_offered_where_the_engine_says_that_it_is() -> None:
    """Not what a table has there, nor those of other ends, of which nobody asks for one."""
    half, request = with_states()
    plan = compute(half, 0, 24, state(91, 12), state(92, 24))
    assert parts(plan) == [(0, 0, [0, 1, 2, 3, 4, 5], 7), (1, 6, [], 1)]
    assert parts(compute(half, 24, 4, state(93, 28))) == [(0, 6, [6], 0), (1, 6, [93], 0)]
    assert compute(half, 28, 2, state(93, 28)).peer == (), "told once more"
    assert half.request_finished(request)[1] is not None


@pytest.mark.parametrize("told", [(), (state(92, 24),)])
def test_without_a_state_at_the_end_nothing_is_offered(told: tuple[StateBlock, ...]) -> None:
    """Least of all one of another end. What has been offered of the other groups is let go of."""
    half, request = with_states()
    compute(half, 0, 20)
    plan = compute(half, 20, 10, *told)
    assert (plan.peer, plan.withdrawn) == ((), ("r",))
    assert half.request_finished(request)[1] is None


def test_the_state_that_a_request_begins_with_is_offered_where_it_is_that_at_the_end() -> None:
    """All but the last tokens were cached: the engine computes no state there, and tells of none."""
    half, request = with_states(num_local=28)
    assert parts(compute(half, 28, 2)) == [(0, 0, list(range(7)), 7), (1, 6, [90], 1)]
    assert half.request_finished(request)[1] is not None


def test_a_state_that_was_loaded_is_offered_though_the_request_is_not_scheduled_yet() -> None:
    """The engine tells of it in the step behind the load, whether there is room for the request or not."""
    half, _ = with_states()
    plan = half.build_connector_meta(SchedulerOutput(states=[state(94, 28)]))
    assert parts(plan) == [(0, 0, list(range(7)), 7), (1, 6, [94], 1)]


def test_one_state_is_asked_for() -> None:
    """That at the end, whatever the device has of others."""
    table = [NO_BLOCK] * 6 + [26]
    jobs = asked(STATES, 30, [list(range(8)), table])
    assert [(job.group, job.first, job.device_ids.tolist()) for job in jobs] == [(0, 0, list(range(7))), (1, 6, [26])]
    jobs = asked(STATES, 30, [list(range(8)), [NO_BLOCK, 21, NO_BLOCK, NO_BLOCK, NO_BLOCK, NO_BLOCK, 26]], num_local=8)
    assert [(job.group, job.first, job.device_ids.tolist()) for job in jobs] == [(0, 2, [2, 3, 4, 5, 6]), (1, 6, [26])]


def test_a_host_that_has_only_a_state_in_front_of_the_end_loads_nothing() -> None:
    """Of a model of recurrent layers alone: the one that another engine brings is all that it needs."""
    groups = (BlockGroup(window_blocks=1, states_are_told=True),)
    config = Config.from_mapping(
        {"host_memory": 1 << 20, "write_policy": "write_through", "peer": {"secret": "x" * 20, "role": "consumer"}}
    )
    half = SchedulerHalf(config, 4, 1, clock=Clock(), groups=groups, fails_by_block=False)
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10)])
    half.update_state_after_alloc(Asked("w", list(range(9))), [[NO_BLOCK, 1, 2]], 0, 0)
    told = StateBlock("w", 0, 1, 8)
    plan = half.build_connector_meta(SchedulerOutput([ScheduledRequest("w", 0, 8)], states=[told]))
    saved = tuple(job.job_id for job in plan.saves)
    half.update_connector_output([StepReport(plan.step, 0, saved, num_host_blocks=10)])
    assert half.get_num_new_matched_tokens(Asked("other", list(range(9))), 0) == (8, True)
    request = Continued("r", list(range(30)))
    assert half.get_num_new_matched_tokens(request, 0) == (28, True)
    half.update_state_after_alloc(request, [[NO_BLOCK] * 6 + [26]], 0, 28)
    plan = half.build_connector_meta(SchedulerOutput())
    assert (parts(plan), plan.loads, plan.background_loads) == ([(0, 6, [26], 1)], (), ())
