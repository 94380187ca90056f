"""Writes a trace of an engine's requests: lengths and block ids, never tokens.

A block's id is a keyed hash (BLAKE2b, 63 bits) of the engine's block hash. The key is drawn at random when the recorder
starts, is never written and is gone with the process: who has the file can tell that two prompts begin alike, and
cannot tell by trying whether one begins with a text that he guesses. Ids of two starts have nothing in common.

Threading: `record` is the scheduler's, and hands over; a daemon thread of the recorder's own hashes and writes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import secrets
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import ConfigError
from ..types import BlockHash
from ..values import shortened, shown
from .trace import FORMAT, VERSION

logger = logging.getLogger("kv_connector.trace")

MOST_BYTES = 1 << 30
"""Of a file: a recording ends there. About 100,000 requests of 8,000 tokens in blocks of 16."""
_MOST_WAITING = 4096
"""Requests that wait to be written; those behind are left out, and counted."""
_MOST_FILES = 64
_CLOSE_SECONDS = 10.0
"""For a disk to take what is left: no engine waits longer for one that hangs."""
_BEGINS = json.dumps({"format": FORMAT}).removesuffix("}").encode()
"""Every trace."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ID_MASK = (1 << 63) - 1


class _Ended(NamedTuple):
    seconds: float
    input_tokens: int
    output_tokens: int
    hashes: Sequence[BlockHash]


class TraceRecorder:
    """Appends to a file, a header first. Closed when it is dropped, and at exit.

    Where another engine records to the same file, `trace.jsonl` becomes `trace.1.jsonl`, and so on. The file is for its
    owner alone (0600). What goes wrong while it records ends the recording, with one line of the log.
    """

    def __init__(self, path: Path, block_tokens: int, most_bytes: int = MOST_BYTES) -> None:
        """`block_tokens`: of a block hash. Raises ConfigError where no file can be opened."""
        file = _open(path)
        self.path = Path(file.name)
        self._queue: queue.Queue[_Ended | None] = queue.Queue(_MOST_WAITING)
        self._num_left_out = 0
        writer = _Writer(file, block_tokens, most_bytes)
        thread = threading.Thread(target=_write_all, args=(self._queue, writer), name="kv-connector-trace", daemon=True)
        thread.start()
        logger.info("requests are recorded to %s, lengths and salted ids of blocks only", self.path)
        # Engines are children of multiprocessing, which know no atexit, and so no finalizer of weakref at their end.
        self.close = Finalize(self, _close, (self._queue, thread), exitpriority=10)
        """Ends when all is written; idempotent."""

    def record(self, seconds: float, input_tokens: int, output_tokens: int, hashes: Sequence[BlockHash]) -> None:
        """A request has ended that was admitted at `seconds` of any clock that goes on; `hashes` are its prompt's
        blocks. Waits for nothing and raises nothing."""
        try:
            self._queue.put_nowait(_Ended(seconds, input_tokens, output_tokens, hashes))
        except queue.Full:
            self._num_left_out += 1
            if self._num_left_out == 1:
                logger.warning("%s: requests end faster than they are recorded; some are left out", self.path)


class _Writer:
    """Owns the file; the thread's alone."""

    def __init__(self, file: BinaryIO, block_tokens: int, most_bytes: int) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._key = secrets.token_bytes(32)
        self._begin: float | None = None
        self._header = {"format": FORMAT, "version": VERSION, "block_tokens": block_tokens}

    def write(self, ended: _Ended) -> bool:
        """Whether the recording goes on."""
        found = os.fstat(self._file.fileno())
        if not found.st_nlink:
            logger.warning("%s: the recording ends, as the file was deleted", self._file.name)
            return False
        # Who empties the file begins a new one: without a header its blocks would be of another size.
        is_first, size = self._begin is None or not found.st_size, found.st_size
        if self._begin is None:
            self._begin = ended.seconds
        entry = {
            "timestamp": round(1e3 * (ended.seconds - self._begin)),
            "input_length": ended.input_tokens,
            "output_length": ended.output_tokens,
            "hash_ids": [self._id_of(block) for block in ended.hashes],
        }
        lines = [self._header, entry] if is_first else [entry]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        if size + len(data) > self._most_bytes:
            logger.warning("%s: the recording ends, as a file has at most %d bytes", self._file.name, self._most_bytes)
            return False
        try:
            _write_whole(self._file.fileno(), data)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), size)  # no half of a line
            logger.warning("%s: the recording ends: %s", self._file.name, shortened(str(error)))
            return False
        return True

    def close(self) -> None:
        self._file.close()

    def _id_of(self, block: BlockHash) -> int:
        return int.from_bytes(blake2b(block, digest_size=8, key=self._key).digest(), "big") & _ID_MASK


def _write_whole(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _write_all(waiting: queue.Queue[_Ended | None], writer: _Writer) -> None:
    """Until it is told to stop. Where the recording has ended, what comes is dropped."""
    records = True
    while (ended := waiting.get()) is not None:
        try:
            records = records and writer.write(ended)
        except Exception as error:  # noqa: BLE001 - a thread's top: a trace is worth no engine
            logger.warning("the recording of requests ends: %s: %s", type(error).__name__, shortened(str(error)))
            records = False
    writer.close()


def _close(waiting: queue.Queue[_Ended | None], thread: threading.Thread) -> None:
    with suppress(queue.Full):
        waiting.put(None, timeout=_CLOSE_SECONDS)
    thread.join(_CLOSE_SECONDS)


def _open(path: Path) -> BinaryIO:
    """The file, or the next of its kind that nobody writes, for appending behind its last whole line."""
    for number in count():
        own = path if not number else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            file = open(own, "rb+", buffering=0, opener=_open_for_owner)  # noqa: SIM115 - the writer closes it
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"record_trace={shown(str(own))} cannot be written: {shortened(str(error))}; give a file in a folder "
                "that this user may write to"
            ) from error
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if number >= _MOST_FILES or not isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"record_trace={shown(str(own))} cannot be locked: {shortened(str(error))}; give each engine a "
                    "file of its own"
                ) from error
            continue
        try:
            _check(file, own)
            _drop_torn_line(file)
        except (OSError, ConfigError):
            file.close()
            raise
        return file
    raise AssertionError("count() does not end")


def _open_for_owner(path: str, _: int) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _check(file: BinaryIO, path: Path) -> None:
    """Raises ConfigError where it is not a trace that this user alone may read: nothing of it has been changed."""
    found = os.fstat(file.fileno())
    fault = ""
    if not stat.S_ISREG(found.st_mode):
        fault = "is no file"
    elif found.st_uid != os.geteuid():
        fault = f"is the file of another user, {found.st_uid}"
    elif found.st_mode & _OTHERS:
        fault = f"has mode {stat.S_IMODE(found.st_mode):04o}, others may open it"
    elif not _BEGINS.startswith(os.pread(file.fileno(), len(_BEGINS), 0)):
        fault = "is there and holds something else"
    if fault:
        raise ConfigError(
            f"record_trace={shown(str(path))} {fault}: give a file that is not there yet, or a trace of this user's "
            "with mode 0600"
        )


def _drop_torn_line(file: BinaryIO) -> None:
    """An engine that was killed may have left half of one."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
