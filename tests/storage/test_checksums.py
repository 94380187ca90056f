"""Checksums are the same whatever computes them, and a user learns how they get faster."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from kv_connector.storage.checksums import crc32
from tests.storage.storages import BLOCK, CAPACITY, IDENTITY, SECONDS, get, keys_of, open_store

WITHOUT_ISAL = f"""
import logging, sys
sys.modules["isal"] = None
logging.basicConfig()
from pathlib import Path
from kv_connector.storage.checksums import crc32, warn_where_slow
from kv_connector.storage.filesystem.backend import FilesystemStorage
from tests.storage.storages import keys_of, put
assert crc32.__module__ == "zlib"
warn_where_slow()
warn_where_slow()
store = FilesystemStorage(Path(sys.argv[1]), {IDENTITY!r}, {BLOCK}, {CAPACITY})
assert all(put(store, keys_of("a")))
store.close()
"""


@pytest.mark.parametrize("length", [0, 1, 4096, (1 << 20) + 3])
def test_the_checksum_is_zlibs(length: int) -> None:
    block = memoryview(bytearray(range(256)) * (length // 256 + 1))[:length]
    assert crc32(block) == zlib.crc32(block)


def test_what_an_engine_without_isal_wrote_is_read_and_it_says_once_that_it_is_slow(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ISAL, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stderr.count("pip install 'isal>=1.7'") == 1
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert all(get(store, keys_of("a")))
    store.close()
