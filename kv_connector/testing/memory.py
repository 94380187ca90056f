"""A storage backend in this process's memory, for tests."""

from __future__ import annotations

from collections import OrderedDict

from ..storage.base import ThreadedStorage


class MemoryStorage(ThreadedStorage):
    """Blocks in a dictionary, the least recently used of them evicted. See `Storage`."""

    def __init__(self, block_bytes: int, capacity: int) -> None:
        """`capacity` in bytes."""
        super().__init__("memory", num_threads=1)
        self._max_blocks = capacity // block_bytes
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`."""
        with self.lock:
            return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        found = []
        for key, buffer in zip(keys, buffers, strict=True):
            with self.lock:
                block = self._blocks.get(key)
                if block is not None:
                    self._blocks.move_to_end(key)
            if block is not None:
                buffer[:] = block
            found.append(block is not None)
        num_read = sum(found)
        self.count(read_blocks=num_read, read_bytes=num_read * (len(buffers[0]) if buffers else 0))
        self.count(missed_blocks=len(keys) - num_read)
        return found

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`."""
        for key, buffer in zip(keys, buffers, strict=True):
            with self.lock:
                known = key in self._blocks
                if not known and self._max_blocks:
                    self._blocks[key] = bytes(buffer)
                evicted = max(0, len(self._blocks) - self._max_blocks)
                for _ in range(evicted):
                    self._blocks.popitem(last=False)
            self.count(
                evicted_blocks=evicted,
                skipped_writes_blocks=known,
                written_blocks=not known and self._max_blocks > 0,
                written_bytes=0 if known or not self._max_blocks else len(buffer),
                failed_writes_blocks=not self._max_blocks,
            )
        with self.lock:
            return [key in self._blocks for key in keys]

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`."""
        with self.lock:
            return sum(self._blocks.pop(key, None) is not None for key in keys)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`."""
        with self.lock:
            stored = len(self._blocks)
        return super().stats() | {"stored_blocks": stored}
