"""The submitting threads keep to the pace of the device: a part is copied, another is next, and nobody else waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from kv_connector.errors import TransferError
from kv_connector.transfer import engine as engine_module
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.submission import queue as queue_module
from kv_connector.transfer.submission.queue import SubmittingThread
from kv_connector.types import CopyJob
from tests.copies import LOAD, SAVE, ids, job
from tests.engines import cut, ends, make_engine, never_submits

SECONDS = 30
"""After which what should have come does not."""
BLOCKS = [0, 1, 2, 3, 4]


class Device:
    """Whose events come when the test lets them."""

    def __init__(self) -> None:
        self.waits: queue.Queue[Event] = queue.Queue()  # of threads, on the host, as they begin
        self.lanes: list[Lane] = []
        self.is_lost = False
        self.has_refused = threading.Event()  # a copy, once it was lost

    def wait_begins(self) -> Event:
        """The next event that a thread waits for, from now on."""
        return self.waits.get(timeout=SECONDS)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.has_come = threading.Event()

    def query(self) -> bool:
        if self.device.is_lost:
            raise RuntimeError("device lost")
        return self.has_come.is_set()

    def wait(self, stream: Any = None) -> None:
        """Streams are not looked at here."""

    def synchronize(self) -> None:
        self.device.waits.put(self)
        assert self.has_come.wait(SECONDS)
        if self.device.is_lost:
            raise RuntimeError("device lost")

    def elapsed_time(self, end_event: Event) -> float:
        return 1.0


class Lane:
    is_synchronous = False
    handle = 0

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = object()
        self.positions: list[Event] = []
        self.ends: list[Event] = []

    def current(self) -> None:
        """The model's."""

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def position(self) -> Event:
        self.positions.append(Event(self.device))
        return self.positions[-1]

    def end(self) -> Event:
        if self.device.is_lost:
            raise RuntimeError("device lost")
        self.ends.append(Event(self.device))
        return self.ends[-1]

    def mark(self, stream: Any = None) -> Event:
        return Event(self.device)

    def recycle(self, events: list[Any]) -> None:
        assert not set(events) & {*self.positions, *self.ends}

    def wait_idle(self) -> None:
        """Whatever the test has let come."""


class CountedPath:
    """Copies like another path and remembers the host blocks and the thread of each copy."""

    def __init__(self, path: CopyPath, device: Device) -> None:
        self.path = path
        self.device = device
        self.copies: list[tuple[list[int], threading.Thread]] = []

    @property
    def num_copies(self) -> int:
        return len(self.copies)

    @property
    def blocks(self) -> list[list[int]]:
        return [blocks for blocks, _ in self.copies]

    def copy(self, copy: BlockCopy) -> None:
        if self.device.is_lost:
            self.device.has_refused.set()
            raise TransferError("device lost")
        self.path.copy(copy)
        self.copies.append((copy.host_ids.tolist(), threading.current_thread()))

    def close(self) -> None:
        self.path.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Engines have submitting threads, and copy to and from this one, a block at a time."""
    made = Device()

    def make_lane(*_: object, **__: object) -> Lane:
        made.lanes.append(Lane(made))
        return made.lanes[-1]

    monkeypatch.setattr(queue_module, "prepare_thread", lambda index: None)
    monkeypatch.setattr(queue_module, "index_of", lambda device: 0)
    monkeypatch.setattr(engine_module, "make_submitter", SubmittingThread)
    monkeypatch.setattr(engine_module, "make_lane", make_lane)
    yield made
    assert made.waits.empty(), "threads wait for nothing else"


def engine_on(device: Device) -> tuple[TransferEngine, CountedPath]:
    engine, _, _ = make_engine()
    path = CountedPath(engine._queues[SAVE].paths[0], device)
    for submission_queue in engine._queues.values():
        submission_queue.paths = (path,)
    cut(engine, 1)
    return engine, path


def in_time(call: Callable[[], Any]) -> Any:
    """What the call returns, of which the test is that it does: on a thread that may stand still for ever."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert results, "it waits for something"
    return results[0]


def close(engine: TransferEngine, device: Device) -> list[tuple[int, bool]]:
    """The ends of all jobs, once everything has come."""

    def come() -> None:
        while (event := device.waits.get(timeout=SECONDS)) is not None:
            event.has_come.set()

    coming = threading.Thread(target=come, daemon=True)
    coming.start()
    in_time(lambda: [engine.close()])
    device.waits.put(None)  # type: ignore[arg-type]
    coming.join(SECONDS)
    return ends(engine.poll())


def test_two_parts_are_under_way_at_most_and_none_before_the_device_may_begin(device: Device) -> None:
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, BLOCKS, BLOCKS)])
    save = device.lanes[1]
    event = device.wait_begins()
    assert event is save.positions[0]
    assert path.num_copies == 0, "the model has not computed it yet"
    for number in range(3):
        event.has_come.set()
        event = device.wait_begins()
        assert event is save.ends[number]
        assert path.num_copies == number + 2
    event.has_come.set()
    assert close(engine, device) == [(1, True)]
    assert path.blocks == [[block] for block in BLOCKS], "each once"


def test_a_fence_has_at_once_what_the_thread_waits_with(device: Device) -> None:
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, BLOCKS, BLOCKS)])
    position = device.wait_begins()
    in_time(lambda: [engine.fence()])
    assert path.num_copies == len(BLOCKS)
    position.has_come.set()
    assert close(engine, device) == [(1, True)]
    assert path.blocks == [[block] for block in BLOCKS], "each once"


def test_a_thread_that_has_waited_asks_anew(device: Device) -> None:
    """What it was to submit has been submitted meanwhile, and that submission has ended; another one is next."""
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, [0], [0])])
    first = device.wait_begins()
    engine.fence()
    device.lanes[1].ends[0].has_come.set()
    assert ends(engine.poll()) == [(1, True)]
    engine.submit_save([job(2, SAVE, [1], [1]), job(3, SAVE, [2], [2])])
    first.has_come.set()
    second = device.wait_begins()
    assert second is device.lanes[1].positions[1]
    assert path.blocks == [[0]]
    second.has_come.set()
    assert close(engine, device) == [(2, True), (3, True)]
    assert path.blocks == [[0], [1], [2]]


def test_parts_that_others_have_submitted_count(device: Device) -> None:
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, BLOCKS, BLOCKS)])
    device.wait_begins().has_come.set()
    event = device.wait_begins()
    assert engine._queues[SAVE].advance()
    event.has_come.set()
    event = device.wait_begins()
    assert event is device.lanes[1].ends[1]
    assert path.num_copies == 3
    event.has_come.set()
    assert close(engine, device) == [(1, True)]
    assert path.num_copies == len(BLOCKS)


def test_a_step_s_load_goes_past_a_thread_that_waits(device: Device) -> None:
    """Its first group at once, the others as soon as the thread comes, which waits for nothing in front of them."""
    engine, path = engine_on(device)
    engine.submit_background_load([CopyJob(1, LOAD, ids(0), ids(0), "r", num_guarded=1)], engine.mark())
    after = device.wait_begins()
    in_time(lambda: engine.submit_load([job(2, LOAD, list(range(1, 9)), list(range(1, 9)))]))
    assert path.blocks == [list(range(1, 9))]
    assert in_time(lambda: [engine.wait_layer("2")]) == [frozenset()]
    assert path.blocks == [list(range(1, 9))] * 2
    after.has_come.set()
    event = device.wait_begins()
    assert event is device.lanes[0].ends[0]
    event.has_come.set()
    assert close(engine, device) == [(1, True), (2, True)]
    assert path.blocks[2:] == [[0]]


def test_the_thread_submits_a_step_s_load_without_a_pause(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, path = engine_on(device)
    monkeypatch.setattr(engine, "_layer_groups", lambda num_blocks: (range(2), range(2, 4), range(4, 6)))
    blocks = list(range(8))
    engine.submit_load([job(1, LOAD, blocks, blocks)])
    engine.submit_background_load([job(2, LOAD, [8], [8])], engine.mark())
    event = device.wait_begins()
    assert path.blocks == [blocks] * 3, "all groups, though the device has ended none"
    assert event is device.lanes[0].ends[1]
    event.has_come.set()
    assert close(engine, device) == [(1, True), (2, True)]


def test_loads_do_not_wait_for_a_thread_that_waits_with_saves(device: Device) -> None:
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, [0], [0])])
    position = device.wait_begins()
    engine.submit_background_load([job(number, LOAD, [number], [number]) for number in (2, 3, 4)], engine.mark())
    event = device.wait_begins()
    assert event is device.lanes[0].ends[0]
    assert path.blocks == [[2], [3]]
    position.has_come.set()
    event.has_come.set()
    assert close(engine, device) == [(1, True), (2, True), (3, True), (4, True)]


def test_what_is_guarded_is_not_submitted_before_its_blocks_are_free(device: Device) -> None:
    engine, path = engine_on(device)
    blocks = [0, 1, 2]
    engine.submit_background_load([CopyJob(1, LOAD, ids(*blocks), ids(*blocks), "r", num_guarded=1)], engine.mark())
    after = device.wait_begins()
    assert after not in device.lanes[0].ends
    assert path.blocks == [[0], [1]]
    after.has_come.set()
    event = device.wait_begins()
    assert event is device.lanes[0].ends[0]
    event.has_come.set()
    assert close(engine, device) == [(1, True)]


def test_closing_ends_what_a_thread_waits_with(device: Device) -> None:
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, BLOCKS, BLOCKS)])
    engine.submit_background_load([CopyJob(2, LOAD, ids(5), ids(5), "r", num_guarded=1)], engine.mark())
    waits = [device.wait_begins(), device.wait_begins()]
    for event in waits:
        device.waits.put(event)  # both come once the engine closes, whichever is first
    assert close(engine, device) == [(1, True), (2, True)]
    assert sorted(path.blocks) == [[0], [1], [2], [3], [4], [5]]
    assert not any(thread.name == "kv-connector-submit" for thread in threading.enumerate())


def test_a_lost_device_ends_what_a_thread_waits_with(device: Device) -> None:
    engine, path = engine_on(device)
    engine.submit_save([job(1, SAVE, BLOCKS, BLOCKS)])
    position = device.wait_begins()
    engine.submit_save([job(2, SAVE, [5], [5])])
    device.is_lost = True
    position.has_come.set()
    assert device.has_refused.wait(SECONDS), "the thread has asked, and nobody else"
    in_time(lambda: [engine.close()])
    assert ends(engine.poll()) == [(1, False), (2, False)]
    assert path.num_copies == 0
    assert not any(thread.name == "kv-connector-submit" for thread in threading.enumerate())


def test_a_step_on_a_lost_device_ends_what_is_queued_and_raises_nothing(device: Device) -> None:
    engine, _ = engine_on(device)
    for submitter in engine._submitters.values():
        submitter.close()
    never_submits(engine)
    engine.submit_save([job(1, SAVE, BLOCKS, BLOCKS)])
    engine.catch_up()
    device.is_lost = True
    engine.catch_up()
    assert ends(engine.poll()) == [(1, False)]
