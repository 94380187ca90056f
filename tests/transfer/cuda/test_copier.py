"""Which calls of the driver keep Python's lock, and that they are the same calls.

The driver is a stand-in, loaded once for calls that let go of the lock and once for those that keep it: what the real
one copies is tested with a GPU.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_connector.transfer.cuda import copier, driver, pitched
from kv_connector.transfer.cuda.copier import CALL_DESCRIPTORS, MOST_IN_A_ROW, MOST_KEEPING_LOCK, DriverCopier
from kv_connector.transfer.cuda.pitched import COPY, copy_pitched
from kv_connector.transfer.cuda.pitched import MOST_IN_A_ROW as MOST_PITCHED_IN_A_ROW

STREAM = 7


class Library:
    """Remembers the targets of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

        # A function of ctypes takes attributes, a method does not.
        def batch(targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
            assert rest[-1] == STREAM
            self.calls.append(list((ctypes.c_int64 * count).from_address(targets)))
            return 0

        def each(target: int, source: int, num_bytes: int, stream: int) -> int:
            return 0

        def piece(address: int, stream: int) -> int:
            assert stream == STREAM
            self.calls.append([address])
            return 0

        self.cuMemcpyBatchAsync_v2, self.cuMemcpyAsync, self.cuMemcpy2DAsync_v2 = batch, each, piece


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    both = SimpleNamespace(lets_go=Library(), keeps=Library())
    monkeypatch.setattr(copier, "libcuda", lambda: both.lets_go)
    for module in (copier, pitched):
        monkeypatch.setattr(module, "quick_libcuda", lambda: both.keeps)
    pitched._driver_call.cache_clear()
    yield both
    pitched._driver_call.cache_clear()


def copy(used: DriverCopier, count: int) -> list[int]:
    addresses = np.arange(count, dtype=np.int64)
    pointer = addresses.ctypes.data
    used(pointer, pointer, pointer, count, True, STREAM)
    return list(range(count))


def test_calls_let_go_of_the_lock(libraries: SimpleNamespace) -> None:
    few, many = (copy(DriverCopier(), count) for count in (1, MOST_KEEPING_LOCK + 1))
    assert (libraries.lets_go.calls, libraries.keeps.calls) == ([few, many], [])


def test_short_calls_for_a_step_keep_the_lock(libraries: SimpleNamespace) -> None:
    """Long ones do not: nobody else would run Python meanwhile."""
    used = DriverCopier(keeps_lock=True)
    one, most, many = (copy(used, count) for count in (1, MOST_KEEPING_LOCK, MOST_KEEPING_LOCK + 1))
    assert (libraries.keeps.calls, libraries.lets_go.calls) == ([one, most], [many])


def test_what_is_long_is_cut_and_its_end_is_short(libraries: SimpleNamespace) -> None:
    used = DriverCopier(max_copies_per_call=MOST_KEEPING_LOCK + 1, keeps_lock=True)
    every = copy(used, MOST_KEEPING_LOCK + 4)
    assert libraries.lets_go.calls == [every[: MOST_KEEPING_LOCK + 1]]
    assert libraries.keeps.calls == [every[MOST_KEEPING_LOCK + 1 :]]


@pytest.fixture
def given(libraries: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Behind how many calls that keep the lock it was given to whoever waits for it, each time."""
    times: list[int] = []
    for module in (copier, pitched):
        monkeypatch.setattr(module, "let_go", lambda: times.append(len(libraries.keeps.calls)))
    return times


@pytest.mark.parametrize("count", [1, 20, MOST_KEEPING_LOCK])
def test_the_thread_that_launches_gets_the_lock_while_a_long_load_is_submitted(
    libraries: SimpleNamespace, given: list[int], count: int
) -> None:
    """However short its calls are: launching would begin when all is submitted. A call that lets go of the lock is too
    short to give it away."""
    used = DriverCopier(keeps_lock=True)
    for _ in range(300):
        copy(used, count)
    longest = max(np.diff([0, *given, 300])) * (count + CALL_DESCRIPTORS)
    assert MOST_IN_A_ROW // 2 < longest <= MOST_IN_A_ROW
    assert len(given) <= 300 * (count + CALL_DESCRIPTORS) / longest, "and no more often"
    assert (len(libraries.keeps.calls), libraries.lets_go.calls) == (300, [])


def test_a_long_call_gives_the_lock_away_by_itself(libraries: SimpleNamespace, given: list[int]) -> None:
    used = DriverCopier(keeps_lock=True)
    for _ in range(20):
        for count in (MOST_KEEPING_LOCK, MOST_KEEPING_LOCK + 1):
            copy(used, count)
    assert given == []
    assert len(libraries.lets_go.calls) == 20


def test_whoever_waits_for_the_lock_has_the_time_to_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python up to 3.10 is back at once where it is to sleep for no time."""
    slept: list[float] = []
    monkeypatch.setattr(driver.time, "sleep", slept.append)
    driver.let_go()
    assert min(slept) > 0


def test_the_thread_that_launches_gets_the_lock_between_pitched_copies(
    libraries: SimpleNamespace, given: list[int]
) -> None:
    """Also where each call has few, as many as come in between two turns."""
    for _ in range(40):
        copy_pitched(np.zeros(20, dtype=COPY), STREAM)
    assert len(given) >= 800 // MOST_PITCHED_IN_A_ROW
    assert max(np.diff([0, *given, 800])) <= MOST_PITCHED_IN_A_ROW


def test_pitched_copies_keep_the_lock(libraries: SimpleNamespace) -> None:
    copies = np.zeros(3, dtype=COPY)
    copy_pitched(copies, STREAM)
    first = copies.ctypes.data
    assert libraries.keeps.calls == [[first + number * COPY.itemsize] for number in range(3)]
    assert libraries.lets_go.calls == []
