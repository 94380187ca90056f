"""Pitched copies, by the CUDA driver: pieces that lie evenly apart on both sides move in one copy of a copy engine."""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...types import Direction
from .driver import check, let_go, quick_libcuda

MOST_PITCH = (1 << 31) - 1
"""Bytes from one piece to the next that the driver takes, as its manual says; tests go up to 1.5 GiB."""
MOST_IN_A_ROW = 256
"""Copies that keep the GIL, some 1 ms: a load that a step waits for may have ten thousand."""
_SIDE = [("x", "u8"), ("y", "u8"), ("type", "i8"), ("host", "u8"), ("device", "u8"), ("array", "u8"), ("pitch", "u8")]
COPY = np.dtype([("source", _SIDE), ("target", _SIDE), ("width", "u8"), ("height", "u8")])
"""CUDA_MEMCPY2D."""
ON_HOST, ON_DEVICE = 1, 2
"""Of CUmemorytype."""
_numbers = count(1)


class Pitch(NamedTuple):
    """`num_pieces` of `piece_bytes`, so many bytes apart on the device and on the host."""

    num_pieces: int
    piece_bytes: int
    device_bytes: int
    host_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return self.num_pieces * self.piece_bytes


class PitchedCopier(Protocol):
    """Enqueues copies that were made by `pitched_copies`."""

    def __call__(self, copies: NDArray[np.void], stream: int | None) -> None:
        """`copies` are of dtype `COPY` and read before it returns; `stream` is the driver's handle, None the current
        stream's. Raises TransferError."""


def pitched_copies(
    direction: Direction, pitch: Pitch, device: NDArray[np.int64], host: NDArray[np.int64]
) -> NDArray[np.void]:
    """One copy for each pair of addresses, int64 of shape (num_copies,), where the first of its pieces lies."""
    copies = np.zeros(len(device), dtype=COPY)
    sides = ("target", "source") if direction is Direction.LOAD else ("source", "target")
    there, here = (copies[side] for side in sides)
    there["type"], there["device"], there["pitch"] = ON_DEVICE, device, pitch.device_bytes
    here["type"], here["host"], here["pitch"] = ON_HOST, host, pitch.host_bytes
    copies["width"], copies["height"] = pitch.piece_bytes, pitch.num_pieces
    return copies


def copy_pitched(copies: NDArray[np.void], stream: int | None) -> None:
    """`PitchedCopier` by `cuMemcpy2DAsync`, a call for each.

    They keep the GIL: each takes microseconds, and to get the lock back takes up to 5 ms beside a thread that launches
    a model. That thread gets it every `MOST_IN_A_ROW` of them.
    """
    handle: Any = torch.cuda.current_stream().cuda_stream if stream is None else stream
    enqueue, first = _driver_call(), copies.ctypes.data
    for address in range(first, first + copies.nbytes, COPY.itemsize):
        check(enqueue(address, handle), "cuMemcpy2DAsync")
        if next(_numbers) % MOST_IN_A_ROW == 0:  # of all calls: each is short
            let_go()


@cache
def _driver_call() -> Any:
    call = quick_libcuda().cuMemcpy2DAsync_v2
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return call
