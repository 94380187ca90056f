"""CRC-32, the checksum of everything that is stored: it finds damage, not forgery.

isal computes it at the speed of memory, zlib at 1 to 4 GB/s, which is less than some disks have. The value is the same,
so what was written with one is read with the other. Neither holds Python's lock while it works on a block.
"""

from __future__ import annotations

import logging
import struct
from functools import cache

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

CHECKSUM = struct.Struct("<I")
"""A checksum as it lies in a file: nothing else knows how many bytes that takes."""

logger = logging.getLogger("kv_connector.storage")

__all__ = ["CHECKSUM", "crc32", "warn_where_slow"]


@cache
def warn_where_slow() -> None:
    """Say once in a process how checksums get faster, where they are not computed by isal."""
    if crc32.__module__ == "zlib":
        logger.warning(
            "checksums of storage are computed by zlib, which limits reads and writes to a few GB/s: "
            "pip install 'isal>=1.7' lifts that"
        )
