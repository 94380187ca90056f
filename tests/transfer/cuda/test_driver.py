"""Calls of the driver leave the thread as they found it, and say what went wrong.

The driver is a stand-in that remembers a thread's state: the real one is called by every test with a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kv_connector.errors import TransferError
from kv_connector.peer.base import PeerError
from kv_connector.transfer.cuda import driver


class Driver:
    """A thread's contexts, the last one current, and its mode towards captures; 2 is out of their way."""

    def __init__(self) -> None:
        self.contexts = [77]
        self.mode = 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.contexts[-1] = context.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"no such device" if code.value == 101 else None
        return 0


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(driver, "libcuda", lambda: stand_in)
    monkeypatch.setattr(driver, "primary_context", lambda device: ctypes.c_void_p(1000 + device))
    return stand_in


def call(thread: Driver, code: int) -> None:
    with driver.on_device(3):
        assert (thread.contexts, thread.mode) == ([77, 1003], 2)
        driver.check(code, "cuSomething")


def test_a_call_on_a_device_changes_nothing_behind_it(thread: Driver) -> None:
    call(thread, 0)
    assert (thread.contexts, thread.mode) == ([77], 0)
    with pytest.raises(TransferError, match="cuSomething failed with CUDA error 101: no such device"):
        call(thread, 101)
    assert (thread.contexts, thread.mode) == ([77], 0)


def test_a_thread_of_ours_stays_out_of_the_way_of_captures(thread: Driver) -> None:
    driver.prepare_thread(1)
    assert (thread.contexts, thread.mode) == ([1001], 2)
    with driver.on_device(1):
        pass
    assert thread.mode == 2


def test_who_calls_names_the_error(thread: Driver) -> None:
    with pytest.raises(PeerError, match="cuSomething failed with CUDA error 5: unknown"):
        driver.check(5, "cuSomething", PeerError)
