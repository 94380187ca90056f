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
from kv_connector.transfer.cuda.copier import MAX_COPIES_PER_CALL, DriverCopier
from kv_connector.transfer.cuda.pitched import COPY, MOST_IN_A_ROW, copy_pitched

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
    """What their stream waits for may be in Python."""
    one, most = (copy(DriverCopier(), count) for count in (1, MAX_COPIES_PER_CALL))
    assert (libraries.lets_go.calls, libraries.keeps.calls) == ([one, most], [])


def test_what_is_long_is_cut(libraries: SimpleNamespace) -> None:
    every = copy(DriverCopier(max_copies_per_call=5), 12)
    assert libraries.lets_go.calls == [every[:5], every[5:10], every[10:]]


@pytest.fixture
def given(libraries: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Behind how many calls that keep the lock it was given to whoever waits for it, each time."""
    times: list[int] = []
    monkeypatch.setattr(pitched, "let_go", lambda: times.append(len(libraries.keeps.calls)))
    return times


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
    assert len(given) >= 800 // MOST_IN_A_ROW
    assert max(np.diff([0, *given, 800])) <= MOST_IN_A_ROW


def test_pitched_copies_keep_the_lock(libraries: SimpleNamespace) -> None:
    copies = np.zeros(3, dtype=COPY)
    copy_pitched(copies, STREAM)
    first = copies.ctypes.data
    assert libraries.keeps.calls == [[first + number * COPY.itemsize] for number in range(3)]
    assert libraries.lets_go.calls == []
