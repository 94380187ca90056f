"""The headers of a folder's packs in one file, in the order in which they were added: a start reads it instead of
opening every pack, and its end says what others have added.

    0      magic "KVCINDX1" | 8 random bytes, new with every file of this name
    16     records: u64 time of writing (ns) | u32 bytes of the header | header | u32 CRC-32 of the record so far

It may name packs that are gone: the folder is the truth. It is written under the folder's lock and read without, so its
end may be half a record: one that is being written, or was when its writer was killed. What cannot be read to the end
under the lock, for whatever reason, is not whole: the folder is listed, and the file is replaced.

Nor is a file read that is longer than the packs of a folder make it (`most_bytes`): who can write to the folder would
else decide how much memory its readers take. A record is at most a 64th as long as its pack.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..checksums import CHECKSUM, crc32
from .packs import MAX_HEADER_BYTES, PackError, open_file, outline
from .temporaries import Temporary

_MAGIC = b"KVCINDX1"
_HEAD_BYTES = 16
_RECORD = struct.Struct("<QI")
_PART_BYTES = 1 << 20  # read or written at a time
_MOST_RECORD_BYTES = _RECORD.size + MAX_HEADER_BYTES + CHECKSUM.size
_SPARE_RECORDS = 100  # of packs that are gone, before it is worth writing anew
_PACK_SHARE = 64  # of a pack's bytes, its record takes one of so many at most: a block of a page with a MAC does
_UNBOUNDED = 1 << 62

Record = tuple[int, bytes]
"""When a pack was written, in nanoseconds, and the text of its header, which is whole. No class of its own: Python's
garbage collector drops plain tuples from what it walks."""


class Journal:
    """Reads what is new in the file, and adds to it. One thread at a time may call; those that write hold the lock."""

    def __init__(self, path: Path, most_bytes: int = _UNBOUNDED) -> None:
        """There need not be such a file. A longer one is not read, but for what was written here: that is the length
        of what lies there, also where the capacity was lowered."""
        self._path = path
        self._most_bytes = most_bytes
        self._head = b""
        self._end = 0  # of the last record that was read or added here
        self._num_records = 0
        self.is_whole = False
        """Whether the last reading reached the file's end. What was not whole under the lock is to be replaced."""

    def read(self) -> list[Record]:
        """What others have added since the last call; everything where the file was replaced. What cannot be read is
        not whole, and no error."""
        self.is_whole = False
        records: list[Record] = []
        try:
            descriptor = open_file(self._path)  # and not `stat`: NFS asks anew on opening
        except OSError:
            self._head = b""
            return records
        with suppress(OSError):
            self._read(descriptor, records)
        os.close(descriptor)
        return records

    def num_bytes(self) -> int:
        """Length of the file; what is known of it where it cannot be asked."""
        try:
            return os.stat(self._path).st_size
        except OSError:
            return self._end

    def drop_where_too_long(self) -> None:
        """Delete the file where it is not read for its length. Raises OSError."""
        if self.num_bytes() > self._most_bytes:
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def append(self, records: Iterable[Record]) -> None:
        """Add records, which are not read back here. The file was just read, and found whole. Raises OSError."""
        assert self.is_whole, "behind half a record nothing is read"
        added = list(records)
        text = b"".join(encoded(record) for record in added)
        descriptor = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            _write(descriptor, text)
        finally:
            os.close(descriptor)
        self._end += len(text)
        self._num_records += len(added)

    def is_wasteful(self, num_packs: int) -> bool:
        """Whether most of its records are of packs that are gone."""
        return self._num_records > 2 * num_packs + _SPARE_RECORDS

    def replace(self, records: Iterable[Record], temporary: Temporary) -> None:
        """Write a new file with these records by way of a temporary one. Raises OSError, and leaves the old file."""
        num_bytes = _HEAD_BYTES
        try:
            _write(temporary.descriptor, _MAGIC + os.urandom(_HEAD_BYTES - len(_MAGIC)))
            text = bytearray()
            for record in records:
                text += encoded(record)
                if len(text) >= _PART_BYTES:
                    num_bytes += _write(temporary.descriptor, bytes(text))
                    text.clear()
            num_bytes += _write(temporary.descriptor, bytes(text))
            with suppress(OSError):
                os.rmdir(self._path)  # of a file it is refused, and so it is of a folder that somebody uses
            os.rename(temporary.path, self._path)
        except BaseException:
            temporary.delete()
            raise
        temporary.close()
        self._most_bytes = max(self._most_bytes, 2 * num_bytes)

    def _read(self, descriptor: int, records: list[Record]) -> None:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        if head != self._head or size < self._end:
            self._head, self._end, self._num_records = head, _HEAD_BYTES, 0
        if not head.startswith(_MAGIC) or size > self._most_bytes:
            return
        text = b""  # behind the last record that was read
        while len(text) < _MOST_RECORD_BYTES and self._end < self._most_bytes:  # it may grow while it is read
            part = os.pread(descriptor, _PART_BYTES, self._end + len(text))
            if not part:
                break
            text += part
            found, stop = _records_in(text)
            records += found
            self._num_records += len(found)
            self._end += stop
            text = text[stop:]
        self.is_whole = self._end >= size


def most_bytes(capacity: int) -> int:
    """What a journal of a folder with this capacity, in bytes, may take: for each pack that fits, a record of one and
    of another that is gone, and the spare ones (see `Journal.is_wasteful`). Where those that are gone had longer
    records than that it is written anew sooner."""
    return _HEAD_BYTES + 2 * capacity // _PACK_SHARE + _SPARE_RECORDS * _MOST_RECORD_BYTES


def encoded(record: Record) -> bytes:
    """A record with its length in front and its checksum behind. What is before 1970 counts as that year."""
    time_ns, header = record
    text = _RECORD.pack(max(0, time_ns), len(header)) + header
    return text + CHECKSUM.pack(crc32(text))


def _records_in(text: bytes) -> tuple[list[Record], int]:
    """The records at the beginning, and where the last of them ends. What is not, or not yet, a whole one ends them."""
    records: list[Record] = []
    at, num_bytes = 0, len(text)
    while at + _RECORD.size <= num_bytes:
        time_ns, header_bytes = _RECORD.unpack_from(text, at)
        start, stop = at + _RECORD.size, at + _RECORD.size + header_bytes
        if header_bytes > MAX_HEADER_BYTES or stop + CHECKSUM.size > num_bytes:
            break
        if crc32(text[at:stop]) != CHECKSUM.unpack_from(text, stop)[0]:  # the header's own lies within
            break
        header = text[start:stop]
        try:
            if outline(header).text_bytes != header_bytes:
                break
        except PackError:
            break
        records.append((time_ns, header))
        at = stop + CHECKSUM.size
    return records, at


def _write(descriptor: int, text: bytes) -> int:
    num_bytes = len(text)
    while text:
        count = os.write(descriptor, text)
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        text = text[count:]
    return num_bytes
