"""A file system in memory, under the names by which the storage backend calls the system: `os`, `fcntl` and `open`.

Nothing of it is shared with the machine. Whatever a call needs that is not here raises `Broken`, so that a new call
of the backend is noticed. Before each call `before` is asked, which may raise OSError; time stamps are as coarse as a
kernel's.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

SECTOR = 512
_TICK_NS = 4_000_000  # of a kernel with 250 ticks a second


class Broken(BaseException):
    """A rule of the simulation was broken. Not an Exception: nobody is to take it for a fault that is a miss."""


@dataclass(slots=True, eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    mtime_ns: int = 0
    locked_by: int | None = None  # a descriptor


@dataclass(slots=True, eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    mtime_ns: int = 0


@dataclass(slots=True)
class Handle:
    """An open file, and the process that has it."""

    file: File
    path: str
    flags: int
    process: int
    position: int = 0


def fail(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class Files:
    """The tree, its open files, and the calls. `process` is who calls at present; `processes` are those that live."""

    def __init__(self, clock_ns: Callable[[], int], rng: random.Random) -> None:
        self.tree = Folder()
        self.process = 0
        self.processes: set[int] = set()
        self.handles: dict[int, Handle] = {}
        self.before: Callable[[str, str], None] = lambda call, path: None
        self.after_write: Callable[[File, int, int], None] = lambda file, start, stop: None
        self.cut_short: Callable[[int], int] = lambda count: count
        """How many bytes of so many are moved by one call."""
        self.room: Callable[[int], bool] = lambda num_bytes: True
        """Whether a file may grow by so much."""
        self.has_direct = True
        self._clock_ns = clock_ns
        self._rng = rng
        self._next_fd = 1000

    # The tree.

    def find(self, path: object) -> File | Folder:
        return self._follow(_parts(path), path)

    def _follow(self, parts: Sequence[str], path: object) -> File | Folder:
        node: File | Folder | None = self.tree
        for part in parts:
            if not isinstance(node, Folder):
                raise fail(errno.ENOTDIR, path)
            node = node.entries.get(part)
            if node is None:
                raise fail(errno.ENOENT, path)
        return node

    def folder_of(self, path: object) -> tuple[Folder, str]:
        *above, name = _parts(path)
        folder = self._follow(above, path)
        if not isinstance(folder, Folder):
            raise fail(errno.ENOTDIR, path)
        return folder, name

    def walk(self, folder: Folder | None = None, prefix: str = "") -> Iterator[tuple[str, File]]:
        """Every file with its path."""
        for name, node in (folder or self.tree).entries.items():
            if isinstance(node, Folder):
                yield from self.walk(node, f"{prefix}/{name}")
            else:
                yield f"{prefix}/{name}", node

    @property
    def used_bytes(self) -> int:
        return sum(len(file.data) for _, file in self.walk())

    def changed(self, node: File | Folder) -> None:
        node.mtime_ns = self._clock_ns() // _TICK_NS * _TICK_NS

    def grow(self, file: File, size: int, path: str) -> None:
        if size > len(file.data):
            if not self.room(size - len(file.data)):
                raise fail(errno.ENOSPC, path)
            file.data.extend(bytes(size - len(file.data)))

    def close_all_of(self, process: int) -> None:
        """As the kernel does for a process that ends."""
        for fd in [fd for fd, handle in self.handles.items() if handle.process == process]:
            self._close(fd)

    # Calls, with the names of `os`.

    def open(self, path: object, flags: int, mode: int = 0o777) -> int:
        self.before("open", str(path))
        folder, name = self.folder_of(path)
        node = folder.entries.get(name)
        if node is None:
            if not flags & os.O_CREAT:
                raise fail(errno.ENOENT, path)
            node = folder.entries[name] = File()
            self.changed(node)
            self.changed(folder)
        elif flags & os.O_EXCL and flags & os.O_CREAT:
            raise fail(errno.EEXIST, path)
        if isinstance(node, Folder):
            raise fail(errno.EISDIR, path)
        if flags & os.O_DIRECT and not self.has_direct:
            raise fail(errno.EINVAL, path)
        if flags & os.O_TRUNC:
            node.data.clear()
            self.changed(node)
        self._next_fd += 1
        self.handles[self._next_fd] = Handle(node, str(path), flags, self.process)
        return self._next_fd

    def close(self, fd: int) -> None:
        self.handle(fd)
        self._close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        handle = self.handle(fd)
        if offset < len(handle.file.data):  # at the end a kernel says so, whatever the alignment
            self._check_direct(handle, buffers, offset)
        count = self._count(sum(map(len, buffers)), max(0, len(handle.file.data) - offset))
        data = memoryview(bytes(handle.file.data[offset : offset + count]))
        for buffer in buffers:
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            data = data[len(part) :]
        self.before("preadv", handle.path)  # what was moved before the fault stays moved
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        handle = self.handle(fd)
        self._check_direct(handle, buffers, offset)
        data = b"".join(bytes(buffer) for buffer in buffers)
        return self._write(handle, data[: self._count(len(data), len(data))], offset)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        handle = self.handle(fd)
        self.before("pread", handle.path)
        return bytes(handle.file.data[offset : offset + count])

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        return self._write(self.handle(fd), data, offset)

    def read(self, fd: int, count: int) -> bytes:
        handle = self.handle(fd)
        data = self.pread(fd, count, handle.position)
        handle.position += len(data)
        return data

    def write(self, fd: int, data: bytes) -> int:
        handle = self.handle(fd)
        if handle.flags & os.O_APPEND:
            handle.position = len(handle.file.data)
        count = self._write(handle, bytes(data[: self.cut_short(len(data))]), handle.position)
        handle.position += count
        return count

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        handle = self.handle(fd)
        self.before("fallocate", handle.path)
        self.grow(handle.file, offset + length, handle.path)

    def fstat(self, fd: int) -> Any:
        return _status(self.handle(fd).file)

    def stat(self, path: object) -> Any:
        self.before("stat", str(path))
        return _status(self.find(path))

    lstat = stat  # there are no links

    def utime(self, path: object, *, ns: tuple[int, int]) -> None:
        self.before("utime", str(path))
        self.find(path).mtime_ns = ns[1]

    def rename(self, source: object, target: object) -> None:
        self.before("rename", str(target))
        folder, name = self.folder_of(source)
        there, new_name = self.folder_of(target)
        if name not in folder.entries:
            raise fail(errno.ENOENT, source)
        if isinstance(there.entries.get(new_name), Folder):
            raise fail(errno.EISDIR, target)
        there.entries[new_name] = folder.entries.pop(name)
        self.changed(folder)
        self.changed(there)

    def unlink(self, path: object) -> None:
        self.before("unlink", str(path))
        folder, name = self.folder_of(path)
        if name not in folder.entries:
            raise fail(errno.ENOENT, path)
        if isinstance(folder.entries[name], Folder):
            raise fail(errno.EISDIR, path)
        del folder.entries[name]
        self.changed(folder)

    def rmdir(self, path: object) -> None:
        self.before("rmdir", str(path))
        folder, name = self.folder_of(path)
        node = self.find(path)
        if not isinstance(node, Folder):
            raise fail(errno.ENOTDIR, path)
        if node.entries:
            raise fail(errno.ENOTEMPTY, path)
        del folder.entries[name]
        self.changed(folder)

    def mkdir(self, path: object, mode: int = 0o777) -> None:
        self.before("mkdir", str(path))
        folder, name = self.folder_of(path)
        if name in folder.entries:
            raise fail(errno.EEXIST, path)
        folder.entries[name] = Folder()
        self.changed(folder.entries[name])
        self.changed(folder)

    def scandir(self, path: object) -> _Entries:
        self.before("scandir", str(path))
        folder = self.find(path)
        if not isinstance(folder, Folder):
            raise fail(errno.ENOTDIR, path)
        names = list(folder.entries)
        self._rng.shuffle(names)  # nobody may rely on an order
        return _Entries([_Entry(self, f"{path}/{name}", name) for name in names])

    def listdir(self, path: object) -> list[str]:
        return [entry.name for entry in self.scandir(path)]

    def urandom(self, count: int) -> bytes:
        return self._rng.randbytes(count)

    def __getattr__(self, name: str) -> int:
        """Constants are the machine's."""
        if name.startswith("O_"):
            value: int = getattr(os, name)
            return value
        raise Broken(f"os.{name} is not simulated: add it to tests/simulation/files.py")

    # Those of `fcntl`, and `open` of files.

    def flock(self, fd: int, operation: int) -> None:
        handle = self.handle(fd)
        self.before("flock", handle.path)
        assert operation == fcntl.LOCK_EX | fcntl.LOCK_NB, "nobody waits for ever"
        if handle.file.locked_by is not None:
            if not handle.path.endswith(".part"):  # whose lock says that its writer lives
                raise Broken(f"{handle.path} is locked by {handle.file.locked_by}, and nobody will unlock it")
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), handle.path)
        handle.file.locked_by = fd

    def fcntl(self, fd: int, command: int, flags: int) -> None:
        assert command == fcntl.F_SETFL
        self.handle(fd).flags = self.handle(fd).flags & ~os.O_DIRECT | flags

    def open_file(self, path: object, mode: str, buffering: int = -1) -> BinaryIO:
        """Python's `open`, of a path or a descriptor."""
        assert mode in ("rb", "wb"), mode
        flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        raw: Any = _Raw(self, path if isinstance(path, int) else self.open(path, flags))
        if buffering == 0:
            return raw  # type: ignore[no-any-return]
        return io.BufferedReader(raw, max(buffering, 8192)) if mode == "rb" else io.BufferedWriter(raw)

    def handle(self, fd: int) -> Handle:
        if fd not in self.handles:
            raise fail(errno.EBADF, fd)
        return self.handles[fd]

    def _close(self, fd: int) -> None:
        handle = self.handles.pop(fd)
        if handle.file.locked_by == fd:
            handle.file.locked_by = None

    def _write(self, handle: Handle, data: bytes, offset: int) -> int:
        self.before("write", handle.path)
        self.grow(handle.file, offset + len(data), handle.path)
        handle.file.data[offset : offset + len(data)] = data
        self.changed(handle.file)
        self.after_write(handle.file, offset, offset + len(data))
        return len(data)

    def _count(self, wanted: int, there: int) -> int:
        count = min(wanted, there)
        short = self.cut_short(count) // SECTOR * SECTOR
        return short if 0 < short < count else count

    def _check_direct(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> None:
        if handle.flags & os.O_DIRECT:
            places = [np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers]
            if any(place % SECTOR for place in [offset, *places, *map(len, buffers)]):
                raise fail(errno.EINVAL, handle.path)


class _Raw(io.RawIOBase):
    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self._fd = fd

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer: Any) -> int:
        data = self._files.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return self._files.write(self._fd, bytes(data))

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        self._files.handle(self._fd).position = offset
        return offset

    def tell(self) -> int:
        return self._files.handle(self._fd).position

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._fd in self._files.handles:  # else its process is dead
                self._files.close(self._fd)


@dataclass(frozen=True, slots=True)
class _Entry:
    files: Files
    path: str
    name: str

    def stat(self) -> Any:
        return self.files.stat(self.path)

    def is_file(self, *, follow_symlinks: bool) -> bool:
        return isinstance(self.files.find(self.path), File)


class _Entries(list[_Entry]):
    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SimulatedPath(PosixPath):
    """A path whose calls go to the files that `installed` names."""

    installed: Files

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        try:
            self.installed.mkdir(self)
        except FileNotFoundError:
            if not parents or self.parent == self:
                raise
            self.parent.mkdir(parents=True, exist_ok=True)
            self.installed.mkdir(self)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def is_dir(self) -> bool:
        try:
            self.installed.before("stat", str(self))
            return isinstance(self.installed.find(self), Folder)
        except OSError:
            return False

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.installed.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def iterdir(self) -> Iterator[SimulatedPath]:  # type: ignore[override]
        return iter([self / entry.name for entry in self.installed.scandir(self)])

    def glob(self, pattern: str) -> Iterator[SimulatedPath]:  # type: ignore[override]
        return iter([path for path in self.iterdir() if fnmatch(path.name, pattern)])


def _parts(path: object) -> list[str]:
    return list(filter(None, str(path).split("/")))


def _status(node: File | Folder) -> Any:
    size = len(node.data) if isinstance(node, File) else 0
    mode = stat.S_IFREG | 0o600 if isinstance(node, File) else stat.S_IFDIR | 0o700
    times = {"st_mtime_ns": node.mtime_ns, "st_mtime": node.mtime_ns / 1e9}
    return SimpleNamespace(st_size=size, st_mode=mode, st_dev=1, **times)
