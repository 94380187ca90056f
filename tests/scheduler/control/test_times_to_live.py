"""Times to live of blocks in windows, which follow no parent, and of what the device has behind a reset or a pin."""

from __future__ import annotations

from typing import Any

from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from tests.scheduler.control.test_hints import Hinted, on_host, prompt, wait
from tests.scheduler.test_half import Asked, make_half, report, run, save

WINDOW = (BlockGroup(), BlockGroup(window_blocks=2))
PROMPT = prompt(1, 4)
LATE = Asked("late", [*PROMPT, 7])


def asked(name: str, **cache: Any) -> Hinted:
    return Hinted(name, PROMPT, cache=cache)


def admit(half: SchedulerHalf, request: Asked, first: int = 0) -> None:
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [list(range(start, start + 4)) for start in (first, first + 10)], 0, 0)


def compute(half: SchedulerHalf, request: Asked) -> None:
    admit(half, request)
    report(half, run(half, request))
    half.request_finished(request)


def empty(half: SchedulerHalf) -> None:
    """The host's blocks go and their nodes are remembered."""
    half.resize_host(0)
    half.resize_host(None)


def test_a_window_that_is_saved_anew_lives_as_long_as_its_last_request_says() -> None:
    half, _ = make_half(num_host_blocks=40, groups=WINDOW)
    compute(half, asked("short", ttl_s=100))
    empty(half)
    wait(half, 50.0)
    compute(half, asked("long", ttl_s=5000))
    wait(half, 70.0)
    assert half.get_num_new_matched_tokens(LATE, 0) == (16, False)
    wait(half, 5000.0)
    assert half.host.num_copies == 0
    half.check()


def test_a_window_that_two_have_computed_at_a_time_lives_as_long_as_the_last_to_end_says() -> None:
    half, _ = make_half(num_host_blocks=40, groups=WINDOW)
    short, long = asked("short", ttl_s=100), asked("long", ttl_s=5000)
    admit(half, short)
    admit(half, long, 50)
    report(half, run(half, short, long))
    half.request_finished(short)
    half.request_finished(long)
    wait(half, 200.0)
    assert half.get_num_new_matched_tokens(LATE, 0) == (16, False)
    wait(half, 5000.0)
    assert half.host.num_copies == 0
    assert not half._control._expiries._last, "nothing is remembered of windows once no time is left"


def test_a_window_with_a_time_makes_room_by_when_it_was_computed() -> None:
    half, _ = make_half(num_host_blocks=16, groups=WINDOW)
    timed, other = asked("timed", ttl_s=5000), Asked("other", prompt(2, 4))
    admit(half, timed)
    report(half, run(half, timed))
    wait(half, 25.0)
    admit(half, other, 50)
    report(half, run(half, other))
    half.request_finished(other)
    wait(half, 50.0)
    half.request_finished(timed)
    compute(half, Asked("third", prompt(3, 3)))
    assert half.get_num_new_matched_tokens(Asked("late", [*other.tokens, 7]), 0) == (16, False)


def test_a_window_that_is_saved_anew_is_not_the_first_to_go() -> None:
    half, _ = make_half(num_host_blocks=16, groups=WINDOW)
    compute(half, asked("r"))
    empty(half)
    other = Asked("other", prompt(2, 4))
    compute(half, other)
    compute(half, asked("r"))
    compute(half, Asked("third", prompt(3, 4)))
    assert half.get_num_new_matched_tokens(LATE, 0) == (16, False)
    assert half.get_num_new_matched_tokens(Asked("late", [*other.tokens, 7]), 0) == (0, False)


def test_what_the_device_keeps_behind_a_reset_has_its_time_yet() -> None:
    half, blocks = make_half(write_policy="write_back")
    short = Hinted("short", prompt(1), cache={"ttl_s": 100})
    save(half, short)
    assert half.reset_cache()
    blocks.order = list(enumerate(short.block_hashes))
    half._saves.before_reuse.changed()
    report(half, run(half))
    assert on_host(half, short) == 2, "the device is about to reuse it"
    wait(half, 200.0)
    assert on_host(half, short) == 0
    half.check()


def test_a_pin_saves_nothing_of_who_is_not_to_be_cached() -> None:
    half, blocks = make_half(write_policy="write_back")
    private = Hinted("private", prompt(1), cache={"do_not_cache": True})
    half.pin_prefix(private.block_hashes, are_given=False)
    save(half, private)
    blocks.order = list(enumerate(private.block_hashes))
    half._saves.before_reuse.changed()
    assert run(half).saves == (), "the device is about to reuse it"
    save(half, Asked("shown", prompt(1)))
    assert on_host(half, private) == 2
