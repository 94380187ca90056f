"""What the transfer engine keeps of copies under way, and says of those that ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..types import CopyJob, Direction
from .streams import Event


class Completion(NamedTuple):
    """The end of a job. `bytes` were copied, paddings left out; none count where the job failed.

    `milliseconds` are those of all that was submitted with the job, counted on the first of these jobs.
    """

    job_id: int
    ok: bool
    bytes: int
    direction: Direction
    milliseconds: float = 0.0


@dataclass(slots=True, eq=False)
class Submission:
    """Jobs that were copied together: `events[i]` follows group i, `end` follows everything that was enqueued."""

    direction: Direction
    jobs: Sequence[CopyJob]
    groups: tuple[range, ...]
    start: Event
    events: list[Event] = field(default_factory=list)
    end: Event | None = None
    ok: bool = True


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Device and host block ids of a copy, read-only: paths may keep what they derived from them for the next group.

    The last `num_guarded` pairs are copied behind `after`.
    """

    device_ids: NDArray[np.int64]
    host_ids: NDArray[np.int64]
    num_guarded: int
    after: Event | None

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.device_ids)

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], Event | None]]:
        """What is not empty of the two parts."""
        free = len(self.device_ids) - self.num_guarded
        if not self.num_guarded:
            yield self.device_ids, self.host_ids, None  # the very arrays: paths know them again from group to group
            return
        if free:
            yield self.device_ids[:free], self.host_ids[:free], None
        yield self.device_ids[free:], self.host_ids[free:], self.after
