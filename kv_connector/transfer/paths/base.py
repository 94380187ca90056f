"""What a copy path is asked to copy, and its interface."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...types import Direction
from ..cuda.turns import Pace

Int64s = NDArray[np.int64]

SLICE_BYTES = 64 << 20
"""Of a slice, where a copy is many small ones for the driver: 1.2 ms of the link. Two of them under way keep the link
busy, and are as many copies, 8192 of 16 KiB, as the driver takes in without making the thread wait."""
LONG_SLICE_BYTES = 512 << 20
"""Of a slice, 10 ms of the link, where each begins with something that the link waits for, and is few copies."""


Refusals = Callable[[], Sequence[int]]
"""Host blocks of a save whose content did not fit into their form: they hold nothing valid. For whoever knows that the
copy has completed: the device finds out while it copies."""
_NOBODY_ASKS: MutableSequence[Refusals] = deque(maxlen=0)


class BlockCopy(NamedTuple):
    """These consecutive regions of device block `device_ids[i]`, to or from host block `host_ids[i]`.

    Ids are int64 of shape (num_blocks,), at least one, in range and without repetition: the engine has checked. The
    copy runs after what `stream`, a torch stream, already holds, and before what is enqueued there afterwards; None on
    the CPU. `urgent`: the model waits for the copy, so it may use the model's multiprocessors. A path that may refuse
    blocks adds a function that says which to `refusals`. `in_step`: a step waits for it, layer by layer, so that it
    yields less often to other streams' copies (`cuda/turns.py`).
    """

    direction: Direction
    regions: range
    device_ids: Int64s
    host_ids: Int64s
    stream: Any = None
    urgent: bool = False
    refusals: MutableSequence[Refusals] = _NOBODY_ASKS
    in_step: bool = False

    @property
    def pace(self) -> Pace:
        """How often the copy yields to copies of other streams."""
        return self.direction, self.in_step


class CopyPath(Protocol):
    """Moves the pieces of some regions of some blocks. `copy` is called for one copy of a direction at a time, on one
    stream, from any thread; the two directions may be called at the same time, so each has resources of its own.
    """

    def copy(self, copy: BlockCopy) -> None:
        """Enqueue it; on the CPU it is done on return.

        Device blocks are read and written behind what the stream holds; host blocks may be read at once. A path with
        streams of its own joins them to the copy's also where it raised. Only pieces are written, never padding. Raises
        TransferError, or what torch raises.
        """

    def slice_bytes(self, direction: Direction) -> int:
        """Bytes of the slices that a long copy of whole blocks is cut into; `copy` is called for each."""

    def close(self) -> None:
        """Release buffers. Idempotent. No copy may be under way."""
