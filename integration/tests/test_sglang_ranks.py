"""Linkers of several ranks, on threads, that are called alike or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from integration.tests.sglang_driver import Driver, Make, keys, linkers, make_pool
from integration.tests.sglang_parts import Meeting, ThreadRanks
from kv_connector.engines.sglang import linker, replica
from kv_connector.errors import KVConnectorError


@pytest.fixture
def make() -> Iterator[Make]:
    with linkers() as make:
        yield make


def run_ranks(make: Make, works: Sequence[Callable[[Driver], Any]], is_latent: bool) -> list[Any]:
    """Each rank's work on a thread of its own; what it came to, or the error that it ended with."""
    meeting, results = Meeting(len(works)), [None] * len(works)

    def run(rank: int, work: Callable[[Driver], Any]) -> None:
        try:
            results[rank] = work(make(make_pool(is_latent), group=(meeting, rank)))
        except (KVConnectorError, threading.BrokenBarrierError) as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank, work)) for rank, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("is_latent", [False, True], ids=["keys and values", "latent"])
def test_ranks_decide_alike(make: Make, monkeypatch: pytest.MonkeyPatch, is_latent: bool) -> None:
    """Of a latent cache, which is the same on each rank, they share one copy: each saves its half of the blocks."""
    monkeypatch.setattr(linker, "Ranks", ThreadRanks)

    def work(driver: Driver) -> Any:
        taken = [driver.save(keys(4, f"chat {i}"), range(1 + 4 * i, 5 + 4 * i)) for i in range(3)]
        came = [driver.load(f"request {i}", keys(4, f"chat {i}"), range(20, 24)) for i in range(3)]
        held = driver.holds(keys(4, "chat 2"), range(20, 24))
        driver.linker.reset()
        stats = driver.linker.stats()
        return taken, came, held, stats["saved_blocks"], stats["loaded_blocks"]

    first, second = run_ranks(make, [work, work], is_latent)
    assert first == second == ([True] * 3, [True] * 3, True, 12, 12)


def test_one_rank_shows_what_all_have_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang's metrics are on, else none does."""
    made = []

    class Shown:
        def __init__(self) -> None:
            made.append(self)

        def show(self, sums: Mapping[str, float], histograms: object) -> None:
            self.sums = sums

    def work(driver: Driver) -> Any:
        driver.save(keys(4), range(1, 5))
        driver.linker.reset()
        return driver.linker.stats()["saved_bytes"]

    monkeypatch.setattr(linker, "Ranks", ThreadRanks)
    monkeypatch.setattr(replica, "PromMetrics", Shown)
    run_ranks(make, [work, work], is_latent=False)
    assert made == []
    saved_bytes = run_ranks(partial(make, enable_metrics=True), [work, work], is_latent=False)
    (one,) = made
    assert saved_bytes == [one.sums["saved_bytes"]] * 2 and one.sums["saved_blocks"] == 4


def test_ranks_that_do_not_schedule_alike_say_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for one another, or load other pages."""
    monkeypatch.setattr(linker, "Ranks", ThreadRanks)

    def offers(driver: Driver) -> None:
        driver.save(keys(4), range(1, 5))
        driver.linker.reset()

    def offers_nothing(driver: Driver) -> None:
        driver.round()
        driver.round()
        driver.linker.reset()

    results = run_ranks(make, [offers, offers_nothing], is_latent=False)
    assert any("ranks have not scheduled alike" in str(error) for error in results)


def test_ranks_that_have_nothing_under_way_hear_what_time_it_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a request that gives up would hold what it was promised for as long."""
    now = [1000.0]
    monkeypatch.setattr(linker, "Ranks", ThreadRanks)
    monkeypatch.setattr(replica, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def work(driver: Driver) -> Any:
        driver.save(keys(4), range(1, 5))
        found = driver.lookup("request", keys(4))
        driver.round()
        driver.linker._replica._ranks.exchange(None)
        now[0] = 1100.0
        for _ in range(linker._QUIET_ROUNDS + 1):
            driver.round()
        return found, driver.linker.stats()["host_leased_blocks"]

    assert run_ranks(make, [work, work], is_latent=False) == [(4, 0)] * 2
