"""The default policy: all that is computed is saved, until the host is full of what is worth more."""

from __future__ import annotations

from kv_connector.scheduler import SchedulerHalf
from tests.scheduler.test_half import Asked, admit, make_half, report, run

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


def test_the_second_request_with_a_prompt_is_hit_under_the_default_policy() -> None:
    half, _ = make_half(write_policy="adaptive")
    assert [ask(half, f"request {number}", CHATS[0]) for number in range(2)] == [(0, 3), (2, 0)]


def test_what_is_worth_less_than_all_that_is_there_is_not_saved_and_does_not_wait() -> None:
    half, _ = make_half(num_host_blocks=12, write_policy="adaptive")
    teach(half)
    for chat, tokens in enumerate(CHATS):
        ask(half, f"chat {chat}", tokens)
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
    half.pin_prefix(pinned.block_hashes)
    assert ask(half, "pinned", [7] * 12) == (0, 3)
    half.check()


def test_write_through_saves_the_same_whatever_it_is_worth() -> None:
    half, _ = make_half(num_host_blocks=12, write_policy="write_through")
    teach(half)
    assert ask(half, "new", [7] * 12) == (0, 3)
    assert half.metrics.declined_saves_blocks == 0
