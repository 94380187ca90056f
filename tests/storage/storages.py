"""Storage backends for tests, and what tests keep in them."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kv_connector.storage.base import Storage, ThreadedStorage
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.folder import room_bytes
from kv_connector.storage.macs import choose_check
from kv_connector.testing.memory import MemoryStorage
from kv_connector.testing.storage_contract import OBJECT_BYTES as BLOCK
from kv_connector.testing.storage_contract import SECONDS, exists, get, put
from kv_connector.testing.storage_contract import content_of as content
from kv_connector.testing.storage_contract import key_of as key
from kv_connector.testing.storage_contract import make_buffers as buffers
from tests.storage.objects.stores import make_imitated, make_mooncake
from tests.storage.s3.buckets import make_s3

__all__ = ["BLOCK", "SECONDS", "buffers", "content", "exists", "get", "key", "put"]
R = TypeVar("R")
IDENTITY = hashlib.sha256(b"model").digest()
CAPACITY = 8 << 20
PACK_BYTES = 1 << 20
PER_PACK = PACK_BYTES // BLOCK


class FaultyStorage:
    """Another backend whose reads and writes fail, or come back damaged, while `fault` says so."""

    def __init__(self, inner: ThreadedStorage) -> None:
        self.inner = inner
        self.fault: Exception | None = None
        for name in ("find", "fill", "store", "forget"):
            setattr(inner, name, self._guard(getattr(inner, name)))

    def _guard(self, call: Callable[..., object]) -> Callable[..., object]:
        def guarded(*arguments: object) -> object:
            if self.fault is not None:
                raise self.fault
            return call(*arguments)

        return guarded

    def exists(self, keys: Sequence[bytes]) -> Future[int]:
        return self.inner.exists(keys)

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> Future[list[bool]]:
        return self.inner.read(keys, blocks)

    def write(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> Future[list[bool]]:
        return self.inner.write(keys, blocks)

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        return self.inner.remove(keys)

    def stats(self) -> dict[str, float]:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class HeldStorage:
    """A dictionary whose calls end when the test says so, and fail when it says so; everything in the test's thread."""

    group_blocks = 1

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.hold = False
        self.failing = ""  # "read", "write" or "all"
        self._held: list[Callable[[], None]] = []

    def release(self) -> None:
        """Let everything end that was held."""
        self.hold = False
        held, self._held = self._held, []
        for call in held:
            call()

    def exists(self, keys: Sequence[bytes]) -> Future[int]:
        return self._end(lambda: next((i for i, k in enumerate(keys) if k not in self.blocks), len(keys)), 0, "exists")

    def which(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        return self._end(lambda: [k in self.blocks for k in keys], [False] * len(keys), "exists")

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        for block in blocks:
            block[:] = b"\xdd" * len(block)  # whatever reads it before it is there reads nonsense

        def fill() -> list[bool]:
            for block_key, block in zip(keys, blocks, strict=True):
                if block_key in self.blocks:
                    block[:] = self.blocks[block_key]
            return [block_key in self.blocks for block_key in keys]

        return self._end(fill, [False] * len(keys), "read")

    def write(self, keys: Sequence[bytes], blocks: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        def store() -> list[bool]:
            for block_key, block in zip(keys, blocks, strict=True):
                self.blocks.setdefault(block_key, bytes(block))
            return [True] * len(keys)

        return self._end(store, [False] * len(keys), "write")

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        return self._end(lambda: sum(self.blocks.pop(k, None) is not None for k in keys), 0, "remove")

    def stats(self) -> dict[str, float]:
        return {"stored_blocks": len(self.blocks)}

    def close(self) -> None:
        self.release()

    def _end(self, call: Callable[[], R], otherwise: R, name: str) -> Future[R]:
        future: Future[R] = Future()

        def end() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(otherwise if self.failing in (name, "all") else call())

        if self.hold:
            self._held.append(end)
        else:
            end()
        return future


def open_store(root: Path, capacity: int = CAPACITY, block_bytes: int = BLOCK) -> FilesystemStorage:
    """A folder as storage, with packs of a megabyte."""
    return FilesystemStorage(root, IDENTITY, block_bytes, capacity, PACK_BYTES)


def files_of(root: Path) -> list[Path]:
    """Packs, whole and half."""
    return [path for path in root.rglob("*") if path.suffix in (".pack", ".part")]


def capacity_for(num_packs: int) -> int:
    """Room for so many packs of a megabyte and no more."""
    return num_packs * room_bytes(PER_PACK, BLOCK) + 4096


def size_of(root: Path) -> int:
    """Bytes of all files, each once: others may rename and delete meanwhile."""
    sizes = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def keys_of(group: object, count: int = PER_PACK) -> list[bytes]:
    """Keys of blocks that belong together."""
    return [key(f"{group} {i}") for i in range(count)]


def make_memory(folder: Path) -> Storage:
    return MemoryStorage(BLOCK, 64 * BLOCK)


def make_filesystem(folder: Path) -> Storage:
    return FilesystemStorage(folder / "store", IDENTITY, BLOCK, 8 << 20)


def make_guarded(folder: Path) -> Storage:
    """With a secret."""
    check, identity = choose_check(b"known to our engines", IDENTITY)
    return FilesystemStorage(folder / "store", identity, BLOCK, 8 << 20, check=check)


def make_faulty(folder: Path) -> Storage:
    return FaultyStorage(MemoryStorage(BLOCK, 64 * BLOCK))


BACKENDS: dict[str, Callable[[Path], Storage]] = {
    "memory": make_memory,
    "filesystem": make_filesystem,
    "filesystem with a secret": make_guarded,
    "faulty": make_faulty,
    "imitated mooncake": make_imitated,
    "mooncake": make_mooncake,
    "s3": make_s3,
}
