"""The headers of a folder's packs in one file, in the order in which they were added: what lies there is known from it
without opening every pack, and what others have added is known from its end.

    0      magic "KVCINDX1" | 8 random bytes, new with every file of this name
    16     records: u64 time of writing (ns) | u32 bytes of the header | header | u32 CRC-32 of the record so far

It may lack packs and name some that are gone: the folder is the truth. It is written under the folder's lock and read
without, so its end may be half a record: one that is being written, or was when its writer was killed.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .packs import MAX_HEADER_BYTES, PackError, PackHeader, pack_name

_MAGIC = b"KVCINDX1"
_HEAD_BYTES = 16
_RECORD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_SPARE_RECORDS = 100  # of packs that are gone, before it is worth writing anew


@dataclass(frozen=True, slots=True)
class Record:
    """A pack that was written at `time_ns`."""

    time_ns: int
    header: PackHeader

    @property
    def name(self) -> str:
        """The pack's."""
        return pack_name(self.header.identity, self.header.keys)

    def encode(self) -> bytes:
        """With its length in front and its checksum behind."""
        text = self.header.text()
        record = _RECORD.pack(self.time_ns, len(text)) + text
        return record + _CRC.pack(zlib.crc32(record))


class Journal:
    """Reads what is new in the file, and adds to it. One thread at a time may call; those that write hold the lock."""

    def __init__(self, path: Path) -> None:
        """There need not be such a file."""
        self._path = path
        self._head = b""
        self._end = 0  # of the last record that was read
        self._num_records = 0
        self.is_whole = False
        """Whether the last reading reached the file's end. What was not whole under the lock is to be replaced."""

    def read(self) -> Iterator[Record]:
        """What was added since the last call; everything where the file was replaced. Raises OSError."""
        self.is_whole = False
        try:
            file = open(self._path, "rb", buffering=1 << 20)  # noqa: SIM115 - and not `stat`: NFS asks anew on opening
        except FileNotFoundError:
            self._head = b""
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if size == self._end and self._head and os.pread(file.fileno(), _HEAD_BYTES, 0) == self._head:
                self.is_whole = True
                return
            head = file.read(_HEAD_BYTES)
            if head != self._head or size < self._end:
                self._head, self._end, self._num_records = head, _HEAD_BYTES, 0
            file.seek(self._end)
            while head.startswith(_MAGIC) and (found := _read_record(file)) is not None:
                record, num_bytes = found
                self._end += num_bytes
                self._num_records += 1
                yield record
            self.is_whole = self._end >= size and head.startswith(_MAGIC)

    def num_bytes(self) -> int:
        """Length of the file; 0 where there is none."""
        try:
            return os.stat(self._path).st_size
        except FileNotFoundError:
            return 0

    def append(self, records: Iterable[Record]) -> None:
        """Add records; they are read back like those of others. The file was found whole. Raises OSError."""
        assert self.is_whole, "behind half a record nothing is read"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            text = b"".join(record.encode() for record in records)
            while text:
                text = text[os.write(descriptor, text) :]
        finally:
            os.close(descriptor)

    def is_wasteful(self, num_packs: int) -> bool:
        """Whether most of its records are of packs that are gone."""
        return self._num_records > 2 * num_packs + _SPARE_RECORDS

    def replace(self, names: set[str], read_pack: Callable[[str], Record | None]) -> None:
        """Write a new file with what is known of the packs of these names; `read_pack` tells what the old file does
        not. Raises OSError, and leaves the old file."""
        temporary = self._path.with_suffix(".new")
        missing = set(names)
        old = Journal(self._path)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_MAGIC + os.urandom(_HEAD_BYTES - len(_MAGIC)))
            for record in old.read():
                if record.name in missing:
                    missing.discard(record.name)
                    file.write(record.encode())
            for name in sorted(missing):
                if (found := read_pack(name)) is not None:
                    file.write(found.encode())
        os.rename(temporary, self._path)


def _read_record(file: BinaryIO) -> tuple[Record, int] | None:
    """The next record and its length; None for what is not, or not yet, a whole one."""
    start = file.read(_RECORD.size)
    if len(start) < _RECORD.size:
        return None
    time_ns, num_bytes = _RECORD.unpack(start)
    if num_bytes > MAX_HEADER_BYTES:
        return None
    rest = file.read(num_bytes + _CRC.size)
    if len(rest) < num_bytes + _CRC.size:
        return None
    text = rest[:num_bytes]
    if zlib.crc32(text, zlib.crc32(start)) != _CRC.unpack_from(rest, num_bytes)[0]:
        return None
    try:
        return Record(time_ns, PackHeader.decode(text)), _RECORD.size + len(rest)
    except PackError:
        return None
