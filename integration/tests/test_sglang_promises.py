"""What SGLang was told that it can load, until it loads it: a promise is kept, lapses, or is told to be broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from integration.faults import break_loads
from integration.tests.sglang_driver import Driver, Make, keys, linkers
from kv_connector.engines.sglang import fragments, ranks
from tests.waiting import until


@pytest.fixture
def make() -> Iterator[Make]:
    with linkers() as make:
        yield make


def test_what_is_promised_stays_until_it_is_loaded(make: Make) -> None:
    """Others save more than the host has room for in between."""
    driver = make(host_memory="32KiB")  # 8 blocks
    names = keys(5)
    driver.save(names, range(1, 6))
    assert driver.lookup("request", names) == 5
    for i in range(6):
        driver.save(keys(3, f"others {i}"), range(20, 23))
    assert driver.linker.load("request", driver.transfer(names, range(10, 15)))
    assert driver.forward()
    assert driver.holds(names, range(10, 15))
    driver.save(keys(8, "all"), range(20, 28))
    assert driver.lookup("again", names) == 0, "its lease is over"
    driver.check()


def test_a_promise_lapses_and_the_load_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gave up before it was admitted; SGLang tells nobody. One that comes after all is computed."""
    monkeypatch.setattr(fragments, "PROMISED_SECONDS", 0.0)
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("request", keys(3)) == 3
    driver.check()
    assert driver.linker.stats()["requests"] == 1, "it is computed by now, as far as anybody knows"
    assert not driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    assert driver.linker.start_layer_wise_loading() == -1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which all linkers that are made go."""
    now = [1000.0]
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_requests_that_are_looked_up_in_each_round_leave_room_to_others(make: Make, clock: list[float]) -> None:
    """A policy of SGLang's that orders by cached prefix does so with whoever waits, and for minutes."""
    driver = make(host_memory="48KiB")  # 12 blocks
    waiting = {f"request {i}": keys(4, f"chat {i}") for i in range(3)}
    for names in waiting.values():
        driver.save(names, range(1, 5))
    for _ in range(10):
        clock[0] += 5
        assert [driver.lookup(name, names) for name, names in waiting.items()] == [4, 4, 4]
        assert not driver.save(keys(2, "new"), [20, 21]), "all is promised"
    assert driver.linker.stats()["dropped_saves_blocks"] == 20
    for _ in range(3):
        clock[0] += 5
        for name, names in waiting.items():
            driver.lookup(name, names)
    assert driver.save(keys(2, "new"), [20, 21])
    found = [driver.lookup(name, names) for name, names in waiting.items()]
    assert sum(found) == 10, "what is left is theirs"
    assert driver.linker.load("request 2", driver.transfer(waiting["request 2"], range(10, 14)))
    for i in range(3):
        driver.save(keys(8, f"newer {i}"), range(20, 28))
    assert driver.forward()
    assert driver.holds(waiting["request 2"], range(10, 14))
    clock[0] += 100
    driver.check()


def test_each_promise_lapses_in_its_own_time(make: Make, clock: list[float]) -> None:
    """However many rounds there are before."""
    driver = make()
    for name in ("first", "second"):
        driver.save(keys(3, name), [1, 2, 3])
        assert driver.lookup(name, keys(3, name)) == 3
        clock[0] += 40
    leased = []
    for _ in range(4):
        driver.round()
        leased.append(driver.linker.stats()["host_leased_blocks"])
        clock[0] += 15
    assert leased == [3, 3, 0, 0]


def test_who_waits_and_lacks_other_pages_by_now_has_waited_as_long(make: Make, clock: list[float]) -> None:
    """Or what the device gains and loses would keep the host for it; another request of that name begins anew."""
    driver = make()
    driver.save(keys(4), range(1, 5))
    for first in (0, 1) * 10:
        clock[0] += 5
        driver.lookup("request", keys(4 - first, first=first))
    driver.save(keys(2, "other"), [5, 6])
    driver.round()
    assert driver.linker.stats()["host_leased_blocks"] == 0, "what is left is promised for a round"
    assert driver.lookup("request", keys(2, "other")) == 2
    driver.round()
    assert driver.linker.stats()["host_leased_blocks"] == 2


def test_a_promise_that_lapses_while_its_load_is_queued_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang begins a load in the round in which it queues it; if it ever does not, no block is read unleased."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("request", keys(3)) == 3
    assert driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    monkeypatch.setattr(fragments, "PROMISED_SECONDS", 0.0)
    driver.round()
    assert not driver.forward()
    driver.check()


def test_what_was_never_promised_is_not_loaded(make: Make) -> None:
    """Other pages, fewer slots than theirs, or the same request twice: all are computed."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert not driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    assert driver.lookup("request", keys(3)) == 3
    assert not driver.linker.load("request", driver.transfer(keys(3, "others"), [4, 5, 6]))
    odd = driver.transfer(keys(3), [4, 5, 6])
    odd[0].device_indices = odd[0].device_indices[:-1]
    assert not driver.linker.load("request", odd)
    assert driver.linker.load("request", driver.transfer(keys(2), [4, 5]))
    assert not driver.linker.load("request", driver.transfer(keys(2), [6, 7]))
    assert driver.forward()
    assert driver.holds(keys(2), [4, 5])
    driver.check()


def test_a_queued_load_that_is_cancelled_writes_nothing(make: Make) -> None:
    """Its pages are somebody else's by then."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    driver.lookup("request", keys(3))
    assert driver.linker.load("request", driver.transfer(keys(3), [4, 5, 6]))
    driver.write(keys(3, "others"), [4, 5, 6])
    assert driver.linker.cancel_queued_load("request")
    assert not driver.linker.cancel_queued_load("request")
    assert driver.forward()
    assert driver.holds(keys(3, "others"), [4, 5, 6])
    driver.check()


def test_a_load_that_fails_is_told_and_not_tried_again(make: Make) -> None:
    """SGLang aborts its request, and the next one computes."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    break_loads(driver.linker._replica.worker, True)
    assert not driver.load("request", keys(3), [4, 5, 6])
    break_loads(driver.linker._replica.worker, False)
    assert driver.lookup("next", keys(3)) == 0
    assert driver.save(keys(3), [1, 2, 3])
    assert driver.load("last", keys(3), [4, 5, 6])
    assert driver.holds(keys(3), [4, 5, 6])


def test_the_round_behind_a_load_leaves_its_report_to_the_next(make: Make) -> None:
    """First tokens wait for that round to end. Another load does not keep the next one from hearing of it."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("one", keys(3)) == driver.lookup("other", keys(3)) == 3
    assert driver.linker.load("one", driver.transfer(keys(3), [4, 5, 6]))
    assert driver.forward()
    assert driver.linker.load("other", driver.transfer(keys(3), [7, 8, 9]))
    driver.round()
    assert driver.half.has_pending_push_work()
    assert driver.forward()
    driver.round()
    assert not driver.half.has_pending_push_work()
    driver.save(keys(3, "more"), [10, 11, 12])
    driver.round()
    assert not driver.half.has_pending_push_work(), "no load was launched since"


def test_what_a_round_has_left_is_heard_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first look-up behind it, which learns nothing then; with several ranks each step takes a while. Nor is
    there one where a round has left nothing, or nothing is under way."""
    driver = make()
    replica, tree, steps = driver.linker._replica, driver.half.tree, list[int]()
    driver.save(keys(3), [1, 2, 3])
    for name in ("one", "other"):
        assert driver.lookup(name, keys(3)) == 3
    advance = replica.advance
    monkeypatch.setattr(replica, "advance", lambda *offers: steps.append(tree.time) or advance(*offers))

    def look_up(name: str) -> int:
        """In the same round; in how many steps since the last time."""
        steps.clear()
        driver.linker.lookup(name, driver.transfer(keys(3)))
        return len(steps)

    time = tree.time
    assert driver.linker.load("one", driver.transfer(keys(3), [4, 5, 6]))
    assert driver.forward()
    driver.round()
    assert [look_up("next"), look_up("last")] == [1, 0]
    assert tree.time == time
    assert driver.linker.load("other", driver.transfer(keys(3), [7, 8, 9]))
    assert driver.forward()
    driver.linker.offload(driver.transfer(keys(3), [1, 2, 3]))
    driver.round()
    assert look_up("behind an offer") == 0
    driver.round()
    steps.clear()
    for _ in range(5):
        driver.round()
    assert steps == []


def fail_for_one_of_two(driver: Driver) -> None:
    """Both were promised the same pages, and the load of one has failed."""
    driver.save(keys(3), [1, 2, 3])
    assert driver.lookup("one", keys(3)) == driver.lookup("other", keys(3)) == 3
    break_loads(driver.linker._replica.worker, True)
    assert driver.linker.load("one", driver.transfer(keys(3), [4, 5, 6]))
    assert not driver.forward()
    break_loads(driver.linker._replica.worker, False)


def test_what_failed_for_one_is_refused_to_others_who_were_promised_it(make: Make) -> None:
    """The host's copy is not trusted any more: the others compute."""
    driver = make()
    fail_for_one_of_two(driver)
    driver.round()
    assert not driver.linker.load("other", driver.transfer(keys(3), [7, 8, 9]))
    assert driver.lookup("other", keys(3)) == 0
    driver.check()


def test_who_waits_for_storage_begins_no_load_of_others(make: Make) -> None:
    """Requests are admitted one by one, and what those in front have queued begins with the batch: it may be cancelled
    until then."""
    driver = make()
    driver.save(keys(3), [1, 2, 3])
    driver.save(keys(3, "mine"), [4, 5, 6])
    for name, pages in (("chat", [7, 8, 9]), ("mine", [10, 11, 12])):
        assert driver.lookup(name, keys(3, name)) == 3
        assert driver.linker.load(name, driver.transfer(keys(3, name), pages))
    others = keys(6, "others")
    driver.write(others, range(7, 13))
    driver.linker._replica.advance()  # as a look-up does that waits for storage
    assert driver.holds(others, range(7, 13))
    assert driver.linker.cancel_queued_load("chat")
    assert driver.forward()
    assert driver.holds(others[:3], [7, 8, 9]) and driver.holds(keys(3, "mine"), [10, 11, 12])


def test_a_load_of_what_was_lost_while_it_was_queued_is_told(make: Make) -> None:
    """Another load of the same blocks has failed, and that became known after this one was accepted."""
    driver = make()
    fail_for_one_of_two(driver)
    assert driver.linker.load("other", driver.transfer(keys(3), [7, 8, 9]))
    driver.linker._replica.advance()  # as a look-up does that waits for storage
    assert not driver.forward()


def test_a_request_that_waits_hears_of_storage_what_it_lacks_by_now(make: Make, tmp_path: Path) -> None:
    """The device has let go of pages since the request was looked up first: storage is asked for those, too."""
    storage = {"path": str(tmp_path), "capacity": "64MiB", "prefetch": "timeout", "timeout_ms": 10000}
    before = make(storage=storage)
    before.save(keys(6), range(1, 7))
    until(lambda: before.linker.stats()["backed_up_blocks"] >= 6, before.round, before.linker.stats)
    driver = make(storage=storage)
    assert driver.lookup("request", keys(4, first=2)) == 4
    assert driver.load("request", keys(6), range(10, 16))
    assert driver.holds(keys(6), range(10, 16))
    driver.check()
