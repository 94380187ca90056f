"""Files that are being written: they have their full length from the start and are renamed when they are whole."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

_ABANDONED_NS = 3600 * 10**9  # nobody writes a file for so long


class Temporaries:
    """A folder of such files, each with its owner's machine and process in its name. One thread at a time may call."""

    def __init__(self, folder: Path, clock: Callable[[], int] = time.time_ns) -> None:
        """The folder is made by the caller. `clock` is in nanoseconds."""
        self.folder = folder
        self._clock = clock
        self._owner = f"{machine()}-{os.getpid()}"
        self._next = 0

    def new(self, size: int) -> tuple[Path, int]:
        """Path and descriptor of a new file of `size` bytes, all there. Raises OSError, and leaves no file."""
        self._next += 1
        path = self.folder / f"{self._owner}-{self._next}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _allocate(descriptor, size)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return path, descriptor

    def clear(self) -> int:
        """Delete those that nobody will finish; bytes of the others."""
        num_bytes = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                    if _is_abandoned(entry.name, self._clock() - status.st_mtime_ns):
                        os.unlink(entry.path)
                    else:
                        num_bytes += status.st_size
                except FileNotFoundError:
                    continue
        return num_bytes


def machine() -> str:
    """This machine's name as it stands in those of files."""
    return socket.gethostname().replace("-", "_")


def _allocate(descriptor: int, size: int) -> None:
    """Take the room now, so that a full disk is known before anything is written."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot
            raise
        os.ftruncate(descriptor, size)


def _is_abandoned(name: str, age_ns: int) -> bool:
    owner, _, rest = name.partition("-")
    process, _, _ = rest.partition("-")
    if abs(age_ns) > _ABANDONED_NS:
        return True
    if owner != machine() or not process.isdigit():
        return False  # its owner cannot be asked
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
