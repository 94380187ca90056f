"""What requests say of their own blocks, and what becomes of it: plans read and reports written by hand."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_connector.errors import KVConnectorError
from kv_connector.index import BlockGroup, BlockHasher, CacheIdentity, root_hash
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.control import expiry, pins
from kv_connector.scheduler.control.hints import NO_HINTS, Hints, hints_of
from kv_connector.types import Tier
from tests.scheduler.test_half import Asked, admit, make_half, report, run, save

IDENTITY = CacheIdentity("m", "bf16", "NHD", 4)


@dataclass
class Hinted(Asked):
    """A request that says something of its blocks."""

    cache: Any = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.kv_transfer_params = {"cache": self.cache} if self.cache is not None else {}
        self.hasher = BlockHasher(4, root_hash(IDENTITY, salt=self.cache_salt))


def prompt(number: int, num_blocks: int = 2) -> list[int]:
    return [1000 * number + i for i in range(4 * num_blocks)]


def on_host(half: SchedulerHalf, request: Asked) -> int:
    """Leading blocks of the request that the host has."""
    return half.host.resident_prefix(half.tree.match(request.block_hashes))


def wait(half: SchedulerHalf, seconds: float) -> None:
    """Time passes, and a step is planned."""
    half._shared.clock.now += seconds  # type: ignore[attr-defined]
    half.build_connector_meta(run_nothing())


def run_nothing() -> Any:
    from kv_connector.base import SchedulerOutput

    return SchedulerOutput()


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ("pin", "is not an object"),
        ({"pin": 1}, "give true or false"),
        ({"ttl_s": "60"}, "give 1 to 604800 seconds"),
        ({"ttl_s": float("nan")}, "give 1 to 604800 seconds"),
        ({"ttl_s": 0.5}, "give 1 to 604800 seconds"),
        ({"ttl_s": 604801}, "give 1 to 604800 seconds"),
        ({"ttl_s": True}, "give 1 to 604800 seconds"),
        ({"priority": 3}, "give an integer from -2 to 2"),
        ({"priority": True}, "give an integer from -2 to 2"),
        ({"ttl": 60}, "known hints are pin, ttl_s, priority, do_not_cache, prefetch"),
        ({7: 60}, "is unknown"),
        ({"a\nERROR: b": 60}, r"cache.'a\nERROR: b' is unknown"),
        ({str(number): True for number in range(17)}, "cache={...} is not an object of at most 16 hints"),
        ({"do_not_cache": True, "pin": True}, "leave one of them out"),
    ],
)
def test_a_hint_that_is_wrong_is_as_if_it_were_not_there(cache: Any, reason: str) -> None:
    reasons: list[str] = []
    given = Hinted("r", prompt(1), cache=cache)
    expected = Hints(do_not_cache=True) if isinstance(cache, dict) and "do_not_cache" in cache else NO_HINTS
    assert hints_of(given, reasons.append) == expected
    assert len(reasons) == 1 and reason in reasons[0]


class Megabytes(list[int]):
    """Whoever writes it down holds the engine up."""

    def __repr__(self) -> str:
        raise AssertionError("it is written down")


class Text(str):
    """Of which no more than a part may be looked at."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise AssertionError("it is written down")


@pytest.mark.parametrize(
    "cache",
    [
        *(Megabytes([1]), {"pin": Megabytes([1])}, {"ttl_s": {"a": Megabytes([1])}}),
        *(Text("x" * 2000), {"pin": Text("x" * 2000)}),
    ],
)
def test_what_is_wrong_is_not_written_down_whole(cache: Any) -> None:
    reasons: list[str] = []
    assert hints_of(Hinted("r", prompt(1), cache=cache), reasons.append) == NO_HINTS
    assert len(reasons) == 1 and "..." in reasons[0]


def test_what_is_right_counts_beside_what_is_wrong() -> None:
    given = Hinted("r", prompt(1), cache={"pin": False, "ttl_s": 60, "priority": -2, "prefetch": True, "x": 1})
    assert hints_of(given) == Hints(False, 60, -2, False, True)
    assert hints_of(Asked("r", prompt(1))) == NO_HINTS, "an engine whose requests have no such field"


def test_wrong_hints_are_counted_and_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    half, _ = make_half()
    with caplog.at_level(logging.WARNING, "kv_connector.scheduler"):
        for number in range(5):
            save(half, Hinted(f"r{number}", prompt(number), cache={"pin": "yes"}))
    assert half.metrics.ignored_hints == 5
    assert len(caplog.records) == 1 and "cache.pin='yes' is not a boolean" in caplog.text
    wait(half, 60.0)
    save(half, Hinted("later", prompt(9), cache=7))
    assert len(caplog.records) == 2


def test_a_pinned_prompt_outlives_a_flood_until_its_time_is_over() -> None:
    half, _ = make_half(num_host_blocks=8)
    pinned = Hinted("pinned", prompt(1, 3), cache={"pin": True, "ttl_s": 1000})
    save(half, pinned)
    for number in range(2, 12):
        save(half, Asked(f"flood{number}", prompt(number)))
    assert on_host(half, pinned) == 3
    assert half.get_kv_connector_stats()["pinned_blocks"] == 3
    wait(half, 1000.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0
    for number in range(2, 12):
        save(half, Asked(f"again{number}", prompt(number)))
    assert on_host(half, pinned) == 0
    half.check()


def test_a_pin_asked_for_again_lasts_longer_and_none_lasts_for_ever() -> None:
    half, _ = make_half()
    save(half, Hinted("first", prompt(1), cache={"pin": True, "ttl_s": 1000}))
    wait(half, 900.0)
    save(half, Hinted("again", prompt(1), cache={"pin": True, "ttl_s": 1000}))
    wait(half, 900.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2
    wait(half, 200.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0
    save(half, Hinted("hour", prompt(1), cache={"pin": True}))
    wait(half, 3500.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2
    wait(half, 200.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0


def test_a_conversation_is_let_go_of_and_not_what_others_have_pinned() -> None:
    half, _ = make_half(num_host_blocks=40)
    system = prompt(1)
    first, second = system + prompt(2), system + prompt(3)
    for request_id, tokens in (("system", system), ("1", first), ("2", first + prompt(4))):
        save(half, Hinted(request_id, tokens, cache={"pin": True}))
    save(half, Hinted("other", second, cache={"pin": True, "ttl_s": 500}))
    assert half.get_kv_connector_stats()["pinned_blocks"] == 8
    save(half, Hinted("end", first + prompt(4) + prompt(5), cache={"pin": False}))
    assert half.get_kv_connector_stats()["pinned_blocks"] == 4, "the system's prompt and the other conversation"
    wait(half, 500.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2, "the system's prompt, which was pinned by itself"
    save(half, Hinted("end too", second, cache={"pin": False}))
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0
    half.check()


def test_requests_do_not_undo_what_an_operator_pins() -> None:
    half, _ = make_half()
    request = Hinted("r", prompt(1), cache={"pin": False})
    half.pin_prefix(request.block_hashes, are_given=False)
    save(half, request)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2
    half.unpin_prefix(request.block_hashes)


def test_an_operators_pin_ends_by_itself() -> None:
    half, _ = make_half()
    request = Asked("r", prompt(1))
    half.pin_prefix(request.block_hashes, ttl_s=100, are_given=False)
    half.pin_prefix(request.block_hashes, ttl_s=500, are_given=False)
    wait(half, 300.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2, "the longer time counts"
    wait(half, 300.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0
    with pytest.raises(KVConnectorError, match="is not pinned"):
        half.unpin_prefix(request.block_hashes)


def test_what_is_pinned_again_and_again_leaves_nothing_behind() -> None:
    """Memory is that of the pins there are, not of how often somebody asked; and each ends in its time."""
    half, _ = make_half(num_host_blocks=10, pinned_share=1.0)
    request, forever = Asked("r", prompt(1)), Asked("f", prompt(2))
    half.pin_prefix(forever.block_hashes, are_given=False)
    for number in range(1000):
        save(half, Hinted("hinted", prompt(3), cache={"pin": True, "ttl_s": 5000 + number}))
        half.pin_prefix(request.block_hashes, ttl_s=1000 + number, are_given=False)
        half.unpin_prefix(request.block_hashes)
    half.pin_prefix(request.block_hashes, ttl_s=100, are_given=False)
    assert len(half._control.pins._deadlines) < 100
    pinned = []
    for seconds in (0.0, 200.0, 4000.0, 3000.0):
        wait(half, seconds)
        pinned.append(half.get_kv_connector_stats()["pinned_blocks"])
    assert pinned == [6, 4, 4, 2]


def test_prompts_that_are_to_be_dropped_in_time_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the blocks of all of them: what is over it goes before its time, the one first that is due next."""
    monkeypatch.setattr(expiry, "_MOST_HASHES", 6)
    half, _ = make_half(num_host_blocks=40)
    asked = [Hinted(str(number), prompt(number), cache={"ttl_s": 1000 + number}) for number in range(1, 6)]
    for request in asked:
        save(half, request)
    assert [on_host(half, request) for request in asked] == [0, 0, 2, 2, 2]
    half.reset_cache()
    for request in asked[:3]:
        save(half, request)
    assert [on_host(half, request) for request in asked[:3]] == [2, 2, 2]


def test_pins_of_requests_hold_a_share_of_the_host_at_most() -> None:
    half, _ = make_half(num_host_blocks=10, pinned_share=0.5)
    for number in range(4):
        save(half, Hinted(f"r{number}", prompt(number), cache={"pin": True}))
    stats = half.get_kv_connector_stats()
    assert (stats["pinned_blocks"], stats["refused_pins"]) == (4, 2)
    save(half, Hinted("more of one", prompt(1) + prompt(9, 1), cache={"pin": True}))
    assert half.get_kv_connector_stats()["pinned_blocks"] == 5, "what is pinned twice counts once"


def test_so_many_prompts_are_pinned_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever room there is: each costs memory of the scheduler's."""
    monkeypatch.setattr(pins, "_MOST_PINS", 2)
    half, _ = make_half(num_host_blocks=100)
    for number in range(3):
        save(half, Hinted(f"r{number}", prompt(number), cache={"pin": True, "ttl_s": 1000 * (number + 1)}))
    stats = half.get_kv_connector_stats()
    assert (stats["pinned_blocks"], stats["refused_pins"]) == (4, 1)
    save(half, Hinted("again", prompt(1), cache={"pin": True}))
    wait(half, 1500.0)  # the first ends
    save(half, Hinted("r2 again", prompt(2), cache={"pin": True}))
    stats = half.get_kv_connector_stats()
    assert (stats["pinned_blocks"], stats["refused_pins"]) == (4, 1)


def test_what_nobody_uses_for_as_long_as_was_said_is_dropped() -> None:
    half, _ = make_half()
    system = prompt(1)
    short = Hinted("short", system + prompt(2), cache={"ttl_s": 100})
    save(half, short)
    wait(half, 50.0)
    assert on_host(half, short) == 4
    save(half, Asked("long", system + prompt(3)))
    wait(half, 60.0)
    assert on_host(half, short) == 2, "what others have used since is theirs"
    assert half.metrics.expired_blocks == 2
    half.check()


def test_what_somebody_has_used_since_who_set_no_time_is_his() -> None:
    half, _ = make_half()
    save(half, Hinted("short", prompt(1), cache={"ttl_s": 100}))
    save(half, Asked("long", prompt(1)))
    wait(half, 200.0)
    assert on_host(half, Asked("late", prompt(1))) == 2


def test_what_is_used_again_in_time_stays() -> None:
    half, _ = make_half()
    for _ in range(3):
        save(half, Hinted("r", prompt(1), cache={"ttl_s": 100}))
        wait(half, 80.0)
    assert on_host(half, Asked("r", prompt(1))) == 2
    wait(half, 30.0)
    assert on_host(half, Asked("r", prompt(1))) == 0


def test_of_more_times_than_are_remembered_the_one_that_is_due_next_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "_MOST", 2)
    half, _ = make_half(num_host_blocks=100)
    requests = [Hinted(f"r{ttl_s}", prompt(ttl_s), cache={"ttl_s": ttl_s}) for ttl_s in (9000, 3000, 6000)]
    for request in requests:
        save(half, request)
    assert [on_host(half, request) for request in requests] == [2, 0, 2]
    wait(half, 7000.0)
    assert [on_host(half, request) for request in requests] == [2, 0, 0]


def test_what_is_loaded_as_its_time_ends_is_matched_no_more_and_freed_behind_the_load() -> None:
    half, _ = make_half(load_choice="sync")
    save(half, Hinted("r", prompt(1, 3), cache={"ttl_s": 100}))
    loaded = Hinted("loaded", [*prompt(1, 3), 7], cache={"ttl_s": 100})
    assert admit(half, loaded) == 12
    plan = run(half, loaded, computed=12)
    half.request_finished(loaded)  # given up, with its load under way
    wait(half, 200.0)
    assert half.get_num_new_matched_tokens(Asked("late", [*prompt(1, 3), 7]), 0) == (0, False)
    assert half.host.pool.num_live == 3, "the load reads them yet"
    report(half, plan)
    assert half.host.pool.num_live == 0
    half.check()


def test_nothing_of_a_request_that_is_not_to_be_cached_is_saved_and_hits_are_used() -> None:
    half, _ = make_half(load_choice="sync")
    save(half, Asked("system", prompt(1)))
    private = Hinted("private", prompt(1) + prompt(2) + [7], cache={"do_not_cache": True})
    assert admit(half, private) == 8
    plan = run(half, private, computed=8)
    assert plan.saves == ()
    report(half, plan)
    half.request_finished(private)
    assert on_host(half, private) == 2
    save(half, Asked("not private", prompt(1) + prompt(2)))
    assert on_host(half, private) == 4, "who shows the same tokens says for himself"


@pytest.mark.parametrize("policy", ["write_through", "adaptive"])
def test_a_lower_priority_goes_first_and_makes_no_room_for_itself(policy: str) -> None:
    half, _ = make_half(num_host_blocks=6, write_policy=policy)
    low, high = (Hinted(f"{p}", prompt(p + 5), cache={"priority": p}) for p in (-1, 2))
    plain = Asked("plain", prompt(1))
    for request in (high, low, plain):
        save(half, request)
    save(half, Asked("next", prompt(2)))
    assert [on_host(half, request) for request in (low, plain, high)] == [0, 2, 2]
    save(half, Hinted("low again", prompt(9), cache={"priority": -1}))
    assert half.host.num_evicted == 2 and half.metrics.declined_saves_blocks >= 1
    for number in range(20, 24):
        save(half, Asked(f"flood{number}", prompt(number)))
    assert on_host(half, high) == 2
    half.check()


def test_a_block_has_the_highest_priority_that_was_asked_for() -> None:
    half, _ = make_half(num_host_blocks=8)
    save(half, Hinted("batch", prompt(1), cache={"priority": -2}))
    save(half, Asked("chat", prompt(1)))
    save(half, Hinted("batch again", prompt(1), cache={"priority": -2}))
    nodes = half.tree.match(Asked("x", prompt(1)).block_hashes)
    assert [half.tree.terms.priority[node] for node in nodes] == [0, 0]
    assert half.tree.block[Tier.HOST][nodes[0]] >= 0


@pytest.mark.parametrize("ttl_s", [1, 1.0, 604800, 604800.0])
def test_the_shortest_and_the_longest_time_are_times(ttl_s: float) -> None:
    assert hints_of(Hinted("r", prompt(1), cache={"ttl_s": ttl_s})) == Hints(ttl_s=ttl_s)


def test_who_is_not_cached_may_let_go_of_what_he_has_pinned() -> None:
    half, _ = make_half()
    save(half, Hinted("pinned", prompt(1), cache={"pin": True}))
    save(half, Hinted("end", prompt(1), cache={"pin": False, "do_not_cache": True}))
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0 and half.metrics.ignored_hints == 0


def test_what_others_had_cached_before_who_set_no_time_stays() -> None:
    half, _ = make_half()
    save(half, Asked("long", prompt(1)))
    short = Hinted("short", prompt(1) + prompt(2), cache={"ttl_s": 100})
    save(half, short)
    wait(half, 200.0)
    assert on_host(half, short) == 2 and half.metrics.expired_blocks == 2
    half.check()


@pytest.mark.parametrize("policy", ["write_through", "adaptive", "write_back"])
def test_what_two_compute_at_a_time_is_on_the_terms_of_both(policy: str) -> None:
    half, _ = make_half(write_policy=policy)
    long, short = Asked("long", prompt(1)), Hinted("short", prompt(1), cache={"ttl_s": 100, "priority": 1})
    admit(half, short)
    admit(half, long, 50)
    report(half, run(half, short, long))
    nodes = half.tree.match(long.block_hashes)
    assert [(half.tree.terms.transient[node], half.tree.terms.priority[node]) for node in nodes] == [(0, 1)] * 2
    half.request_finished(long)
    half.request_finished(short)
    num_copies = half.host.num_copies
    wait(half, 200.0)
    assert half.host.num_copies == num_copies


def test_what_the_device_has_is_not_saved_before_reuse_when_its_time_is_over() -> None:
    half, blocks = make_half(write_policy="write_back")
    short = Hinted("short", prompt(1), cache={"ttl_s": 100})
    save(half, short)
    blocks.order = list(enumerate(short.block_hashes))
    wait(half, 200.0)
    assert half.build_connector_meta(run_nothing()).saves == () and half.host.num_copies == 0
    admit(half, Asked("again", prompt(1)), num_local=4)
    (job,) = half.build_connector_meta(run_nothing()).saves
    assert job.num_blocks == 2, "somebody asks for it"


def test_a_pin_that_is_asked_for_all_the_time_leaves_nothing_behind() -> None:
    half, _ = make_half(num_host_blocks=40)
    for _ in range(300):
        save(half, Hinted("again", prompt(1), cache={"pin": True, "ttl_s": 604800}))
    save(half, Hinted("other", prompt(2), cache={"pin": True, "ttl_s": 100}))
    assert len(half._control.pins._deadlines) < 100
    wait(half, 110.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2
    wait(half, 604800.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0
    half.check()


@pytest.mark.parametrize("ttl_s", [0, -1.0, -1e9, float("nan")])
def test_an_operator_who_gives_no_time_is_told(ttl_s: float) -> None:
    half, _ = make_half()
    with pytest.raises(KVConnectorError, match="give seconds over 0, or None"):
        half.pin_prefix(Asked("r", prompt(1)).block_hashes, ttl_s, are_given=False)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 0


def test_a_conversation_is_let_go_of_where_its_turns_end_in_one_block() -> None:
    """Where blocks of the first group have two hashes."""
    half, _ = make_half(num_host_blocks=80, groups=(BlockGroup(hashes_per_block=2), BlockGroup()))
    for request_id, num_hashes in (("first", 4), ("second", 5)):
        told(half, Hinted(request_id, prompt(1, num_hashes), cache={"pin": True}))
    half.pin_prefix(Asked("operator", prompt(1, 2)).block_hashes, are_given=False)
    told(half, Hinted("end", prompt(1, 5), cache={"pin": False}))
    assert half.get_kv_connector_stats()["pinned_blocks"] == 3


def told(half: SchedulerHalf, request: Hinted) -> None:
    """A request of two block groups, that ends before it is computed."""
    half.update_state_after_alloc(request, [list(range(9)), list(range(9))], 0, 0)
    half.request_finished(request)


def test_a_pin_never_gets_shorter() -> None:
    half, _ = make_half()
    save(half, Hinted("long", prompt(1), cache={"pin": True, "ttl_s": 1000}))
    save(half, Hinted("short", prompt(1), cache={"pin": True, "ttl_s": 10}))
    wait(half, 500.0)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 2


def test_letting_go_ends_in_front_of_what_an_operator_has_pinned_of_the_same_conversation() -> None:
    half, _ = make_half(num_host_blocks=40)
    turns = [prompt(1), prompt(1) + prompt(2), prompt(1) + prompt(2) + prompt(3)]
    for number, tokens in enumerate(turns):
        save(half, Hinted(str(number), tokens, cache={"pin": True}))
    half.pin_prefix(Asked("operator", turns[1]).block_hashes, are_given=False)
    save(half, Hinted("end", turns[2], cache={"pin": False}))
    half.unpin_prefix(Asked("operator", turns[1]).block_hashes)
    assert half.get_kv_connector_stats()["pinned_blocks"] == 4, "the first two turns are pinned yet"


def test_beyond_so_many_prefixes_with_a_time_the_one_that_is_due_next_goes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiry, "_MOST", 2)
    half, _ = make_half(num_host_blocks=40)
    requests = [Hinted(str(seconds), prompt(seconds), cache={"ttl_s": 1000 * seconds}) for seconds in (2, 1, 3)]
    for request in requests:
        save(half, request)
    assert [on_host(half, request) for request in requests] == [2, 0, 2]


def test_the_time_of_who_is_not_cached_drops_nothing_of_others() -> None:
    half, _ = make_half()
    save(half, Hinted("short", prompt(1), cache={"ttl_s": 1000}))
    save(half, Hinted("private", prompt(1), cache={"ttl_s": 1, "do_not_cache": True}))
    wait(half, 100.0)
    assert on_host(half, Asked("r", prompt(1))) == 2


def test_a_prompt_without_a_full_block_pins_nothing() -> None:
    half, _ = make_half()
    save(half, Hinted("r", [1, 2], cache={"pin": True}))
    assert half.metrics.refused_pins == 0 and len(half._control.pins._pins) == 0
