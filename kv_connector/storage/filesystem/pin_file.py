"""Pins of one engine in a storage folder, for its next start: `pins/DIGEST-N.pins`, and its lock, `pins/DIGEST-N.lock`.

    0     magic "KVCPINS2" | identity (32) | u64 bytes of the body | checksum of the body, as of a block
    body  u32 number of pins, then each: u8 whether a request's | f64 seconds since 1970 at which it ends, infinite
          where it does not | u16 bytes of the tenant's name | u32 number of hashes | u8 bytes of a hash | name | hashes

DIGEST are the first 16 digits of the identity of the engine's blocks, so that engines of other models look for other
names; N counts the engines of one identity that use the folder at a time. Each takes the first whose lock is free, for
as long as it lives, so that what one lets go of is not kept by another. A killed engine's lock is free at once.

Nothing is believed before it is checked: a link, a file of another user or that others may write to, one too long, and
whatever its checksum does not fit are as if they were not there. A file is written beside the old one and renamed.
"""

from __future__ import annotations

import fcntl
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...types import BlockHash
from ..checksums import BlockCheck

MOST_BYTES = 16 << 20
"""Of a file: half a million blocks, counted once for each pin that they are in."""
MOST_ENGINES = 64
"""Of one identity at a time, in a folder."""
_MAGIC = b"KVCPINS2"
"""1 had what operators gave as well though no prompt had shown it."""
_HEAD = struct.Struct("<8s32sQ")
_COUNT = struct.Struct("<I")
_PIN = struct.Struct("<?dHIB")
_OTHERS_WRITE = 0o022


class TimedPin(NamedTuple):
    """See `KeptPin`; `ends` in seconds since 1970, infinite without an end."""

    block_hashes: tuple[BlockHash, ...]
    tenant: str
    ends: float
    is_of_request: bool


class PinFile:
    """One engine's file. One thread at a time may call."""

    def __init__(self, folder: Path, identity: bytes, check: BlockCheck) -> None:
        """Takes the first file that no live engine has. `check` is that of this identity. Raises OSError."""
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._identity = identity
        self._check = check
        try:
            stem, self._lock = _take_turn(self._folder, identity.hex()[:16])
        except OSError:
            os.close(self._folder)
            raise
        self._name = f"{stem}.pins"
        self._temporary = f"{stem}.new"  # one that a killed engine has left is written over

    def read(self) -> list[TimedPin]:
        """What lies there, nothing where there is none. Raises OSError, and ValueError where it is not believed."""
        try:
            descriptor = os.open(
                self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._folder
            )
        except FileNotFoundError:
            return []
        with open(descriptor, "rb") as file:
            _check_status(os.fstat(descriptor))
            return self._decode(file.read(MOST_BYTES + 1))

    def write(self, pins: Iterable[TimedPin]) -> int:
        """Put these in the place of what lies there; returns how many there was no room for. Raises OSError, and leaves
        what lies there."""
        data, num_left_out = self._encode(pins)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileNotFoundError):  # what an engine was writing that was killed
            os.unlink(self._temporary, dir_fd=self._folder)
        try:
            with open(os.open(self._temporary, flags, 0o600, dir_fd=self._folder), "wb") as file:
                file.write(data)
            os.replace(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._folder)
            raise
        return num_left_out

    def close(self) -> None:
        """Another engine may have it."""
        os.close(self._lock)
        os.close(self._folder)

    def _encode(self, pins: Iterable[TimedPin]) -> tuple[bytes, int]:
        parts: list[bytes] = []
        room, num_left_out = MOST_BYTES - _HEAD.size - self._check.size - _COUNT.size, 0
        for pin in pins:
            name, hash_bytes = pin.tenant.encode(), len(pin.block_hashes[0])
            head = _PIN.pack(pin.is_of_request, pin.ends, len(name), len(pin.block_hashes), hash_bytes)
            size = len(head) + len(name) + len(pin.block_hashes) * hash_bytes
            if size > room:
                num_left_out += 1
                continue
            room -= size
            parts.append(b"".join((head, name, *pin.block_hashes)))
        body = _COUNT.pack(len(parts)) + b"".join(parts)
        head = _HEAD.pack(_MAGIC, self._identity, len(body))
        return head + self._check.of(self._identity, memoryview(body)) + body, num_left_out

    def _decode(self, data: bytes) -> list[TimedPin]:
        start = _HEAD.size + self._check.size
        if len(data) < start + _COUNT.size or len(data) > MOST_BYTES:
            raise ValueError(f"it has {len(data)} bytes or more, and {MOST_BYTES} at most are read")
        magic, identity, num_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("it is of another version")
        if identity != self._identity:
            raise ValueError("it is of another identity")
        body = memoryview(data)[start:]
        if num_bytes != len(body) or not self._check.fits(self._identity, body, data[_HEAD.size : start]):
            raise ValueError("it is damaged")
        try:
            return list(_pins(body))
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"it is damaged: {error}") from error


def _pins(body: memoryview) -> Iterator[TimedPin]:
    (count,) = _COUNT.unpack_from(body)
    at = _COUNT.size
    for _ in range(count):
        is_of_request, ends, name_bytes, num_hashes, hash_bytes = _PIN.unpack_from(body, at)
        at += _PIN.size
        end = at + name_bytes + num_hashes * hash_bytes
        if end > len(body) or not num_hashes or not hash_bytes or math.isnan(ends):
            raise ValueError("it is damaged")
        name = str(body[at : at + name_bytes], "utf-8")
        hashes = bytes(body[at + name_bytes : end])
        yield TimedPin(_cut(hashes, hash_bytes), name, ends, is_of_request)
        at = end


def _cut(hashes: bytes, size: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(hashes[i : i + size]) for i in range(0, len(hashes), size))


def _check_status(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise ValueError("other users may write to it")


def _take_turn(folder: int, digest: str) -> tuple[str, int]:
    """The first name that is free, and the descriptor that keeps it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for number in range(MOST_ENGINES):
        stem = f"{digest}-{number}"
        descriptor = os.open(f"{stem}.lock", flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stem, descriptor
        except BlockingIOError:
            os.close(descriptor)
        except OSError:
            os.close(descriptor)
            raise
    raise OSError(f"{MOST_ENGINES} engines keep pins there already")


def most_lasting(pins: Sequence[TimedPin]) -> list[TimedPin]:
    """An operator's in front of requests', and then those that last longest: what is left out is what matters least."""
    return sorted(pins, key=lambda pin: (pin.is_of_request, -pin.ends))
