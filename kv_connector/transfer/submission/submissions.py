"""What the transfer engine keeps of copies under way, and says of those that ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...types import CopyJob, Direction
from ..cuda.streams import Event
from ..paths.base import Int64s

logger = logging.getLogger("kv_connector.transfer")

SLICE_BYTES = 512 << 20
"""Copies of whole blocks that are longer have an event after each such part, 10 ms of the link, that says how far they
are. A part is submitted as a copy of its own, so short ones would keep the link waiting."""


class Completion(NamedTuple):
    """The end of a job. `bytes` were copied, paddings left out; none count where the job failed.

    `milliseconds` are those of all that was submitted with the job, counted on the first of these jobs.
    """

    job_id: int
    ok: bool
    bytes: int
    direction: Direction
    milliseconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Device and host block ids of a copy, read-only: paths may keep what they derived from them for the next group.

    The last `num_guarded` pairs are copied behind `after`.
    """

    device_ids: Int64s
    host_ids: Int64s
    num_guarded: int = 0
    after: Event | None = None

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.device_ids)

    def slices(self, block_bytes: int) -> Iterator[BlockPairs]:
        """Parts of `SLICE_BYTES`, of blocks of so many: the guarded last, and in host order, so that neighbours stay
        together. What needs no cut stays as it is."""
        most = max(1, SLICE_BYTES // block_bytes)
        if len(self) <= most:
            yield self  # the very arrays, as below
            return
        free = len(self) - self.num_guarded
        parts = np.argsort(self.host_ids[:free], kind="stable"), np.argsort(self.host_ids[free:], kind="stable") + free
        order = np.concatenate(parts)
        device_ids, host_ids = self.device_ids[order], self.host_ids[order]
        for ids in (device_ids, host_ids):
            ids.setflags(write=False)
        for start in range(0, len(self), most):
            part = slice(start, min(start + most, len(self)))
            yield BlockPairs(device_ids[part], host_ids[part], max(0, part.stop - max(start, free)), self.after)

    def in_order(self) -> Iterator[tuple[Int64s, Int64s, Event | None]]:
        """What is not empty of the two parts."""
        free = len(self.device_ids) - self.num_guarded
        if not self.num_guarded:
            yield self.device_ids, self.host_ids, None  # the very arrays: paths know them again from group to group
            return
        if free:
            yield self.device_ids[:free], self.host_ids[:free], None
        yield self.device_ids[free:], self.host_ids[free:], self.after


Part = tuple[range, BlockPairs]
"""What gets an event of its own: these regions of these blocks."""


@dataclass(slots=True, eq=False)
class Submission:
    """Jobs that are copied together, in parts: by layer group, or all layers by slices of blocks.

        waiting (no `start`) -> begun -> submitted (it has an `end`) -> ended (`has_ended`)

    Its queue brings it as far as submitted (`SubmissionQueue`, which alone writes to what is marked so), on whichever
    thread; the engine looks at it on the model-runner thread. `events[i]` follows part i, which is group i where there
    are several, and has `part_bytes[i]` bytes; `end` follows everything that was enqueued. Of `num_bytes` in all.
    """

    direction: Direction
    jobs: Sequence[CopyJob]
    groups: tuple[range, ...]
    num_bytes: int
    parts: Iterator[Part]  # queue: those not enqueued yet
    position: Event | None = None  # queue: of the stream that all of it comes behind, until it has begun
    start: Event | None = None  # queue
    events: list[Event] = field(default_factory=list)  # queue
    part_bytes: list[int] = field(default_factory=list)  # queue
    num_paths_failed: int = 0  # queue
    end: Event | None = None  # queue
    ok: bool = True  # queue, until it is submitted
    num_arrived: int = 0  # leading parts that are known to have completed

    def add_part(self, num_bytes: int, event: Event) -> None:
        """A part was enqueued, with `event` behind it."""
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
