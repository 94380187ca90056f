"""The transfer engine's records of copies in flight, and of those that ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...types import CopyJob, Direction
from ..cuda.streams import Event
from ..paths.base import Int64s, Refusals

logger = logging.getLogger("kv_connector.transfer")


class Completion(NamedTuple):
    """The end of a job. `bytes` were copied, paddings left out; none count where the job failed.

    `milliseconds` are those of all that was submitted with the job, counted on the first of these jobs. `missing` are
    host blocks of a save that is done, but for these: their content did not fit.
    """

    job_id: int
    ok: bool
    bytes: int
    direction: Direction
    milliseconds: float = 0.0
    missing: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The same as `milliseconds`."""
        return self.milliseconds / 1e3


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Device and host block ids of a copy, read-only: paths may keep what they derived from them for the next group."""

    device_ids: Int64s
    host_ids: Int64s

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.device_ids)

    def slices(self, most: int) -> Iterator[BlockPairs]:
        """Parts of at most so many pairs, in host order, so that neighbours stay together. What needs no cut stays as
        it is."""
        if len(self) <= most:
            if len(self):
                yield self
            return
        order = np.argsort(self.host_ids, kind="stable")
        device_ids, host_ids = self.device_ids[order], self.host_ids[order]
        for ids in (device_ids, host_ids):
            ids.setflags(write=False)
        for start in range(0, len(self), most):
            yield BlockPairs(device_ids[start : start + most], host_ids[start : start + most])


class Part(NamedTuple):
    """What is copied in one go and gets an event of its own: these regions of these blocks, behind `after`."""

    regions: range
    pairs: BlockPairs
    after: Event | None


def layer_parts(groups: Sequence[range], pairs: BlockPairs, position: Event | None) -> Iterator[Part]:
    """A part for each group of layers; all of them come behind `position`, since the first does."""
    return (Part(group, pairs, None if number else position) for number, group in enumerate(groups))


def block_parts(regions: range, pairs: BlockPairs, most: int, num_guarded: int, after: Event | None) -> Iterator[Part]:
    """Parts of whole blocks, at most so many in each: the last `num_guarded` pairs come last, behind `after`, and the
    others behind nothing."""
    free = len(pairs) - num_guarded
    for start, stop, behind in ((0, free, None), (free, len(pairs), after)):
        for part in BlockPairs(pairs.device_ids[start:stop], pairs.host_ids[start:stop]).slices(most):
            yield Part(regions, part, behind)


@dataclass(slots=True, eq=False)
class Submission:
    """Jobs that are copied together, in parts: by layer group, or all layers by slices of blocks.

        waiting (no `start`) -> begun -> submitted (it has an `end`) -> ended (`has_ended`)

    Its queue brings it as far as submitted (`SubmissionQueue`, which alone writes to what is marked so), on whichever
    thread; the engine looks at it on the model-runner thread. `events[i]` follows part i, which is group i where there
    are several, and has `part_bytes[i]` bytes; `end` follows everything that was enqueued. Of `num_bytes` in all. A
    step waits for one that `is_awaited`, and for all of it while it has nothing else to do if it `is_urgent`.
    """

    direction: Direction
    jobs: Sequence[CopyJob]
    groups: tuple[range, ...]
    num_bytes: int
    parts: Iterator[Part]  # queue: those behind `upcoming`
    is_awaited: bool = False
    is_urgent: bool = False
    upcoming: Part | None = None  # queue: see `next_part`
    start: Event | None = None  # queue
    events: list[Event] = field(default_factory=list)  # queue
    part_bytes: list[int] = field(default_factory=list)  # queue
    refusals: list[Refusals] = field(default_factory=list)  # queue: of all parts
    num_paths_failed: int = 0  # queue
    end: Event | None = None  # queue
    ok: bool = True  # queue, until it is submitted
    num_arrived: int = 0  # leading parts that are known to have completed

    def next_part(self) -> Part:
        """The first that is not enqueued yet; there is one until it `is_whole`. For the queue."""
        if self.upcoming is None:
            self.upcoming = next(self.parts)
        return self.upcoming

    def add_part(self, num_bytes: int, event: Event) -> None:
        """The next part was enqueued, with `event` behind it. For the queue."""
        self.upcoming = None
        self.part_bytes.append(num_bytes)
        self.events.append(event)

    @property
    def is_whole(self) -> bool:
        """Whether every part was enqueued."""
        return sum(self.part_bytes) == self.num_bytes

    @property
    def is_lost(self) -> bool:
        """Whether it is known to have failed, and no more of it will be enqueued."""
        return self.end is not None and not self.ok

    def has_ended(self) -> bool:
        """Whether nothing of it runs any more; it is not `ok` from here on where the device is lost. Never blocks."""
        if self.end is None:
            return False
        try:
            return self.end.query()
        except RuntimeError as error:  # nothing has arrived
            logger.warning("%s failed on the device: %s", self.direction.value, error)
            self.ok = False
            return True

    def refused(self) -> frozenset[int]:
        """Host blocks whose content did not fit into them; for one that has ended and is `ok`."""
        return frozenset(block_id for refusals in self.refusals for block_id in refusals())

    def pending_bytes(self) -> int:
        """Bytes that will arrive and are not known to have done so: none where the copy failed. Never blocks."""
        if not self.ok:
            return 0
        try:
            while self.num_arrived < len(self.events) and self.events[self.num_arrived].query():
                self.num_arrived += 1
        except RuntimeError:  # the device is lost: the next poll finds that the copy has failed, and says so
            return 0
        return self.num_bytes - sum(self.part_bytes[: self.num_arrived])
