"""What is stored with each block, and compared when it is read: a CRC-32, or with a secret a MAC (`macs.py`).

isal computes CRC-32 at the speed of memory, zlib at 1 to 4 GB/s, which is less than some disks have. The value is the
same, so what was written with one is read with the other. Neither holds the GIL while it works on a block.
"""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from hmac import compare_digest
from typing import ClassVar

from ..extras import pip_line

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

logger = logging.getLogger("kv_connector.storage")

__all__ = ["CHECKSUM", "CRC32", "CRC_BYTES", "BlockCheck", "Crc32", "crc32", "warn_where_slow"]
CHECKSUM = struct.Struct("<I")
"""A CRC-32 as it lies in a file."""
CRC_BYTES = CHECKSUM.size


class BlockCheck(ABC):
    """The kind of checksum of one storage, chosen when it is opened. Called from any thread."""

    size: ClassVar[int]
    """Bytes that are stored with a block."""
    parts: Mapping[str, str]
    """What it adds to the parts of an identity, as text by name, for people and logs."""

    @abstractmethod
    def of(self, key: bytes, block: memoryview) -> bytes:
        """`size` bytes for this content of the block with this key, which has `KEY_BYTES` bytes."""

    def fits(self, key: bytes, block: memoryview, stored: bytes) -> bool:
        """Whether `stored`, any bytes, is the checksum of this block. Compared in constant time."""
        return compare_digest(self.of(key, block), stored)


class Crc32(BlockCheck):
    """Finds damage, not forgery: whoever can write to the storage can compute it, and it does not cover the key."""

    size = CRC_BYTES
    parts: Mapping[str, str] = {}

    def of(self, key: bytes, block: memoryview) -> bytes:
        """See `BlockCheck.of`."""
        return CHECKSUM.pack(crc32(block))


CRC32 = Crc32()


@cache
def warn_where_slow() -> None:
    """Say once in a process how checksums get faster, where they are not computed by isal."""
    if crc32.__module__ == "zlib":
        logger.warning(
            "checksums of storage are computed by zlib, which limits reads and writes to a few GB/s: %s lifts that",
            pip_line("isal"),
        )
