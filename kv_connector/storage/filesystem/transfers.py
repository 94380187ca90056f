"""Bytes between the caller's memory and files, past the page cache where file system and memory allow it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..base import address
from .packs import PAGE
from .temporaries import new_path

PIECE_BYTES = 1 << 20
"""Moved by one call, where blocks are neighbours: more is no faster, and leaves threads without work."""
_BUFFERS_PER_CALL = 256  # the system allows 1,024


def blocks_per_piece(block_bytes: int) -> int:
    """How many neighbouring blocks are moved by one call."""
    return min(_BUFFERS_PER_CALL, -(-PIECE_BYTES // block_bytes))


def supports_direct(folder: Path) -> bool:
    """Whether files here can be opened past the page cache; some file systems refuse."""
    path = new_path(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def are_aligned(buffers: Iterable[memoryview]) -> bool:
    """Whether all of them begin on a page, as is needed to pass by the page cache."""
    return all(address(buffer) % PAGE == 0 for buffer in buffers)


def set_flags(descriptor: int, flags: int) -> None:
    """Change whether a file passes by the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def move(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview], offset: int
) -> None:
    """Read into or write from all of `buffers`, one behind the other from `offset` on; `call` is `os.preadv` or
    `os.pwritev`. Raises OSError, and EOFError at the file's end."""
    left = list(buffers)
    while left:
        count = call(descriptor, left, offset)
        if count == 0:
            raise EOFError
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
