"""The format of a pack: a file of some blocks, written once and never changed.

    0      magic "KVCPACK1" | u32 version | u32 header bytes | identity (32 bytes) | u64 block bytes | u32 count
           | count x (key (32 bytes) | checksum of the block) | u32 CRC-32 of the header so far
    page   block 0, block 1, ...

All integers little-endian. The checksum is a CRC-32 in version 1, and a MAC of 16 bytes (`macs.py`) in version 2. A
pack's name covers its header, checksums and all, so a file of this name holds these bytes or is damaged. The header
is padded to pages of 4 KiB and blocks are whole pages, so that every block can be read and written past the page cache.
A reader believes nothing: sizes are bounded and checked before they are used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ..base import KEY_BYTES
from ..checksums import CHECKSUM, CRC_BYTES, crc32
from ..macs import MAC_BYTES

PAGE = 4096
MAX_BLOCKS = 1024
"""In one pack: bounds what a header may make a reader allocate."""
_CHECKSUM_BYTES = {1: CRC_BYTES, 2: MAC_BYTES}
"""Of a block, by version."""
_VERSIONS = {size: version for version, size in _CHECKSUM_BYTES.items()}
_MAGIC = b"KVCPACK1"
_FIXED = struct.Struct("<8sII32sQI")
MAX_HEADER_BYTES = -(-(_FIXED.size + MAX_BLOCKS * (KEY_BYTES + max(_VERSIONS)) + CHECKSUM.size) // PAGE) * PAGE


class PackError(ValueError):
    """A file is not a pack that this version reads; the text says why."""


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What a pack holds. `identity` is 32 bytes; blocks are of `block_bytes`, with a checksum for each key, all of
    one length, which decides the version."""

    identity: bytes
    block_bytes: int
    keys: tuple[bytes, ...]
    checksums: tuple[bytes, ...]

    @property
    def name(self) -> str:
        """The pack's. The same blocks computed twice may differ in their last bits: they are two packs."""
        return pack_name(self.identity, self.keys, self.checksums)

    @property
    def header_bytes(self) -> int:
        """Where block 0 begins."""
        return _header_bytes(len(self.keys), self.checksum_bytes)

    @property
    def checksum_bytes(self) -> int:
        """Of one block's checksum."""
        return len(self.checksums[0])

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return pack_bytes(len(self.keys), self.block_bytes, self.checksum_bytes)

    def offset(self, slot: int) -> int:
        """Where block `slot` begins."""
        return self.header_bytes + slot * self.block_bytes

    def encode(self) -> bytes:
        """The header's pages."""
        return self.text().ljust(self.header_bytes, b"\0")

    def text(self) -> bytes:
        """The header without its padding."""
        version = _VERSIONS[self.checksum_bytes]
        text = _FIXED.pack(_MAGIC, version, self.header_bytes, self.identity, self.block_bytes, len(self.keys))
        text += b"".join(part for entry in zip(self.keys, self.checksums, strict=True) for part in entry)
        return text + CHECKSUM.pack(crc32(text))

    @classmethod
    def decode(cls, text: bytes, file_bytes: int | None = None) -> PackHeader:
        """From a file's first bytes, `MAX_HEADER_BYTES` of them where there are as many, and the file's length where
        there is a file. Raises PackError."""
        found = outline(text)
        end = found.text_bytes - CHECKSUM.size
        if len(text) < found.text_bytes or crc32(text[:end]) != CHECKSUM.unpack_from(text, end)[0]:
            raise PackError("its header is damaged")
        if file_bytes not in (None, found.file_bytes):
            raise PackError(f"{found.num_blocks} blocks of {found.block_bytes} bytes do not make {file_bytes} bytes")
        parts = found.entries.unpack_from(text, _FIXED.size)
        return cls(found.identity, found.block_bytes, parts[::2], parts[1::2])


class Outline(NamedTuple):
    """What a header's fixed part says, and what follows from it."""

    identity: bytes
    block_bytes: int
    num_blocks: int
    checksum_bytes: int
    header_bytes: int
    text_bytes: int
    file_bytes: int
    entries: struct.Struct
    """Of the keys and checksums behind the fixed part, in turn."""


# Of a header's text, what is needed of a hundred thousand of them at a start, each decoded once: text is nothing for
# Python's garbage collector to walk, and a `PackHeader` of each takes longer to make than to read.


def outline(text: bytes) -> Outline:
    """How the pack with this header is laid out. Raises PackError for what cannot be."""
    return _outline(text[: _FIXED.size])


@lru_cache(maxsize=256)  # packs of one identity differ in their count alone
def _outline(fixed: bytes) -> Outline:
    if len(fixed) < _FIXED.size:
        raise PackError(f"it ends after {len(fixed)} bytes")
    magic, version, header_bytes, identity, block_bytes, count = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise PackError("it is not a pack")
    if version not in _CHECKSUM_BYTES:
        raise PackError(f"it has version {version}, this program reads {' and '.join(map(str, _CHECKSUM_BYTES))}")
    size = _CHECKSUM_BYTES[version]
    if not 1 <= count <= MAX_BLOCKS or header_bytes != _header_bytes(count, size):
        raise PackError(f"it claims {count} blocks behind a header of {header_bytes} bytes")
    if block_bytes % PAGE or not block_bytes:
        raise PackError(f"it claims blocks of {block_bytes} bytes")
    entries = struct.Struct("<" + f"{KEY_BYTES}s{size}s" * count)
    text_bytes, file_bytes = _text_bytes(count, size), pack_bytes(count, block_bytes, size)
    return Outline(identity, block_bytes, count, size, header_bytes, text_bytes, file_bytes, entries)


def summary(text: bytes) -> tuple[Outline, str, tuple[bytes, ...]]:
    """How the pack with this header, which was checked, is laid out, its name, and the keys of its blocks, in order."""
    found = _outline(text[: _FIXED.size])
    parts = found.entries.unpack_from(text, _FIXED.size)
    keys = parts[::2]
    return found, pack_name(found.identity, keys, parts[1::2]), keys


def keys_of(text: bytes) -> tuple[bytes, ...]:
    """Of its blocks, in order."""
    return outline(text).entries.unpack_from(text, _FIXED.size)[::2]


def checksum_of(text: bytes, place: int) -> bytes:
    """Of one block."""
    size = outline(text).checksum_bytes
    end = _FIXED.size + (place + 1) * (KEY_BYTES + size)
    return text[end - size : end]


def offset_of(text: bytes, place: int) -> int:
    """Where one block begins in the pack."""
    found = outline(text)
    return found.header_bytes + place * found.block_bytes


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor, never of what a link points at. A folder or a pipe cannot be read by it. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # of a pipe it would wait


def read_header(path: Path) -> tuple[os.stat_result, PackHeader | None, str]:
    """A file's status and header; where it is not the pack of its name no header, and why. Raises OSError."""
    descriptor = open_file(path)
    try:
        status = os.fstat(descriptor)
        text = os.pread(descriptor, PAGE, 0)
        if len(text) >= _FIXED.size and _FIXED.unpack_from(text)[2] > PAGE:  # not to be believed before it is decoded
            text += os.pread(descriptor, MAX_HEADER_BYTES - PAGE, PAGE)
    finally:
        os.close(descriptor)
    try:
        header = PackHeader.decode(text, status.st_size)
    except PackError as error:
        return status, None, str(error)
    if header.name != path.stem:
        return status, None, "it lies under the name of another pack"
    return status, header, ""


def pack_bytes(count: int, block_bytes: int, checksum_bytes: int = CRC_BYTES) -> int:
    """Length of a pack of so many blocks."""
    return _header_bytes(count, checksum_bytes) + count * block_bytes


def pack_name(identity: bytes, keys: Iterable[bytes], checksums: Iterable[bytes] = ()) -> str:
    """The name of what holds these blocks: 64 hexadecimal digits. No key becomes a part of a path itself."""
    return sha256(b"".join((b"kvc1.pack", identity, *keys, *checksums))).hexdigest()


def _text_bytes(count: int, checksum_bytes: int) -> int:
    return _FIXED.size + count * (KEY_BYTES + checksum_bytes) + CHECKSUM.size


def _header_bytes(count: int, checksum_bytes: int) -> int:
    return -(-_text_bytes(count, checksum_bytes) // PAGE) * PAGE
