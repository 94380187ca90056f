"""Submission queues: where copies of a direction wait until they are submitted, and the thread that empties them.

    model-runner thread  -- submit_save: position, put --> queue --> parts in turn --> driver
                         -- submit_load: position, first group -------------------------^
                                                             ^
    submitting thread    -- help, help, ... -----------------+

Submitting is what takes long: microseconds for each chunk, milliseconds for a gigabyte. So the model-runner thread, the
one that launches the model, leaves copies in a queue and goes on. A queue hands them to the driver part by part, first
in first out, but for the loads that a step waits for, which go to the front; its lock says who does so now, and owns
the direction's stream, the paths' side of it and what a submission is filled with. Loads go before saves.

The thread only helps. Whoever needs a copy submitted, because the model waits for it or a fence does, submits it: it
waits for one part at most that the thread is at, and whatever the thread does, nobody waits in vain. Python's lock can
keep the thread from running for long; so once a step the model-runner thread submits a part of what has made no
progress since the last step, which keeps up with the link.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..cuda.allocations import index_of
from ..cuda.driver import prepare_thread
from ..cuda.streams import HostEvent, Lane
from ..paths.base import BlockCopy, CopyPath
from .submissions import BlockPairs, Submission

logger = logging.getLogger("kv_connector.transfer")


class SubmissionQueue:
    """One direction's copies that are still to be submitted. Any thread may call."""

    def __init__(self, lane: Lane, paths: Sequence[CopyPath], bytes_of: Callable[[range], int]) -> None:
        """A part that fails on one of `paths` is tried on the next, and so is what follows it. `bytes_of` gives those
        that a block has in some regions."""
        self.lane = lane
        self.paths = tuple(paths)
        self._bytes_of = bytes_of
        # Plain locks, taken by `with` alone: a signal's handler that raises leaves neither of them owned.
        self._next = threading.Lock()  # of whoever needs a copy submitted, from before it waits for the other
        self._lock = threading.Lock()
        self._waiting: deque[Submission] = deque()
        self._seen: tuple[Submission, int] | None = None  # at the front a step ago, with so many parts submitted

    def put(self, submission: Submission) -> None:
        """Take it in, behind the others."""
        self._waiting.append(submission)

    def put_first(self, submission: Submission) -> None:
        """Take it in, in front of the others, and submit its first part."""
        with self._next, self._lock:
            self._waiting.appendleft(submission)
            self._advance(submission)

    def advance(self) -> bool:
        """Submit the next part of the first in the queue; False where there is none. A copy that fails is over, and
        nothing is raised."""
        with self._next, self._lock:
            return self._advance_first()

    def help(self) -> bool:
        """As `advance`, behind all who wait for their turn: for a thread that only helps.

        A lock goes to whoever comes first, which is the thread that has just let go of it, back for the next part: a
        step's load waited until a gigabyte was submitted, 2 ms for pieces of 16 KiB and 6 for such of 4 (H200,
        2026-11-23).
        """
        with self._next:
            pass
        with self._lock:
            return self._advance_first()

    def finish(self, submission: Submission) -> None:
        """Submit it, and what is in front of it: it has an `end` on return."""
        while submission.end is None and self.advance():
            pass

    def catch_up(self) -> None:
        """Submit a part of what is at the front as it was at the last call. Once a step."""
        try:
            front = self._waiting[0]
        except IndexError:  # asking first whether there is one would let another thread end it
            self._seen = None
            return
        seen = front, len(front.events)
        if seen == self._seen:
            self.advance()
        self._seen = seen

    def _advance_first(self) -> bool:
        if not self._waiting:
            return False
        self._advance(self._waiting[0])
        return True

    def _advance(self, submission: Submission) -> None:
        """The caller has the lock, and this is the first in the queue."""
        try:
            with self.lane.on_device():
                self.lane.follow(submission.position)
                submission.position = None
                self._submit_part(submission)
        except Exception as error:  # noqa: BLE001 - as below; a thread must not end by it, nor the model's.
            _log_failure(submission, "its stream", error)
            self._give_up(submission)
        if submission.end is not None:
            self._waiting.popleft()

    def _submit_part(self, submission: Submission) -> None:
        if submission.start is None:
            submission.start = self.lane.mark(self.lane.stream)
        regions, pairs = next(submission.parts)
        while not self._copy(submission, self.paths[submission.num_paths_failed], regions, pairs):
            submission.num_paths_failed += 1
            if submission.num_paths_failed == len(self.paths):
                self._give_up(submission)
                return
        submission.add_part(len(pairs) * self._bytes_of(regions), self.lane.mark(self.lane.stream))
        if submission.is_whole:
            submission.end = submission.events[-1]

    def _give_up(self, submission: Submission) -> None:
        """It has failed, and ends with what was enqueued for it."""
        submission.ok = False
        try:
            submission.end = self.lane.mark(self.lane.stream)
        except RuntimeError:  # the device is lost: nothing runs there any more
            submission.end = HostEvent()

    def _copy(self, submission: Submission, path: CopyPath, regions: range, pairs: BlockPairs) -> bool:
        is_first_of_many = not submission.events and len(submission.groups) > 1
        try:
            for device_ids, host_ids, after in pairs.in_order():
                if after is not None:
                    after.wait(self.lane.stream)
                stream = self.lane.stream
                path.copy(BlockCopy(submission.direction, regions, device_ids, host_ids, stream, is_first_of_many))
        except Exception as error:  # noqa: BLE001 - the seam to paths and driver: whatever they raise is a miss, not a crash.
            _log_failure(submission, type(path).__name__, error)
            return False
        return True


class Submitter(Protocol):
    """Whoever empties queues."""

    def wake(self) -> None:
        """There is something in a queue. Called by the model-runner thread; never blocks."""

    def close(self) -> None:
        """Leave the queues alone from now on. Idempotent."""


class SubmittingNow:
    """Empties queues at once, on the calling thread: for the CPU, where submitting is copying."""

    def __init__(self, queues: Sequence[SubmissionQueue]) -> None:
        """In the order of `queues`."""
        self._queues = queues

    def wake(self) -> None:
        """See `Submitter.wake`; every queue is empty on return."""
        _empty(self._queues)

    def close(self) -> None:
        """See `Submitter.close`."""


class SubmittingThread:
    """Empties queues on a daemon thread of its own, which sleeps while they are empty."""

    def __init__(self, queues: Sequence[SubmissionQueue], device: torch.device) -> None:
        """What is in the first of `queues` goes first, part by part."""
        self._queues = queues
        self._device = device
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-connector-submit", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """See `Submitter.wake`."""
        self._wake.set()

    def close(self) -> None:
        """See `Submitter.close`. Waits for the part that it is at."""
        self._is_closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:  # else the garbage collector has called from there
            self._thread.join()

    def _run(self) -> None:
        try:
            prepare_thread(index_of(self._device))
            while not self._is_closed:
                self._wake.wait()
                self._wake.clear()
                _empty(self._queues, lambda: self._is_closed)
            for queue in self._queues:  # paths may go with this thread, and with them what copies use
                queue.lane.wait_idle()
        except Exception as error:  # noqa: BLE001 - a thread's top: the model-runner thread submits what it leaves.
            logger.warning("copies are submitted by the model-runner thread from now on: %s", error)


def make_submitter(queues: Sequence[SubmissionQueue], device: torch.device) -> Submitter:
    """For queues of copies to and from `device`, the more urgent first."""
    return SubmittingThread(queues, device) if device.type == "cuda" else SubmittingNow(queues)


def _empty(queues: Sequence[SubmissionQueue], is_over: Callable[[], bool] = lambda: False) -> None:
    while not is_over() and any(queue.help() for queue in queues):
        pass


def _log_failure(submission: Submission, where: str, error: Exception) -> None:
    ids = [job.job_id for job in submission.jobs]
    way = submission.direction.value
    logger.warning("%s of jobs %s failed on %s: %s: %s", way, ids, where, type(error).__name__, error)
