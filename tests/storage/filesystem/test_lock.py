"""Threads of this process and of another one that want a folder's lock: who is waited for, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_connector.storage.filesystem import layout
from kv_connector.storage.filesystem.layout import FolderLayout
from tests.storage.storages import SECONDS
from tests.waiting import until


class Clock:
    """Stands still until it is told otherwise; `sleep` does what `pause` is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pause: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pause()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(layout, "time", SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep))
    return made


@pytest.fixture
def mine(tmp_path: Path) -> FolderLayout:
    made = FolderLayout(tmp_path)
    made.claim()
    return made


@pytest.fixture
def others(tmp_path: Path) -> FolderLayout:
    """What another process has of the folder: locks are those of open files."""
    return FolderLayout(tmp_path)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def enter(folder: FolderLayout) -> None:
    with folder.exclusive():
        pass


def begin_to_enter(folder: FolderLayout, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Future[None]:
    """Returns when the time of the thread that enters runs."""
    take_turn, comes = folder._take_turn, threading.Event()

    def tell(deadline: float) -> None:
        comes.set()
        take_turn(deadline)

    monkeypatch.setattr(folder, "_take_turn", tell)
    entered = threads.submit(enter, folder)
    assert comes.wait(SECONDS)
    return entered


def test_while_a_thread_of_ours_is_within_nobodys_time_runs_out(
    mine: FolderLayout,
    others: FolderLayout,
    threads: ThreadPoolExecutor,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a thread that never rests a start lists the folder for seconds: a batch that gave up would be lost. So it
    would be where another process, too, has waited for ours, and is within before it for a moment."""
    monkeypatch.setattr(layout, "LOCK_SECONDS", 0.05)
    open_marker, seconds_outside = mine._open_marker, mine._seconds_outside
    of_others, looks = ExitStack(), list[float]()

    def look() -> float:
        looks.append(seconds_outside())
        return looks[-1]

    def open_behind_others() -> int:
        of_others.enter_context(others.exclusive())
        return open_marker()

    clock.pause = of_others.close
    with mine.exclusive():
        monkeypatch.setattr(mine, "_open_marker", open_behind_others)
        entered = begin_to_enter(mine, threads, monkeypatch)
        clock.now += 60
        looks.clear()
        monkeypatch.setattr(mine, "_seconds_outside", look)
        until(lambda: entered.done() or len(looks) > 4, told=lambda: looks, seconds=SECONDS)
    entered.result(SECONDS)


def test_all_that_wait_for_another_process_give_up_together(
    mine: FolderLayout,
    others: FolderLayout,
    threads: ThreadPoolExecutor,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If each waited anew while the next ones come in before it, some would wait for as long as any come."""
    monkeypatch.setattr(layout, "LOCK_SECONDS", 0.05)
    sleeps, ends = threading.Event(), threading.Event()

    def pause() -> None:
        sleeps.set()
        assert ends.wait(SECONDS)

    clock.pause = pause
    with others.exclusive():
        first = begin_to_enter(mine, threads, monkeypatch)
        assert sleeps.wait(SECONDS)
        second = begin_to_enter(mine, threads, monkeypatch)
        clock.now += 1
        with pytest.raises(TimeoutError, match="another process"):
            second.result(SECONDS)
        assert not first.done()
        ends.set()
        with pytest.raises(TimeoutError, match="another process"):
            first.result(SECONDS)
    enter(mine)
