"""Transfer engines for tests, with lanes whose events complete when the test says so."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kv_connector.config import Config
from kv_connector.errors import TransferError
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import CopyJob, Direction
from tests.copies import bf16_apart, filled, make_pool


class FailingPath:
    """Copies like another path and raises on the k-th call, counted from 0."""

    def __init__(self, path: CopyPath, fail_on: int) -> None:
        self.path = path
        self.fail_on = fail_on
        self.calls = 0
        self.slice_bytes = path.slice_bytes

    def copy(self, copy: BlockCopy) -> None:
        self.calls += 1
        if self.calls - 1 == self.fail_on:
            raise TransferError("fault injected")
        self.path.copy(copy)

    def close(self) -> None:
        self.path.close()


class ManualLane:
    """A lane whose events complete when the test says so; it records every wait."""

    is_synchronous = False
    handle = 0

    def __init__(self) -> None:
        self.stream = object()
        self.marks: list[ManualEvent] = []
        self.ends: list[ManualEvent] = []  # of `marks`: a thread may wait for these on the host
        self.marked: list[Any] = []  # the stream of each
        self.waited: list[ManualEvent] = []
        self.waits: list[tuple[ManualEvent, Any]] = []  # with the stream that waits, None for the current one

    def current(self) -> None:
        """None says so in `waits`."""

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def position(self) -> ManualEvent | None:
        """Left out: `marks` has the events that the engine keeps."""
        return None

    def end(self) -> ManualEvent:
        self.ends.append(self.mark(self.stream))
        return self.ends[-1]

    def mark(self, stream: Any = None) -> ManualEvent:
        self.marks.append(ManualEvent(self))
        self.marked.append(stream)
        return self.marks[-1]

    def wait_idle(self) -> None:
        for event in self.marks:
            event.done = True

    def recycle(self, events: list[Any]) -> None:
        for event in events:
            assert event not in self.ends, "whoever waits for it would wait for what somebody else records"
            assert any(later.done or later.lost for later in self.marks[self.marks.index(event) :])


class ManualEvent:
    def __init__(self, lane: ManualLane) -> None:
        self.lane = lane
        self.done = False
        self.lost = False

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("device lost")
        return self.done

    def wait(self, stream: Any = None) -> None:
        self.lane.waited.append(self)
        self.lane.waits.append((self, stream))

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, end_event: ManualEvent) -> float:
        return float(self.lane.marks.index(end_event) - self.lane.marks.index(self))


def make_engine(
    device: torch.device | None = None, fail_on: int | None = None, **settings: Any
) -> tuple[TransferEngine, CacheLayout, HostPool]:
    layout = filled(bf16_apart, device or torch.device("cpu"))
    pool = make_pool(layout)
    config = Config(layer_group_bytes=4096, **settings)
    path = None if fail_on is None else FailingPath(make_path(raw_form(layout), pool, config), fail_on)
    return TransferEngine(raw_form(layout), pool, config, path), layout, pool


class LateSubmitter:
    """A submitting thread that never comes: the test submits, or what it calls has to."""

    def wake(self) -> None:
        """Sleep on."""

    def close(self) -> None:
        """It never began."""


def never_submits(engine: TransferEngine) -> None:
    """From now on."""
    engine._submitters = dict.fromkeys(Direction, LateSubmitter())


def cut(engine: TransferEngine, num_blocks: int) -> None:
    """Copies of whole blocks into slices of so many."""
    engine._slice_blocks = dict.fromkeys(Direction, num_blocks)


def submit_all(engine: TransferEngine) -> None:
    """Have everything on the device's streams, whatever the thread has done."""
    while any(queue.advance() for queue in engine._queues.values()):
        pass


def load_in_background(engine: TransferEngine, lane: ManualLane, *jobs: CopyJob) -> None:
    """Behind nothing: what the current stream holds is done."""
    after = engine.mark()
    lane.marks[-1].done = True
    assert engine.submit_background_load(jobs, after) == frozenset()


def ends(completions: Any) -> list[tuple[int, bool]]:
    return sorted((completion.job_id, completion.ok) for completion in completions)
