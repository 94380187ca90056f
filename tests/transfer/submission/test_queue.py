"""Copies that are queued: whoever submits them, and whenever, each job ends once, and nobody waits in vain."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_connector.config import PathName
from kv_connector.errors import TransferError
from kv_connector.transfer import engine as engine_module
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.layout import layer_groups
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.torch import TorchPath
from kv_connector.transfer.submission import queue as queue_module
from kv_connector.transfer.submission.queue import SubmissionQueue, SubmittingThread
from kv_connector.transfer.submission.submissions import BlockPairs, Part, Submission
from kv_connector.types import CopyJob, Direction
from tests.copies import LOAD, NUM_DEVICE, NUM_HOST, SAVE, bf16_apart, filled, ids, job, make_pool
from tests.engines import (
    LateSubmitter,
    ManualEvent,
    ManualLane,
    cut,
    ends,
    make_engine,
    never_submits,
    submit_all,
)

LAYERS = ("0", "1", "2")


class WatchedPath:
    """Copies like another path, raises when told to, and says so to whoever waits for a copy."""

    def __init__(self, path: CopyPath) -> None:
        self.path = path
        self.fails_in = -1  # so many copies from the next one on
        self.urgent: list[bool] = []
        self.threads: list[str] = []
        self.called = threading.Event()

    def copy(self, copy: BlockCopy) -> None:
        self.urgent.append(copy.urgent)
        self.threads.append(threading.current_thread().name)
        self.called.set()
        self.fails_in -= 1
        if self.fails_in == -1:
            raise TransferError("fault injected")
        self.path.copy(copy)

    def close(self) -> None:
        self.path.close()


class Turn:
    """A lock that says when somebody has to wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.is_waited_for.set()
            self.lock.acquire()

    def locked(self) -> bool:
        return self.lock.locked()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def watch(engine: TransferEngine) -> WatchedPath:
    watched = WatchedPath(engine._queues[SAVE].paths[0])
    for queue in engine._queues.values():
        queue.paths = (watched,)
    return watched


class PositionsLane(ManualLane):
    """And the model runs when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[ManualEvent] = []

    def position(self) -> ManualEvent:
        self.positions.append(ManualEvent(self))
        return self.positions[-1]


class QueuesMachine(RuleBasedStateMachine):
    """An engine whose submitting threads run when the rules say so, a part at a time; no two jobs share a block."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[PositionsLane] = []
        with (
            patch.object(engine_module, "make_lane", self._make_lane),
            patch.object(engine_module, "make_submitter", lambda *_: LateSubmitter()),
        ):
            self.engine, self.layout, self.pool = make_engine()
        self.path = watch(self.engine)
        cut(self.engine, 1)
        self.jobs: dict[int, CopyJob] = {}  # that have not ended
        self.all_failed: set[int] = set()  # as the path knows
        self.told: set[int] = set()  # sync loads that failed, as submitting and waiting told
        self.num_jobs = 0
        self.free_device = set(range(NUM_DEVICE))
        self.free_host = set(range(NUM_HOST))
        self.value = 0

    def _make_lane(self, *_: object, **__: object) -> PositionsLane:
        self.made.append(PositionsLane())
        return self.made[-1]

    def teardown(self) -> None:
        self._end(self.engine.drain())
        assert not self.jobs, "every job ends"
        assert not self.engine._in_flight

    def _job(self, direction: Direction, count: int, request_id: str | None = None) -> CopyJob:
        count = min(count, len(self.free_device), len(self.free_host))
        device = [self.free_device.pop() for _ in range(count)]
        host = [self.free_host.pop() for _ in range(count)]
        self.num_jobs += 1
        self.value += 1
        for region, column in zip(self.layout.regions, raw_form(self.layout).columns(self.pool.tensor), strict=True):
            (region.view if direction is SAVE else column)[device if direction is SAVE else host] = self.value % 251
        made = CopyJob(self.num_jobs, direction, np.array(device, dtype=np.int64), np.array(host, dtype=np.int64))
        self.jobs[made.job_id] = made
        return made

    def _end(self, completions: Any) -> None:
        for job_id, ok in ends(completions):
            done = self.jobs.pop(job_id)  # KeyError: it ended twice
            self.free_device.update(done.device_ids.tolist())
            self.free_host.update(done.host_ids.tolist())
            columns = raw_form(self.layout).columns(self.pool.tensor)
            for region, column in zip(self.layout.regions, columns, strict=True) if ok else ():
                assert torch.equal(region.view[done.device_ids], column[done.host_ids])

    @rule(count=st.integers(1, 3))
    def save(self, count: int) -> None:
        self.engine.submit_save([self._job(SAVE, count)])

    @rule(counts=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=3))
    def load_in_background(self, counts: list[tuple[int, int]]) -> None:
        jobs = [self._job(LOAD, count) for count, _ in counts]
        guarded = [min(job.num_blocks, count) for job, (_, count) in zip(jobs, counts, strict=True)]
        jobs = [replace(job, num_guarded=count) for job, count in zip(jobs, guarded, strict=True)]
        self.jobs.update({job.job_id: job for job in jobs})
        self.engine.submit_background_load(jobs, self.engine.mark())

    @rule(counts=st.lists(st.integers(1, 4), min_size=1, max_size=2), is_urgent=st.booleans())
    def load(self, counts: list[int], is_urgent: bool) -> None:
        self.engine.wait_all()  # as every step does in the end
        jobs = [self._job(LOAD, count) for count in counts]
        in_line = self._in_line(LOAD)
        calls = len(self.path.urgent)
        failed = self.engine.submit_load(jobs, is_urgent)
        assert failed in (frozenset(), {j.job_id for j in jobs if j.num_blocks})
        if is_urgent:
            assert self._in_line(LOAD) == in_line, "all of it at once, and nothing of what others have queued"
        elif any(j.num_blocks for j in jobs):
            assert len(self.path.urgent) == calls + 1, "the first group at once, and nothing else"

    @rule(direction=st.sampled_from(Direction))
    def somebody_submits(self, direction: Direction) -> None:
        self.engine._queues[direction].advance()

    @rule(direction=st.sampled_from(Direction))
    def thread_helps(self, direction: Direction) -> None:
        queue, lane = self.engine._queues[direction], self.engine._queues[direction].lane
        front = queue._waiting[0] if queue._waiting else None
        before = self._in_line(direction)
        event = queue.help()
        if event is not None:
            assert not event.done, "a thread waits for what is still to come alone"
            assert self._in_line(direction) == before
        elif front is not None:
            assert self._in_line(direction) < before
            assert front.is_awaited or sum(not end.done for end in lane.ends) <= 2

    @rule(num_copied=st.integers(0, 2))
    def fail(self, num_copied: int) -> None:
        """The next copy, or one of those behind it."""
        self.path.fails_in = num_copied

    @rule(layer=st.sampled_from(LAYERS))
    def wait_layer(self, layer: str) -> None:
        load = self.engine._load
        failed = self.engine.wait_layer(layer)
        if load is not None and not failed:
            group = [self.layout.last_region(layer) in group for group in load.groups].index(True)
            assert any((event, None) in self.made[0].waits for event in load.events[group:])
        self._check_failed(load, failed)

    @rule()
    def wait_all(self) -> None:
        load = self.engine._load
        failed = self.engine.wait_all()
        assert load is None or load.end is not None
        self._check_failed(load, failed)
        assert not failed or not self.engine.wait_all(), "told once"

    def _check_failed(self, load: Any, failed: frozenset[int]) -> None:
        if failed:
            assert load.is_lost
            assert failed == {j.job_id for j in load.jobs}
            assert (load.end, None) in self.made[0].waits, "what computes these blocks comes behind what was enqueued"

    @rule(data=st.data())
    def wait_jobs(self, data: st.DataObject) -> None:
        job_ids = data.draw(st.sets(st.sampled_from(sorted(self.jobs)))) if self.jobs else set()
        flying = [s for s in self.engine._in_flight if any(j.job_id in job_ids for j in s.jobs)]
        lost = self.engine.wait_jobs(job_ids)
        waited = self.made[0].waits + self.made[1].waits
        assert all((s.end, None) in waited for s in flying)
        assert lost == {j.job_id for s in flying if s.is_lost for j in s.jobs}

    @rule()
    def fence(self) -> None:
        self.engine.fence()
        assert not any(queue.advance() for queue in self.engine._queues.values()), "nothing is left in a queue"
        waited = self.made[0].waits + self.made[1].waits
        for stream in (None, self.made[0].stream):
            assert all((s.end, stream) in waited for s in self.engine._in_flight)

    @rule()
    def two_steps_without_the_thread(self) -> None:
        before = {way: self._in_line(way) for way in Direction}
        idle = {way: self._is_idle(way) for way in Direction}
        for _ in range(2):
            self.engine.catch_up()
        for way in Direction:
            assert (self._in_line(way) < before[way]) == idle[way], "where the device has nothing else to do"

    def _is_idle(self, direction: Direction) -> bool:
        """And could begin with a part."""
        queue = self.engine._queues[direction]
        if not queue._waiting or any(not end.done for end in queue.lane.ends):
            return False
        after = queue._waiting[0].next_part().after
        return after is None or after.done

    def _in_line(self, direction: Direction) -> int:
        waiting = self.engine._queues[direction]._waiting
        return sum(s.num_bytes - sum(s.part_bytes) for s in waiting)

    @rule()
    def model_runs(self) -> None:
        for lane in self.made:
            for event in lane.positions:
                event.done = True

    @precondition(lambda self: any(not event.done for lane in self.made for event in lane.marks))
    @rule(data=st.data())
    def device_runs(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.made if not all(e.done for e in lane.marks)]))
        first = [event.done for event in lane.marks].index(False)
        for event in lane.marks[: data.draw(st.integers(first, len(lane.marks) - 1)) + 1]:
            event.done = True

    @rule()
    def poll(self) -> None:
        ended = {id(s) for s in self.engine._in_flight if s.end is not None and s.end.query()}
        expected = {j.job_id for s in self.engine._in_flight if id(s) in ended for j in s.jobs}
        waiting_before = set(self.jobs)
        completions = self.engine.poll()
        assert expected <= {c.job_id for c in completions} <= waiting_before
        self._end(completions)

    @invariant()
    def what_is_pending_is_what_has_not_arrived(self) -> None:
        for way in Direction:
            pending = self.engine.pending_bytes(way)
            assert self._in_line(way) <= pending or any(not s.ok for s in self.engine._in_flight)
            assert pending <= sum(s.num_bytes for s in self.engine._in_flight if s.direction is way)


TestQueues = QueuesMachine.TestCase
TestQueues.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have a submitting thread, also on the CPU."""
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(queue_module, "prepare_thread", lambda index: None)
    monkeypatch.setattr(queue_module, "index_of", lambda device: 0)
    monkeypatch.setattr(engine_module, "make_submitter", SubmittingThread)


def test_the_thread_submits_what_nobody_waits_for(device: torch.device, threaded: None) -> None:
    engine, layout, pool = make_engine(device)
    watched = watch(engine)
    for number, (way, submit) in enumerate(
        [(SAVE, engine.submit_save), (LOAD, lambda jobs: engine.submit_background_load(jobs, engine.mark()))]
    ):
        watched.called.clear()
        submit([job(number, way, [3 + number], [7])])
        assert watched.called.wait(30)
        assert ends(engine.drain()) == [(number, True)]
    assert watched.threads == ["kv-connector-submit"] * 2
    assert len({id(submitter) for submitter in engine._submitters.values()}) == 2
    for region in layout.regions:
        assert torch.equal(region.view[3], region.view[4])
    engine.close()
    assert not any(thread.name == "kv-connector-submit" for thread in threading.enumerate())
    pool.close()


@pytest.mark.parametrize("name", list(PathName))
def test_bytes_are_right_whoever_submits_them(
    name: PathName, device: torch.device, threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layout, pool = make_engine(device, copy_path=name)
    cut(engine, 1)
    device_ids, host_ids = ids(*range(NUM_DEVICE)), ids(*range(NUM_DEVICE))[::-1].copy()
    first, rest = slice(0, NUM_DEVICE // 2), slice(NUM_DEVICE // 2, NUM_DEVICE)
    for number in range(0, 150, 3):
        for region in layout.regions:
            region.view.random_(0, 256)
        before = [region.view.clone() for region in layout.regions]
        engine.submit_save([CopyJob(number, SAVE, device_ids, host_ids)])
        engine.fence()
        for region in layout.regions:
            region.view.zero_()
        background = CopyJob(number + 1, LOAD, device_ids[first], host_ids[first], "r", num_guarded=NUM_DEVICE // 2)
        engine.submit_background_load([background], engine.mark())
        assert engine.submit_load([CopyJob(number + 2, LOAD, device_ids[rest], host_ids[rest])]) == frozenset()
        for layer in LAYERS:
            assert engine.wait_layer(layer) == frozenset()
        assert engine.wait_jobs([number + 1]) == frozenset()
        assert all(torch.equal(region.view, old) for region, old in zip(layout.regions, before, strict=True))
        assert ends(engine.drain()) == [(number + i, True) for i in range(3)]
    engine.close()
    pool.close()


def test_without_its_thread_an_engine_submits_itself(
    threaded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: int) -> None:
        raise TransferError("no such device")

    monkeypatch.setattr(queue_module, "prepare_thread", refuse)
    engine, _, pool = make_engine()
    engine.submit_save([job(1, SAVE, [0], [0]), job(2, SAVE, [1], [1])])
    assert engine.poll() == []
    engine.catch_up()
    assert engine.poll() == [], "the thread has a step's time"
    engine.catch_up()
    assert ends(engine.poll()) == [(1, True), (2, True)]
    engine.submit_save([job(3, SAVE, [0], [2])])
    engine.close()
    assert ends(engine.poll()) == [(3, True)]
    assert "by the model-runner thread from now on: no such device" in caplog.text
    pool.close()


def test_a_thread_that_gets_on_is_left_alone(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    never_submits(engine)
    watched = watch(engine)
    cut(engine, 1)
    engine.submit_save([job(1, SAVE, list(range(6)), list(range(6)))])
    counts = []
    for _ in range(3):
        engine.catch_up()
        engine._queues[SAVE].advance()
        lanes[1].marks[-1].done = True
        counts.append(len(watched.urgent))
    engine.catch_up()
    engine.catch_up()
    assert [*counts, len(watched.urgent)] == [1, 2, 3, 4]
    for _ in range(3):
        engine.catch_up()
    assert len(watched.urgent) == 4, "the device is busy with a part"
    lanes[1].marks[-1].done = True
    engine.catch_up()
    assert len(watched.urgent) == 5, "a thread that does not come for a step is not waited for another one"


def test_a_step_leaves_a_queue_to_the_thread_that_submits(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine()
    never_submits(engine)
    watched = watch(engine)
    engine.submit_save([job(1, SAVE, [0], [0])])
    with engine._queues[SAVE]._lock:
        step = threading.Thread(target=engine.catch_up, daemon=True)
        step.start()
        step.join(30)
        assert not step.is_alive()
    assert watched.urgent == []


def test_a_step_does_not_wait_for_a_thread_that_got_on_since_the_last_one(lanes: list[ManualLane]) -> None:
    """It is at its next part by now, and needs no help."""
    engine, _, _ = make_engine()
    never_submits(engine)
    cut(engine, 1)
    engine.submit_save([job(1, SAVE, [0, 1, 2], [0, 1, 2])])
    engine.catch_up()
    engine._queues[SAVE].advance()
    with engine._queues[SAVE]._lock:
        step = threading.Thread(target=engine.catch_up, daemon=True)
        step.start()
        step.join(30)
        assert not step.is_alive()


def test_a_step_waits_for_a_thread_that_has_been_at_a_part_for_a_step(
    lanes: list[ManualLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for Python's lock, most likely, which the step has, and gets it so."""
    engine, _, _ = make_engine()
    never_submits(engine)
    watched = watch(engine)
    cut(engine, 1)
    queue, turn = engine._queues[SAVE], Turn()
    monkeypatch.setattr(queue, "_lock", turn)
    engine.submit_save([job(1, SAVE, [0, 1], [0, 1])])
    engine.catch_up()
    with turn:
        step = threading.Thread(target=engine.catch_up, daemon=True)
        step.start()
        assert turn.is_waited_for.wait(30)
        queue._advance(queue._waiting[0])
    step.join(30)
    assert not step.is_alive()
    assert len(watched.urgent) == 1, "the thread gets on, so the next part is left to it"
    lanes[1].marks[-1].done = True
    engine.catch_up()
    assert len(watched.urgent) == 2, "as it was at the last call"


def test_a_step_s_loads_go_before_those_in_line(lanes: list[ManualLane]) -> None:
    engine, layout, _ = make_engine()
    never_submits(engine)
    watched = watch(engine)
    engine.submit_background_load([job(1, LOAD, [0], [0])], engine.mark())
    engine.submit_load([job(2, LOAD, list(range(1, 9)), list(range(1, 9)))])
    assert watched.urgent == [True], "only its first group is submitted"
    form = raw_form(layout)
    groups = layer_groups(layout.layer_stops, form.stored_bytes, 8, 4096)
    first, second = (8 * form.bytes_of(group) for group in groups)
    assert engine.pending_bytes(LOAD) == first + second + raw_form(layout).moved_bytes
    assert engine.wait_layer("0") == frozenset()
    assert watched.urgent == [True]
    assert engine.wait_layer("2") == frozenset()
    assert watched.urgent == [True, False], "the layer needs it"
    submit_all(engine)
    assert watched.urgent == [True, False, False]


@pytest.mark.parametrize("is_long", [False, True])
def test_a_load_that_the_model_waits_for_with_nothing_else_to_do_is_urgent_as_a_whole(
    lanes: list[ManualLane], monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """And submitted as a whole, for the link would have nothing to do until the thread gets on, or the model asks for
    a layer. Of a very long one only the first group."""
    engine, layout, _ = make_engine()
    num_bytes = 8 * raw_form(layout).moved_bytes
    monkeypatch.setattr(engine_module, "MOST_LAUNCHED_BYTES", num_bytes - is_long)
    never_submits(engine)
    watched = watch(engine)
    engine.submit_load([job(1, LOAD, list(range(1, 9)), list(range(1, 9)))], is_urgent=True)
    assert watched.urgent == ([True] if is_long else [True, True])
    submit_all(engine)
    assert watched.urgent == [True, not is_long]


class UnfairLock(Turn):
    """A lock that one thread gets only when the other has to wait elsewhere, as the last to come may."""

    def __init__(self, late: threading.Thread, until: threading.Event) -> None:
        super().__init__()
        self.late = late
        self.until = until
        self.late_comes = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self.late:
            self.late_comes.set()
            assert self.until.wait(30)
        super().__enter__()


def test_a_step_s_load_waits_for_one_part_of_what_the_thread_submits(
    threaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is at the first of many parts; when it has submitted that one, it is the step's turn."""
    engine, _, pool = make_engine()
    cut(engine, 1)
    watched = watch(engine)
    blocks = list(range(2, 12))
    step = threading.Thread(target=lambda: engine.submit_load([job(2, LOAD, [0], [0])]))
    turn = Turn()
    lock = UnfairLock(step, turn.is_waited_for)
    queue = engine._queues[LOAD]
    monkeypatch.setattr(queue, "_next", turn)
    monkeypatch.setattr(queue, "_lock", lock)

    def copy_once_the_step_waits(copy: BlockCopy) -> None:
        if not watched.urgent:
            step.start()
            assert lock.late_comes.wait(30)
        elif len(watched.urgent) == len(blocks) - 1:
            turn.is_waited_for.set()  # the last of all: the step has waited for each of them
        WatchedPath.copy(watched, copy)

    monkeypatch.setattr(watched, "copy", copy_once_the_step_waits)
    engine.submit_background_load([job(1, LOAD, blocks, blocks)], engine.mark())
    assert watched.called.wait(30)
    step.join(30)
    assert watched.threads.index(step.name) == 1
    assert ends(engine.drain()) == [(1, True), (2, True)]
    engine.close()
    pool.close()


@pytest.fixture
def threads_run_until_they_wait() -> Iterator[None]:
    """No thread is interrupted for another's sake."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(seconds)


def test_a_signal_s_handler_that_raises_leaves_the_queue_to_others(threads_run_until_they_wait: None) -> None:
    """As SIGTERM's may, which comes while a step waits for the part that the thread is at: it is handled once the step
    has its turn. The engine that closes then has the rest submitted."""
    layout = filled(bf16_apart, torch.device("cpu"))
    pool = make_pool(layout)
    form = raw_form(layout)
    watched = WatchedPath(TorchPath(form, pool))
    queue = SubmissionQueue(ManualLane(), (watched,), form.bytes_of)  # type: ignore[arg-type]
    regions = range(len(layout.regions))
    at_a_part, step_comes = threading.Event(), threading.Event()

    def submission(block: int) -> Submission:
        pairs = BlockPairs(ids(block), ids(block))
        return Submission(LOAD, (), (regions,), raw_form(layout).moved_bytes, iter([Part(regions, pairs, None)]))

    def interrupt_the_step(copy: BlockCopy) -> None:
        at_a_part.set()
        assert step_comes.wait(30)
        signal.raise_signal(signal.SIGUSR1)  # of this thread: the main one handles it as soon as it runs
        TorchPath.copy(watched.path, copy)

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    background = submission(0)
    queue.put(background)
    with patch.object(watched, "copy", interrupt_the_step):
        thread = threading.Thread(target=queue.help, daemon=True)
        thread.start()
        assert at_a_part.wait(30)
        before = signal.signal(signal.SIGUSR1, refuse)
        try:
            step_comes.set()
            with pytest.raises(KeyboardInterrupt):
                queue.put_first(submission(1))
        finally:
            signal.signal(signal.SIGUSR1, before)
        thread.join(30)
    assert background.end is not None
    other = threading.Thread(target=queue.advance, daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive()


def test_a_load_that_fails_behind_its_first_group_is_told_when_a_layer_needs_it(lanes: list[ManualLane]) -> None:
    engine, _, _ = make_engine(fail_on=1)
    never_submits(engine)
    blocks = list(range(8))
    assert engine.submit_load([job(1, LOAD, blocks, blocks)]) == frozenset()
    assert engine.wait_layer("0") == frozenset()
    assert engine.wait_layer("2") == {1}
    assert lanes[0].waited[-1] == lanes[0].marks[-1]
    assert engine.wait_all() == frozenset()
    assert ends(engine.drain()) == [(1, False)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_whatever_raises_fails_the_job_and_no_thread(
    is_lost: bool, lanes: list[ManualLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = make_engine()
    never_submits(engine)
    cut(engine, 1)
    engine.submit_save([job(1, SAVE, [0, 1], [0, 1])])
    assert engine._queues[SAVE].advance()

    def refuse(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(lanes[1], "on_device", refuse)
    if is_lost:
        monkeypatch.setattr(lanes[1], "end", refuse)
    assert engine._queues[SAVE].advance()
    if not is_lost:
        assert engine.poll() == [], "the first slice may be under way"
        lanes[1].marks[-1].done = True
    assert ends(engine.poll()) == [(1, False)]
