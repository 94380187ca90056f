"""The device of one rank: streams of work that runs late, in any order that streams and events allow.

A stream is a queue of operations. Its head runs at a virtual time of its own once it may: one that waits for an event
may when the event has come. Nothing else orders two streams, so what code under test forgets to order will sooner or
later run the wrong way round. `SimulatedLane`, `SimulatedSubmitter` and `LatePath` are what the transfer engine is
given in place of CUDA's streams, its threads and the copies at once: they are seams of `transfer/`, and nothing of its
own logic is replaced.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kv_connector.config import Config
from kv_connector.errors import TransferError
from kv_connector.transfer import engine as transfer_engine
from kv_connector.transfer.costs.curves import LinkCosts
from kv_connector.transfer.memory.host_form import HostForm
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.torch import TorchPath
from kv_connector.transfer.submission.queue import SubmissionQueue
from kv_connector.types import Direction
from kv_connector.worker import peers as worker_peers

from .checks import Violation
from .clock import VirtualTime

Work = Callable[[], None]
GARBAGE = 0xEE
_SLICES = (1, 2, 4, 1 << 20)  # blocks that are copied at once


class SimulatedEvent:
    """A point of a stream; see `transfer.cuda.streams.Event`."""

    __slots__ = ("done", "_device", "_time", "_followers")

    def __init__(self, device: Device) -> None:
        self.done = False
        self._device = device
        self._time = 0.0
        self._followers: list[Stream | SimulatedSubmitter] = []

    def query(self) -> bool:
        return self.done

    def wait(self, stream: Stream | None = None) -> None:
        if not self.done:
            (stream if stream is not None else self._device.compute).put(None, self)

    def synchronize(self) -> None:
        if self._device.is_submitting:
            raise Violation("stall", f"{self._device.name}: the submitting thread waits for the device with a lock")
        self._device.run_until(self)

    def elapsed_time(self, end_event: SimulatedEvent) -> float:
        return (end_event._time - self._time) * 1e3

    def follow(self, follower: Stream | SimulatedSubmitter) -> None:
        """It goes on when this has come."""
        if follower not in self._followers:
            self._followers.append(follower)

    def come(self) -> None:
        """What is in front of it has run."""
        self.done, self._time = True, self._device.time.now()
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.wake()


class Stream:
    """Operations that run one behind the other: (work, event that they wait for). `seconds` is what one takes about."""

    def __init__(self, device: Device, name: str, seconds: float) -> None:
        self.device = device
        self.name = name
        self.seconds = seconds
        self.queue: deque[tuple[Work | None, SimulatedEvent | None]] = deque()
        self._is_due = False

    def put(self, work: Work | None, after: SimulatedEvent | None = None) -> None:
        """Behind everything that is here; `after` has to have come as well."""
        self.queue.append((work, after))
        if len(self.queue) == 1:
            self.wake()

    def record(self) -> SimulatedEvent:
        """An event behind everything that is here."""
        event = SimulatedEvent(self.device)
        if self.queue:
            self.put(event.come)
        else:
            event.come()
        return event

    def wake(self) -> None:
        """Its head may have become able to run. Events take no time."""
        while self._is_ready() and getattr(self.queue[0][0], "__name__", "") == "come":
            self.run_head()
        if self.queue and not self._is_due and self._is_ready():
            self._is_due = True
            self.device.time.call_after(self.device.delay(self.seconds), self._run_head, self.name)

    def run_head(self) -> bool:
        """Run its head if it may run."""
        if not self._is_ready():
            return False
        work, _ = self.queue.popleft()
        if work is not None and not self.device.is_dead:
            work()
        return True

    def _is_ready(self) -> bool:
        """Heads that only wait for what has come are passed."""
        while self.queue:
            work, after = self.queue[0]
            if after is not None and not after.done:
                after.follow(self)
                return False
            if work is not None:
                return True
            self.queue.popleft()
        return False

    def _run_head(self) -> None:
        self._is_due = False
        if self.device.is_dead:
            return
        self.run_head()
        self.wake()


class Device:
    """Streams of one rank. `delay(seconds)` draws how long something takes; `on_copy` is told of a copy as it runs."""

    def __init__(self, time: VirtualTime, rng: random.Random, name: str, seconds: dict[str, float]) -> None:
        """`seconds`: what an operation takes about, by stream ("compute", "load", "save")."""
        self.time = time
        self.rng = rng
        self.name = name
        self.is_dead = False
        self.is_submitting = False  # by a thread of its own, at this moment
        self.faults: dict[Direction, int] = {}  # copies of that direction until one fails; absent: none does
        self.stalls = 0.0  # share of operations that take 50 times as long
        self.on_copy: Callable[[BlockCopy], None] = lambda copy: None
        self._seconds = seconds
        self.streams: list[Stream] = []
        self.compute = self.stream("compute")

    def stream(self, name: str) -> Stream:
        """A new stream."""
        self.streams.append(Stream(self, f"{self.name}/{name}", self._seconds[name]))
        return self.streams[-1]

    def delay(self, seconds: float) -> float:
        """Seconds that an operation of about so many takes this time."""
        factor = self.rng.random() * 2
        return seconds * factor * (50 if self.stalls and self.rng.random() < self.stalls else 1)

    def run_until(self, event: SimulatedEvent) -> None:
        """The host waits: whatever can run does, in any order, until the event has come."""
        while not event.done:
            ready = [stream for stream in self.streams if stream.queue]
            self.rng.shuffle(ready)
            if not any(stream.run_head() for stream in ready):
                raise Violation("stuck", f"{self.name}: the host waits for an event that cannot come")

    @property
    def is_idle(self) -> bool:
        return not any(stream.queue for stream in self.streams)


class SimulatedLane:
    """See `transfer.cuda.streams.Lane`."""

    is_synchronous = False
    handle = 0

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self.stream = stream

    def current(self) -> Stream:
        return self._device.compute

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def position(self) -> SimulatedEvent:
        return self.mark()

    def end(self) -> SimulatedEvent:
        return self.mark(self.stream)

    def mark(self, stream: Stream | None = None) -> SimulatedEvent:
        return (stream if stream is not None else self._device.compute).record()

    def recycle(self, events: list[Any]) -> None:
        """Events are not used again."""

    def wait_idle(self) -> None:
        """Only who drops an engine without closing it waits so: here its device has gone with it."""


class SimulatedSubmitter:
    """A submitting thread: it comes some time after it was woken, submits one part at a time, and where the queue says
    that the device has to come so far first, it comes some time after that. Meanwhile everybody else goes on."""

    def __init__(self, device: Device, queue: SubmissionQueue) -> None:
        self._device = device
        self._queue = queue
        self._is_due = False
        self._awaited: SimulatedEvent | None = None
        self._is_closed = False

    def wake(self) -> None:
        is_waiting = self._awaited is not None and not self._awaited.done
        if not (self._is_due or self._is_closed or is_waiting):
            self._is_due = True
            self._device.time.call_after(self._device.delay(2e-4), self._run, f"{self._device.name}/submit")

    def close(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        self._is_due = False
        if self._is_closed or self._device.is_dead or self._queue.is_empty:
            return
        self._device.is_submitting = True
        self._awaited = self._queue.help()  # type: ignore[assignment]
        self._device.is_submitting = False
        if self._awaited is None:
            self.wake()
        elif self._awaited.done:
            raise Violation("stall", f"{self._device.name}: the submitting thread waits for what has come")
        else:
            self._awaited.follow(self)


class LatePath:
    """Copies as `TorchPath` does, when the stream comes to it. A load that is told to fail leaves garbage behind, and
    so does a save in blocks that it refuses, as if what they hold did not fit: a share of all."""

    def __init__(self, form: HostForm, host: HostPool, device: Device, refused_share: float = 0.0) -> None:
        self._inner = TorchPath(form, host)
        self._form = form
        self._host = host
        self._device = device
        self._refused_share = refused_share
        self._chance = device.time.stream(f"{device.name}/refusals")
        # Drawn apart: of a source that all of the device draws from, one draw more would make another world.
        self._slice_blocks = device.time.stream(f"{device.name}/slices").choice(_SLICES)

    def copy(self, copy: BlockCopy) -> None:
        faults, direction = self._device.faults, copy.direction
        fails = False
        if direction in faults:
            faults[direction] -= 1
            if fails := faults[direction] < 0:
                del faults[direction]
        refused: list[int] = []  # until the copy has run nobody knows
        if direction is Direction.SAVE:
            copy.refusals.append(lambda: refused)
        if not fails or self._device.rng.random() < 0.5:
            copy.stream.put(lambda: self._run(copy, fails, refused))
        if fails:
            raise TransferError("injected fault")

    def slice_bytes(self, direction: Direction) -> int:
        return self._slice_blocks * self._form.moved_bytes

    def close(self) -> None:
        self._inner.close()

    def _run(self, copy: BlockCopy, fails: bool, refused: list[int]) -> None:
        if not fails:
            self._device.on_copy(copy)
            self._inner.copy(copy)
            if copy.direction is Direction.SAVE and self._refused_share:
                refused += (b for b in copy.host_ids.tolist() if self._chance.random() < self._refused_share)
                self._host.tensor[refused] = GARBAGE
        elif copy.direction is Direction.LOAD:
            for region in self._form.layout.regions[copy.regions.start : copy.regions.stop]:
                region.view[torch.tensor(copy.device_ids)] = GARBAGE


_current: list[Device] = []
_ready_blocks: dict[int, Callable[[], int]] = {}


@contextmanager
def seams() -> Iterator[None]:
    """Inside, transfer engines that are made under `on(device)` run on it, and host pools may become ready late."""

    def make_lane(*_: object, **__: object) -> SimulatedLane:
        device = _current[-1]
        return SimulatedLane(device, device.stream("load" if len(device.streams) == 1 else "save"))

    def make_peer_lane(*_: object, **__: object) -> SimulatedLane:
        return SimulatedLane(_current[-1], _current[-1].compute)  # only asked how far the model has come

    def make_submitter(queue: SubmissionQueue, _: torch.device) -> SimulatedSubmitter:
        return SimulatedSubmitter(_current[-1], queue)

    def num_ready_blocks(pool: HostPool) -> int:
        limit = _ready_blocks.get(id(pool))
        return pool.num_blocks if limit is None else min(pool.num_blocks, limit())

    saved = transfer_engine.make_lane, transfer_engine.make_submitter, HostPool.num_ready_blocks
    saved_peer_lane, worker_peers.make_lane = worker_peers.make_lane, make_peer_lane  # type: ignore[assignment]
    transfer_engine.make_lane = make_lane  # type: ignore[assignment]
    transfer_engine.make_submitter = make_submitter  # type: ignore[assignment]
    HostPool.num_ready_blocks = property(num_ready_blocks)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        transfer_engine.make_lane, transfer_engine.make_submitter = saved[:2]
        HostPool.num_ready_blocks = saved[2]  # type: ignore[method-assign]
        worker_peers.make_lane = saved_peer_lane
        _ready_blocks.clear()


@contextmanager
def on(device: Device) -> Iterator[None]:
    """Transfer engines that are made inside run on this device."""
    _current.append(device)
    try:
        yield
    finally:
        _current.pop()


def path_maker(
    device: Device, ready_blocks: Callable[[], int], refused_share: float
) -> Callable[[HostForm, HostPool, Config, LinkCosts], CopyPath]:
    """What a worker half takes as `make_path`. `ready_blocks`: how many blocks of its host pool are ready by now.
    `refused_share`: of blocks that are saved."""

    def make(form: HostForm, host: HostPool, config: Config, costs: LinkCosts) -> CopyPath:
        _ready_blocks[id(host)] = ready_blocks
        return LatePath(form, host, device, refused_share)

    return make
