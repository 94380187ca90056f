"""Which files of a folder belong to us, how a folder is marked as ours, and the lock for changing it.

    ROOT/kv_connector.format-2   says that the folder is ours; locked while room is made and packs are added
    ROOT/index                   the packs' headers (`journal.py`)
    ROOT/tmp/                    packs that are being written (`temporaries.py`)
    ROOT/00 .. ff/               packs, by the first digits of their names
    ROOT/pins/                   prefixes that engines have pinned, for their next start (`pin_file.py`)
    ROOT/identities/             what the digests in packs stand for, for people (`identities.py`)

An empty folder is claimed by making the first of these files, and so is one that holds nothing but empty folders of our
names, as who deletes old files leaves them. One that holds anything else and lacks it belongs to somebody else, or to
another version of this format, and is refused: nothing in it is read, written or deleted. Within a folder that is ours
only what has our names is looked at, links are not followed, and sub-folders of others are left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FORMAT = 2
SUFFIX = ".pack"
LOCK_SECONDS = 10.0
"""How long another process is waited for that has the lock: longer than anybody needs it who is not stopped."""
_MARKER = "kv_connector.format-"
_TEXT = b"This folder is storage of kv_connector, which deletes files in it. Keep nothing else here.\n"
_SUB_FOLDERS = tuple(f"{i:02x}" for i in range(256))
_TEMPORARIES, PINS, IDENTITIES = "tmp", "pins", "identities"
_OURS = frozenset({*_SUB_FOLDERS, _TEMPORARIES, PINS, IDENTITIES})
_PACK = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
_NOBODYS = frozenset({"lost+found"})  # a file system makes it at its root
_OTHERS_WRITE = 0o022
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds between two tries to have the lock

logger = logging.getLogger("kv_connector.storage")


class ForeignFolderError(OSError):
    """A folder is not ours; the text says what to do."""


class FolderLayout:
    """Names and locks of one folder. Any thread may call."""

    def __init__(self, root: Path) -> None:
        """Looks at nothing yet."""
        self.root = root
        self.temporaries = root / _TEMPORARIES
        self.index = root / "index"
        self._marker = root / f"{_MARKER}{FORMAT}"
        self._turn = threading.Lock()
        self._device: int | None = None  # of the file system that it lay on when it was last claimed
        # Seconds in which threads of ours were within, and since when one is. In one: it is read without the lock.
        self._within: tuple[float, float | None] = 0.0, None

    def _sub_folders(self) -> list[str]:
        return [f"{self.root}/{name}" for name in _SUB_FOLDERS]

    def path(self, name: str) -> Path:
        """Where the pack of this name lies."""
        return self.root / name[:2] / (name + SUFFIX)

    def is_ours(self) -> bool:
        """Whether the folder is there and marked as ours. Raises OSError where that cannot be known."""
        try:
            return stat.S_ISREG(os.lstat(self._marker).st_mode)
        except FileNotFoundError:
            return False

    def require(self) -> None:
        """Raises ForeignFolderError where the folder is not ours, and OSError where there is none."""
        if not self.is_ours():
            os.stat(self.root)
            raise ForeignFolderError(f"{self.root} is not a storage folder of this version: nothing in it was touched")

    def claim(self) -> None:
        """Make the folder ours, for this user only, where it is not yet. Raises ForeignFolderError where it is somebody
        else's, or where its file system has gone since it was claimed, and OSError."""
        self._require_same_device()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.is_ours():
            others = sorted(name for name in os.listdir(self.root) if not self._is_left(name))
            if others and not self.is_ours():  # nobody else has claimed it meanwhile
                raise ForeignFolderError(_refusal(self.root, others))
            descriptor = os.open(self._marker, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, _TEXT)  # for people: the name alone counts
            finally:
                os.close(descriptor)
        for path in (*self._sub_folders(), str(self.temporaries)):  # where the last is there, all are
            _make_folder(path)
        self._device = os.stat(self.root).st_dev

    def _require_same_device(self) -> None:
        """A folder that was deleted is made anew, but not on the disk below a mount that is gone: it may be the
        system's own, and `capacity` more than it holds. Raises ForeignFolderError and OSError."""
        if self._device is None or self.is_ours():
            return
        if _device_of(self.root) != self._device:
            raise ForeignFolderError(
                f"the file system that {self.root} lay on is gone, and nothing is written to the one below: mount it "
                "again, or start the engine anew to use what is there now"
            )
        logger.warning("%s was deleted or moved while it was in use: it is made anew, with nothing in it", self.root)

    def _is_left(self, name: str) -> bool:
        """Whether this entry of a folder without our marker is nobody's: what a file system makes, or an empty folder
        of ours. Raises OSError."""
        if name in _NOBODYS:
            return True
        path = self.root / name
        try:
            return name in _OURS and stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
        except FileNotFoundError:  # it is being deleted
            return True

    def warn_of_others(self) -> None:
        """Say so where others may write to the folder: CRCs find damage, not forgery. Raises OSError."""
        for path in (str(self.root), str(self.temporaries), *self._sub_folders()):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            if mode & _OTHERS_WRITE:
                logger.warning(
                    "%s has mode %04o: other users may write to it, and so decide what models answer unless "
                    "storage.secret_env names a secret; "
                    "if only engines of this user need it: chmod -R go-rwx %s",
                    path,
                    mode,
                    self.root,
                )
                return

    def pack_names(self) -> list[str]:
        """Of every pack that lies there, each once, in any order. Raises OSError, also where a sub-folder is a link."""
        names: list[str] = []
        for folder, path in zip(_SUB_FOLDERS, self._sub_folders(), strict=True):
            try:
                _require_folder(path)
                entries = os.scandir(path)
            except FileNotFoundError:  # somebody deleted it
                continue
            with entries:
                names += {  # some systems give an entry twice where others add or delete meanwhile
                    name[: -len(SUFFIX)]
                    for entry in entries
                    if _PACK.fullmatch(name := entry.name)
                    and name.startswith(folder)
                    and entry.is_file(follow_symlinks=False)
                }
        return names

    def clear_the_way(self, name: str) -> None:
        """For a pack that cannot be put in its place: where its sub-folder was deleted, as empty folders are by those
        who tidy up, it is made anew, and an empty folder of the pack's name goes. Raises OSError."""
        path = self.path(name)
        _make_folder(str(path.parent))
        with suppress(FileNotFoundError):
            os.rmdir(path)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within, no other thread or process is. Makes the folder anew where it was deleted. Raises OSError, also
        where its file system is gone, and TimeoutError where another process is within and does not leave.

        A thread of this process that is within is waited for as long as it takes: it may well need minutes, as to list
        a large folder beside a thread that never rests, and who gave up would have lost a batch for nothing. The time
        in which another process is within counts for all threads that wait, or each would wait for it anew.
        """
        deadline = self._seconds_outside() + LOCK_SECONDS
        self._take_turn(deadline)
        try:
            descriptor = self._open_marker()
            try:
                self._lock(descriptor, deadline)
                seconds, since = self._within[0], time.monotonic()
                self._within = seconds, since
                try:
                    yield
                finally:
                    self._within = seconds + time.monotonic() - since, None
            finally:
                os.close(descriptor)
        finally:
            self._turn.release()

    def _seconds_outside(self) -> float:
        """A clock that stands still while a thread of this process is within."""
        seconds, since = self._within
        return (time.monotonic() if since is None else since) - seconds

    def _take_turn(self, deadline: float) -> None:
        while not self._turn.acquire(timeout=max(_LONGEST_PAUSE, deadline - self._seconds_outside())):
            if self._seconds_outside() > deadline:
                raise self._timeout()

    def _timeout(self) -> TimeoutError:
        return TimeoutError(f"another process has kept {self.root} locked for {LOCK_SECONDS:.0f} s")

    def _open_marker(self) -> int:
        if not self.temporaries.is_dir() or not self.is_ours():  # somebody deleted everything
            self.claim()
        return os.open(self._marker, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _lock(self, descriptor: int, deadline: float) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._seconds_outside() >= deadline:
                    raise self._timeout() from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _device_of(path: Path) -> int:
    """Of the file system that a path lies on, or would lie on if it were made. Raises OSError."""
    for place in (path, *path.parents):
        with suppress(FileNotFoundError):
            return os.stat(place).st_dev
    raise FileNotFoundError(f"nothing is there of {path}")


def warn_of_small_disk(root: Path, capacity: int) -> None:
    """Log where the file system is smaller than `capacity`: it will be full, for everybody who writes to it. A disk
    that does not say its size is not logged."""
    try:
        found = os.statvfs(root)
    except OSError:
        return
    size = found.f_blocks * found.f_frsize
    if 0 < size < capacity:
        logger.warning(
            "storage.capacity=%d is more than the %d bytes of the file system of %s: it will be full, for others who "
            "write to it too; give less",
            capacity,
            size,
            root,
        )


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        _require_folder(path)


def _require_folder(path: str) -> None:
    """Raises ForeignFolderError where it is none, as a link to one, and OSError."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise ForeignFolderError(f"{path} is not a folder: delete it, it has the name of one of ours")


def _refusal(root: Path, others: list[str]) -> str:
    shown = ", ".join(repr(name) for name in others[:3]) + (", ..." if len(others) > 3 else "")
    if any(name.startswith(_MARKER) for name in others):
        return f"{root} has another format than {FORMAT}, which this version writes: name another folder, or delete it"
    return (
        f"{root} is not empty ({shown}) and not a storage folder of this version: name an empty folder, or delete "
        f"this one if an earlier version made it"
    )
