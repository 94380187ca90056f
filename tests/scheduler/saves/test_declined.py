"""The default policy: all that is computed is saved, until the host is full of what is worth more."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup, CacheIdentity
from kv_connector.index.groups import group_key
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepPlan, StepReport
from tests.scheduler.test_half import Asked, Clock, ForeignBlocks, admit, make_half, report, run

CHATS = [list(range(100 * chat, 100 * chat + 12)) for chat in range(1, 5)]


def ask(half: SchedulerHalf, name: str, tokens: list[int]) -> tuple[int, int]:
    """Blocks that a request loads, and blocks of it that are saved."""
    request = Asked(name, tokens)
    num_loaded = admit(half, request) // 4
    plan = run(half, request, computed=4 * num_loaded)
    report(half, plan)
    half.request_finished(request)
    report(half, run(half))
    return num_loaded, sum(job.num_blocks for job in plan.saves)


def teach(half: SchedulerHalf) -> None:
    """Chats that come back between prompts that do not."""
    for number in range(60):
        for chat, tokens in enumerate(CHATS):
            ask(half, f"chat {chat} {number}", tokens)
            ask(half, f"once {number} {chat}", [1000 + 10 * number + chat] * 12)


def full_of_chats(**settings: object) -> SchedulerHalf:
    """A half under the default policy that has learned, and whose host is full of chats."""
    half, _ = make_half(num_host_blocks=12, write_policy="adaptive", **settings)
    teach(half)
    for chat, tokens in enumerate(CHATS):
        ask(half, f"chat {chat}", tokens)
    return half


def test_the_second_request_with_a_prompt_is_hit_under_the_default_policy() -> None:
    half, _ = make_half(write_policy="adaptive")
    assert [ask(half, f"request {number}", CHATS[0]) for number in range(2)] == [(0, 3), (2, 0)]


def test_what_is_worth_less_than_all_that_is_there_is_not_saved_and_does_not_wait() -> None:
    half = full_of_chats()
    declined = half.metrics.declined_saves_blocks
    assert ask(half, "new", [7] * 12) == (0, 0)
    assert half.metrics.declined_saves_blocks == declined + 3
    assert half.metrics.dropped_saves_blocks == 0
    assert [ask(half, f"chat {chat} again", tokens) for chat, tokens in enumerate(CHATS)] == [(2, 0)] * 4
    half.check()


def test_what_an_operator_has_pinned_is_saved_whatever_has_to_go_for_it() -> None:
    half, _ = make_half(num_host_blocks=12, write_policy="adaptive")
    teach(half)
    pinned = Asked("pinned", [7] * 12)
    half.pin_prefix(pinned.block_hashes, are_given=False)
    assert ask(half, "pinned", [7] * 12) == (0, 3)
    half.check()


def test_write_through_saves_the_same_whatever_it_is_worth() -> None:
    half, _ = make_half(num_host_blocks=12, write_policy="write_through")
    teach(half)
    assert ask(half, "new", [7] * 12) == (0, 3)
    assert half.metrics.declined_saves_blocks == 0


def test_what_is_pinned_lends_its_place_to_nothing_behind_it() -> None:
    half = full_of_chats()
    assert ask(half, "begins as the next", [7] * 4 + [8] * 8) == (0, 0)
    half.pin_prefix(Asked("pinned", [7] * 4).block_hashes, are_given=False)
    assert ask(half, "begins with what is pinned", [7] * 12) == (0, 1)
    half.check()


def test_what_waited_for_bandwidth_and_is_declined_waits_no_more() -> None:
    half = full_of_chats(save_bandwidth=1)
    set_block_bytes(half, 1 << 40)
    request = Asked("new", [7] * 12)
    admit(half, request)
    assert run(half, request).saves == ()
    declined, dropped = half.metrics.declined_saves_blocks, half.metrics.dropped_saves_blocks
    set_block_bytes(half, 0)
    assert step(half, request, 12, 1).saves == ()
    half.request_finished(request)
    assert half.metrics.declined_saves_blocks == declined + 3
    assert half.metrics.dropped_saves_blocks == dropped
    half.check()


def step(half: SchedulerHalf, request: Asked, computed: int, count: int) -> StepPlan:
    """A step that computes `count` tokens of a request."""
    return half.build_connector_meta(SchedulerOutput([ScheduledRequest(request.request_id, computed, count)]))


@pytest.mark.parametrize("stores", [False, True])
def test_nothing_is_saved_behind_what_has_gone_from_the_host(stores: bool, tmp_path: Path) -> None:
    """Another prompt took the place of a long one's first part while the second was computed: nobody could reach it,
    but through storage, which has the first."""
    settings: dict[str, object] = {"write_policy": "write_through"}
    if stores:
        settings["storage"] = {"path": str(tmp_path / "store"), "capacity": "1GiB"}
    half = make(settings, (BlockGroup(),), num_host_blocks=2)
    long = Asked("long", list(range(16)))
    admit(half, long)
    report(half, step(half, long, 0, 8))
    other = Asked("other", [99] * 8)
    admit(half, other, first_block=50)
    report(half, step(half, other, 0, 8))
    half.request_finished(other)
    num_evicted = half.host.num_evicted
    assert bool(step(half, long, 8, 8).saves) is stores
    assert half.metrics.declined_saves_blocks == (0 if stores else 2)
    assert stores or half.host.num_evicted == num_evicted, "nothing goes for what is declined"
    half.check()


def test_what_is_computed_behind_a_declined_block_is_declined_and_counted_once() -> None:
    half, request = declined_half_way()
    declined = half.metrics.declined_saves_blocks
    for computed, count in ((8, 4), (12, 8), (20, 1), (21, 1), (22, 2)):
        assert step(half, request, computed, count).saves == ()
    assert half.metrics.declined_saves_blocks == declined + 4
    half.request_finished(request)
    assert half.metrics.declined_saves_blocks == declined + 4
    assert half.metrics.dropped_saves_blocks == 0
    half.check()


def test_a_pin_reaches_what_a_request_computes_after_it_was_declined() -> None:
    """What it has computed before is saved with the next request for it, as under any policy."""
    half, request = declined_half_way()
    declined = half.metrics.declined_saves_blocks
    half.pin_prefix(request.block_hashes[:4], are_given=False)
    plan = step(half, request, 8, 16)
    assert [job.device_ids.tolist() for job in plan.saves] == [[2, 3]]
    report(half, plan)
    assert half.metrics.declined_saves_blocks == declined + 2
    half.request_finished(request)
    assert ask(half, "next", request.tokens[:17]) == (0, 2)
    assert ask(half, "last", request.tokens[:17]) == (4, 0)
    half.check()


def declined_half_way() -> tuple[SchedulerHalf, Asked]:
    """A half that is full of chats, and a request of six blocks of which it has declined two."""
    half = full_of_chats()
    request = Asked("new", [7] * 24)
    admit(half, request)
    declined = half.metrics.declined_saves_blocks
    assert step(half, request, 0, 8).saves == ()
    assert half.metrics.declined_saves_blocks == declined + 2
    return half, request


def test_what_is_pinned_is_saved_behind_a_save_that_failed() -> None:
    """The next request for it brings the rest; without a pin nothing would keep the blocks until then."""
    half = make({"write_policy": "write_through"}, (BlockGroup(),), num_host_blocks=8)
    request = Asked("pinned", list(range(20)))
    half.pin_prefix(request.block_hashes[:4], are_given=False)
    admit(half, request)
    report(half, step(half, request, 0, 8), ok=False)
    plan = step(half, request, 8, 12)
    assert [job.device_ids.tolist() for job in plan.saves] == [[2, 3]]
    report(half, plan)
    assert half.metrics.declined_saves_blocks == 1
    half.request_finished(request)
    assert ask(half, "next", request.tokens[:17]) == (0, 2)
    assert ask(half, "last", request.tokens[:17]) == (4, 0)
    half.check()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_waited_for_bandwidth_is_not_saved_behind_what_has_gone(is_pinned: bool) -> None:
    half = make({"write_policy": "write_through", "save_bandwidth": 1}, (BlockGroup(),), num_host_blocks=4)
    long = Asked("long", list(range(16)))
    admit(half, long)
    set_block_bytes(half, 0)
    report(half, step(half, long, 0, 8))
    set_block_bytes(half, 1 << 40)
    assert step(half, long, 8, 8).saves == ()
    assert half.metrics.deferred_saves_blocks == 2
    set_block_bytes(half, 0)
    other = Asked("other", [99] * 16)
    admit(half, other, first_block=50)
    report(half, step(half, other, 0, 16))
    half.request_finished(other)
    if is_pinned:
        half.pin_prefix(long.block_hashes, are_given=False)
    assert bool(step(half, long, 16, 1).saves) is is_pinned
    assert half.metrics.declined_saves_blocks == (0 if is_pinned else 2)
    half.check()


def set_block_bytes(half: SchedulerHalf, block_bytes: int) -> None:
    """Nothing fits into `save_bandwidth` where they are many, and everything where there are none."""
    half.update_connector_output([StepReport(0, 0, num_host_blocks=half.host.pool.capacity, block_bytes=block_bytes)])


@pytest.mark.parametrize(("hole", "window"), [(0, None), (1, None), (0, 1)])
def test_nothing_is_saved_of_one_group_behind_a_hole_of_another(hole: int, window: int | None) -> None:
    """A hit needs the blocks of both, whichever group is looked at first."""
    half = make({"write_policy": "write_through"}, (BlockGroup(), BlockGroup(window)), num_host_blocks=20)
    request = Asked("r", list(range(16)))
    admit_both(half, request)
    report(half, step(half, request, 0, 8))
    last = half.tree.get(group_key(request.block_hashes[1], hole))
    assert last is not None
    half.host.discard(half.host.blocks_of((last,)))
    assert step(half, request, 8, 4).saves == ()
    assert step(half, request, 12, 4).saves == ()
    assert half.metrics.declined_saves_blocks == 4
    half.check()


def test_what_one_group_declines_is_given_back_of_the_other() -> None:
    """There is room for three of the four blocks: for the first one of both groups, and no use for the third."""
    half = make({"write_policy": "adaptive"}, (BlockGroup(), BlockGroup()), num_host_blocks=24)
    half.reuse.least_part = 8

    def ask_both(name: str, tokens: list[int]) -> list[int]:
        request = Asked(name, tokens)
        computed = admit_both(half, request)
        plan = step(half, request, computed, len(tokens) - computed)
        report(half, plan)
        half.request_finished(request)
        return [device_id for job in plan.saves for device_id in job.device_ids.tolist()]

    for number in range(60):
        for chat, tokens in enumerate(CHATS):
            ask_both(f"chat {chat} {number}", tokens)
            ask_both(f"once {number} {chat}", [1000 + 10 * number + chat] * 12)
    for chat, tokens in enumerate(CHATS):
        ask_both(f"chat {chat}", tokens)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=27, block_bytes=1)])
    declined = half.metrics.declined_saves_blocks
    assert ask_both("new", [7] * 8) == [0, 50]
    assert half.metrics.declined_saves_blocks == declined + 2
    assert half.host.pool.num_free == 1
    half.check()


def test_room_for_one_group_is_not_made_out_of_what_another_continues() -> None:
    """Another prompt was used last, and goes all the same: what is saved behind a hole is of no use."""
    half = make({"write_policy": "write_through"}, (BlockGroup(), BlockGroup()), num_host_blocks=6)
    long, other = Asked("long", list(range(13))), Asked("other", [99] * 4)
    for request, count in ((long, 8), (other, 4)):
        admit_both(half, request)
        report(half, step(half, request, 0, count))
    half.request_finished(other)
    report(half, step(half, long, 8, 4))
    half.request_finished(long)
    assert half.get_num_new_matched_tokens(Asked("again", long.tokens), 0) == (12, False)
    half.check()


def admit_both(half: SchedulerHalf, request: Asked) -> int:
    """Admit a request of two block groups, with device blocks from 0 and from 50 on; returns the tokens it loads."""
    num_tokens, _ = half.get_num_new_matched_tokens(request, 0)
    num_blocks = -(-len(request.tokens) // 4)
    tables = [list(range(first, first + num_blocks)) for first in (0, 50)]
    half.update_state_after_alloc(request, tables, 0, num_tokens or 0)
    return num_tokens or 0


def make(settings: dict[str, object], groups: tuple[BlockGroup, ...], num_host_blocks: int) -> SchedulerHalf:
    """A half with its host, and blocks of any engine."""
    config = Config.from_mapping({"host_memory": 1 << 20, **settings})
    identity = CacheIdentity("any", "any", "any", 4)
    half = SchedulerHalf(config, 4, clock=Clock(), groups=groups, identity=identity)
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=num_host_blocks, block_bytes=1)])
    return half


def test_with_windows_the_least_recently_used_goes_and_nothing_is_declined() -> None:
    """What is learned says nothing of blocks that are known one by one: whoever asked for a whole prompt last keeps
    it. The host holds a chat and the three prompts that come between its turns."""
    groups = (BlockGroup(), BlockGroup(window_blocks=1))
    half = make({"write_policy": "adaptive"}, groups, num_host_blocks=24)
    half.reuse.least_part = 8
    for number in range(60):
        once = [("once", [1000 + 3 * number + index] * 12) for index in range(3)]
        for index, (name, tokens) in enumerate([("chat", CHATS[0]), *once]):
            request = Asked(f"{name} {number} {index}", tokens)
            matched = admit_both(half, request)
            report(half, step(half, request, matched, 12 - matched))
            assert name == "once" or number == 0 or matched == 8
            half.request_finished(request)
            report(half, run(half))
    assert half.metrics.declined_saves_blocks == 0
    half.check()
