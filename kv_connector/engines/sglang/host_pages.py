"""The pages of one of SGLang's host pools, as buffers that storage reads and writes.

    page_first, page_first_direct, page_head   a page is a run of keys and one of values, or one run (MLA): `LentPages`
                                               lends them as they lie, each as a block of its own
    layer_first, states, runs of odd lengths   pieces of a page lie apart: `StagedPages` copies them together, a page as
                                               one block, in memory of ours

What is lent belongs to storage until it has answered, and SGLang gives pages to others once a call has returned: so
calls for lent pages wait for as long as storage takes. Staged ones return in time, and leave their memory behind.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...errors import ConfigError

if TYPE_CHECKING:
    from ...storage.base import GroupedStorage

_MEMORY_PAGE = 4096
_MOST_RUNS = 2
"""Of a page that is lent: a layer's pieces are too short to be blocks of their own."""
_STAGING_BYTES = 64 << 20
"""For each of SGLang's two threads that move pages, so that a batch of them is few calls."""
_SECONDS = 8.0
"""SGLang's scheduler ends where its storage threads do not within 10 seconds, when the cache is flushed."""

_NAMED = ("storage_format_tag", "start_layer", "end_layer", "layer_num")
_Call = Callable[[Sequence[bytes], Sequence[memoryview], bool], "Future[list[bool]]"]


class Patience:
    """Waits for storage with a limit. While an answer is overdue nothing more is asked. Any thread may call."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._overdue: list[Future[Any]] = []

    @property
    def is_over(self) -> bool:
        """Whether storage owes an answer."""
        with self._lock:
            self._overdue = [future for future in self._overdue if not future.done()]
            return bool(self._overdue)

    def waits_for(self, future: Future[Any]) -> bool:
        """Whether there is an answer in time. If not the call is called off, which it may be too late for."""
        if not future.done():
            wait([future], self._seconds)
        if future.done():
            return not future.cancelled()
        if not future.cancel():
            with self._lock:
                self._overdue.append(future)
        return False


class HostPages(Protocol):
    """`num_runs` blocks of `block_bytes` are a page. `memory` is where they lie when storage is called; `arrangement`
    names how their bytes follow one another. Pages are told by their first token slots."""

    num_runs: int
    block_bytes: int
    memory: memoryview
    arrangement: str

    def read(self, storage: GroupedStorage, keys: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """Fill pages with blocks, `num_runs` keys for each; True where all of a page came. Else its content is
        undefined."""

    def write(self, storage: GroupedStorage, keys: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """Store pages; True where all of a page is stored now."""


class LentPages:
    """See the module and `HostPages`."""

    def __init__(self, pool: Any, run_bytes: int, num_runs: int, patience: Patience) -> None:
        self.num_runs = num_runs
        self.block_bytes = run_bytes
        self.memory = _bytes_of(pool.kv_buffer)
        self.arrangement = f"{_describe(pool)} in {num_runs} of {run_bytes}"
        self._pool = pool
        self._base = pool.kv_buffer.data_ptr()
        self._patience = patience

    def read(self, storage: GroupedStorage, keys: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """See `HostPages.read`."""
        if self._patience.is_over:
            return [False] * len(starts)
        return self._by_page(storage.read(keys, self._runs(starts), True).result())

    def write(self, storage: GroupedStorage, keys: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """See `HostPages.write`."""
        if self._patience.is_over:
            return [False] * len(starts)
        return self._by_page(storage.write(keys, self._runs(starts), True).result())

    def _runs(self, starts: Sequence[int]) -> list[memoryview]:
        slots = torch.tensor(starts)[:, None] + torch.arange(self._pool.page_size)
        addresses, _ = self._pool.get_page_buffer_meta(slots.flatten())
        offsets = [address - self._base for address in addresses]
        return [self.memory[offset : offset + self.block_bytes] for offset in offsets]

    def _by_page(self, there: list[bool]) -> list[bool]:
        return [all(there[first : first + self.num_runs]) for first in range(0, len(there), self.num_runs)]


class StagedPages:
    """See the module and `HostPages`. A thread that reads and one that writes find memory for a batch each."""

    num_runs = 1

    def __init__(self, pool: Any, patience: Patience) -> None:
        page = pool.get_data_page(0, flat=False)
        self._page_bytes = page.numel() * page.element_size()
        self.block_bytes = -(-self._page_bytes // _MEMORY_PAGE) * _MEMORY_PAGE
        self.arrangement = f"{_describe(pool)} in one of {self.block_bytes}"
        self._pool = pool
        self._dtype = page.dtype
        self._patience = patience
        self._batch = max(1, _STAGING_BYTES // self.block_bytes)
        self.memory = memoryview(mmap.mmap(-1, 2 * self._batch * self.block_bytes))
        self._rows = torch.frombuffer(self.memory, dtype=torch.uint8).view(-1, self.block_bytes)
        self._lock = threading.Lock()
        self._free = list(range(2 * self._batch))

    def read(self, storage: GroupedStorage, keys: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """See `HostPages.read`."""

        def scatter(slots: Sequence[int], starts: Sequence[int], there: Sequence[bool]) -> None:
            for slot, start, is_there in zip(slots, starts, there, strict=True):
                if is_there:
                    self._pool.set_from_flat_data_page(start, self._row(slot))

        return self._by_batch(storage.read, keys, starts, behind=scatter)

    def write(self, storage: GroupedStorage, keys: Sequence[bytes], starts: Sequence[int]) -> list[bool]:
        """See `HostPages.write`."""

        def gather(slots: Sequence[int], starts: Sequence[int]) -> None:
            for slot, start in zip(slots, starts, strict=True):
                page = self._pool.get_data_page(start, flat=False)
                self._row(slot).view(page.shape).copy_(page)

        return self._by_batch(storage.write, keys, starts, in_front=gather)

    def _by_batch(
        self,
        call: _Call,
        keys: Sequence[bytes],
        starts: Sequence[int],
        in_front: Callable[[Sequence[int], Sequence[int]], None] = lambda slots, starts: None,
        behind: Callable[[Sequence[int], Sequence[int], Sequence[bool]], None] = lambda slots, starts, there: None,
    ) -> list[bool]:
        """What became of each page; of those behind a batch that was not answered nothing is tried."""
        there: list[bool] = []
        for first in range(0, len(starts), self._batch):
            batch = slice(first, first + self._batch)
            slots = self._take(len(starts[batch]))
            future: Future[list[bool]] = Future()
            future.cancel()  # until storage is asked
            try:
                if slots:
                    in_front(slots, starts[batch])
                    future = call(keys[batch], self._buffers(slots), True)
                if not self._patience.waits_for(future):
                    break
                answers = future.result()
                behind(slots, starts[batch], answers)
                there += answers
            finally:
                future.add_done_callback(partial(self._give_back, slots))
        return there + [False] * (len(starts) - len(there))

    def _take(self, count: int) -> list[int]:
        """So many slots of memory that nobody has; none while storage owes an answer."""
        with self._lock:
            if self._patience.is_over or len(self._free) < count:
                return []
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def _give_back(self, slots: Sequence[int], _: Future[Any]) -> None:
        """Storage does not use them any more. Those used last are lent first: memory that was never used is slow."""
        with self._lock:
            self._free = [*slots, *self._free]

    def _buffers(self, slots: Sequence[int]) -> list[memoryview]:
        size = self.block_bytes
        return [self.memory[slot * size : (slot + 1) * size] for slot in slots]

    def _row(self, slot: int) -> torch.Tensor:
        return self._rows[slot, : self._page_bytes].view(self._dtype)


def open_pages(pool: Any, patience: Patience) -> HostPages:
    """The pages of a host pool of SGLang's. Raises ConfigError for a pool that cannot be kept."""
    if not pool.size_per_token or pool.size != pool.logical_size:
        raise ConfigError(
            f"the host pool of this model ({type(pool).__name__}) does not hold whole pages, and is not supported: "
            "start without --hicache-storage-backend"
        )
    try:
        addresses, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except (NotImplementedError, ValueError):
        addresses, sizes = [], []
    memory = getattr(pool, "kv_buffer", None)
    is_whole = isinstance(memory, torch.Tensor) and memory.is_contiguous() and len(set(sizes)) == 1
    if is_whole and len(addresses) <= _MOST_RUNS and not sizes[0] % _MEMORY_PAGE:
        return LentPages(pool, sizes[0], len(sizes), patience)
    try:
        return StagedPages(pool, patience)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"the host pool of this model ({type(pool).__name__}, {pool.layout}) is not supported ({error}): give "
            "another --hicache-mem-layout, page_first, page_first_direct or layer_first, and where all are refused "
            "start without --hicache-storage-backend"
        ) from error


def _describe(pool: Any) -> str:
    """What decides how the bytes of a page follow one another, beside their number."""
    buffers = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    dtypes = "+".join(str(buffer.dtype).removeprefix("torch.") for buffer in buffers if buffer is not None)
    shape = tuple(pool.get_data_page(0, flat=False).shape)
    named = ", ".join(f"{name} {value}" for name in _NAMED if (value := getattr(pool, name, None)) is not None)
    return f"{type(pool).__name__} {pool.layout} {dtypes}{shape}, {named},"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory; the tensor lives as long as the view."""
    return tensor.view(-1).view(torch.uint8).numpy().data
