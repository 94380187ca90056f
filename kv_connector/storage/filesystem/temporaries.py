"""Files that are being written: they have their full length from the start and are renamed when they are whole.

Whoever writes a file holds its lock, which the kernel takes from the dead: a file whose lock can be had is abandoned.
That is so also for containers that share a folder and see nothing of each other's processes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .packs import open_file

_NAME = re.compile(r"[0-9a-f]{32}\.part")


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file that is being written, and the descriptor that holds its lock until `close`."""

    path: Path
    descriptor: int

    def close(self) -> None:
        """It is renamed, or given up."""
        os.close(self.descriptor)

    def delete(self) -> None:
        """It will not be whole. Where it cannot be deleted now, whoever makes room next does."""
        with suppress(OSError):
            os.unlink(self.path)
        self.close()


class Temporaries:
    """A folder of such files. Who calls holds the lock of the folder of packs."""

    def __init__(self, folder: Path) -> None:
        """The folder is made by the caller."""
        self._folder = folder

    def new(self, size: int) -> Temporary:
        """A file of `size` bytes, all there. Raises OSError, and leaves no file."""
        path = new_path(self._folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        made = Temporary(path, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _allocate(descriptor, size)
        except OSError:
            made.delete()
            raise
        return made

    def clear(self) -> int:
        """Delete those that nobody will finish; bytes of the others. Raises OSError."""
        num_bytes = 0
        for path in list_temporaries(self._folder):
            try:
                num_bytes += 0 if _delete_abandoned(path) else os.lstat(path).st_size
            except FileNotFoundError:
                continue
        return num_bytes


def new_path(folder: Path) -> Path:
    """A name for such a file that no other has."""
    return folder / f"{os.urandom(16).hex()}.part"


def list_temporaries(folder: Path) -> Iterator[Path]:
    """Files of ours alone. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                yield folder / entry.name


def _delete_abandoned(path: Path) -> bool:
    """Whether the file was abandoned, and is deleted. What cannot be opened or deleted is not."""
    try:
        descriptor = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _allocate(descriptor: int, size: int) -> None:
    """Take the room now, so that a full disk is known before anything is written."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot
            raise
        os.ftruncate(descriptor, size)
