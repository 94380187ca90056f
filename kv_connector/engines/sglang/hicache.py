"""`TieredKVStorage`: SGLang's own host tier (HiCache), with our storage behind it. SGLang decides what is on the host,
what is written and what is fetched; here pages are named, moved and checked.

    SGLang calls                              from                      what follows
    -------------------------------------------------------------------------------------------------------------------
    register_mem_pool_host, ..._v2            scheduler, at start       the pool's storage is opened
    batch_exists, batch_exists_v2             prefetch thread           lookups, of the longest prefix
    batch_get_v1, batch_get_v2                prefetch's I/O thread     blocks are read into the host pool's pages
    batch_set_v1, batch_set_v2                backup thread             pages are written
    clear, get_stats, close                   scheduler

SGLang owns the pages: it locks them for as long as one of these calls runs, and not longer. So each call waits for
storage (`host_pages.py`), on a thread that has nothing else to do. A page's name is SGLang's hash of it, which covers
tokens, adapter and salt, under the identity that the linker has too (`identity.py`), the rank, and how the pool lies in
memory (`host_storage.py`). What cannot be read or written in time is a miss: no call raises but those at the start.
There is no other state than the pools' storages, `_salt`, which a clear changes, what SGLang's metrics are told, and
`_CLEARED`: what was cleared stays so when SGLang detaches storage and attaches it again.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_parallel

from ...types import BlockHash
from .fragments import page_hashes
from .host_pages import Patience
from .host_storage import HostStorage, identity_of, read_storage_settings
from .identity import read_backend, read_identity
from .launch import refuse_drafts
from .ranks import Ranks

logger = logging.getLogger("kv_connector.sglang")

T = TypeVar("T")

_CLEARED: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()
"""The salts of all clears, by the host pool of keys and values, which lives as long as the engine."""


class TieredKVStorage(HiCacheStorage):
    """Filesystem, Mooncake, S3 or a backend of the user's own as SGLang's L3. See docs/sglang.md for its settings."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Made on each rank at the same time. Raises ConfigError; takes no memory yet."""
        self._settings = read_storage_settings(storage_config.extra_config)
        refuse_drafts()
        self._config = storage_config
        self._salt = _common_salt(storage_config)
        self._pools: dict[str, HostStorage] = {}
        self._patience = Patience()  # of all pools: one store that hangs is waited for once
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()
        self._is_faulty = False

    # At the start.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values. Raises ConfigError where it is not supported or storage cannot be used."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Another pool, of windows or states; that of keys and values comes again. Raises ConfigError."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name not in self._pools:
            self._open(host_pool, host_pool_name)

    def _open(self, pool: Any, name: str) -> None:
        cache = read_identity(pool.page_size, self._config.tp_size, str(getattr(pool, "dtype", "")))
        identity = identity_of(self._config, cache, read_backend(), name)
        # An engine lends a store its memory once.
        settings = replace(self._settings, segment_memory=0) if self._pools else self._settings
        self._pools[name] = storage = HostStorage(settings, identity, pool, self._patience)
        for salt in _CLEARED.get(self.mem_pool_host, ()):
            storage.rename(salt)

    # What is stored.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are stored."""
        return self._answer("lookup", lambda: self._pools[PoolName.KV].count_leading(page_hashes(keys)), 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The same of several pools: how many leading pages each has, and the prefixes that all of them can restore."""
        nothing = PoolTransferResult(0, {})
        return self._answer("lookup", lambda: self._find(page_hashes(keys), pool_transfers or ()), nothing)

    def _find(self, hashes: list[BlockHash], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        num_pages = self._pools[PoolName.KV].count_leading(hashes)
        hits: dict[str, int] = {PoolName.KV: num_pages} if num_pages else {}
        ends = set(range(1, num_pages + 1))
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not ends:
                continue  # such a pool gates no hit, and nothing is said of it
            is_window = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            window = max(1, len(transfer.keys or ())) if is_window else num_pages
            own = _ends(self._pools[transfer.name].which(hashes[:num_pages]), window)
            if own:
                hits[transfer.name] = max(own)
            ends &= own
        return PoolTransferResult(max(ends, default=0), hits, sorted(ends))

    # Pages.

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill host pages; True where a page is what was written."""
        return self._read(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store host pages; True where a page is stored now."""
        return self._write(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_get_v1` of several pools, by their names."""
        return {each.name: self._read(each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_set_v1` of several pools, by their names."""
        return {each.name: self._write(each.name, each.keys or [], each.host_indices) for each in transfers}

    def _read(self, name: str, keys: list[str], slots: torch.Tensor) -> list[bool]:
        begun = time.perf_counter()
        there = self._answer("read", lambda: self._pools[name].read(page_hashes(keys), slots), [False] * len(keys))
        self._note("prefetch", name, sum(there), begun)
        return there

    def _write(self, name: str, keys: list[str], slots: torch.Tensor) -> list[bool]:
        begun = time.perf_counter()
        there = self._answer("write", lambda: self._pools[name].write(page_hashes(keys), slots), [False] * len(keys))
        self._note("backup", name, sum(there), begun)
        return there

    # The storage as a whole.

    def clear(self) -> None:
        """What is stored is found no more, by this engine; its room is used again in time."""
        _CLEARED.setdefault(self.mem_pool_host, []).append(self._salt)
        for pool in self._pools.values():
            pool.rename(self._salt)
        self._salt = hashlib.sha256(self._salt).digest()

    def get_stats(self) -> StorageMetrics | None:
        """Pages and GiB/s of each batch since the last call; None where SGLang shows no metrics."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def stats(self) -> dict[str, float]:
        """Our counters since the start, by pool and name; the unit is in the name."""
        return {f"{name}_{key}": value for name, pool in self._pools.items() for key, value in pool.stats().items()}

    def close(self) -> None:
        """Finish what is under way and let go of the storage. Idempotent."""
        if self._pools:
            logger.info("kv_connector: %s", self.stats())
        for pool in self._pools.values():
            pool.close()

    # Calls of older versions of this interface, which SGLang makes no more with interface_v1.

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """A miss."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing is stored."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing is stored."""
        return False

    def _answer(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Of a call; whatever it raises is a miss, and a line of the log for each episode."""
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001 - SGLang's threads end no request for it
            if not self._is_faulty:
                logger.warning("storage behind the host pool: a %s failed: %s: %s", what, type(error).__name__, error)
            self._is_faulty = True
            return otherwise
        self._is_faulty = False
        return answer

    def _note(self, kind: str, name: str, num_pages: int, begun: float) -> None:
        """For SGLang's metrics."""
        if not self._config.enable_storage_metrics or not num_pages:
            return
        seconds = max(time.perf_counter() - begun, 1e-9)
        gigabytes = num_pages * self._pools[name].page_bytes / 2**30
        with self._lock:
            getattr(self._metrics, f"{kind}_pgs").append(num_pages)
            getattr(self._metrics, f"{kind}_bandwidth").append(gigabytes / seconds)


def _common_salt(config: HiCacheStorageConfig) -> bytes:
    """32 random bytes; ranks that read what the first of them has written have the same."""
    salt = secrets.token_bytes(32)
    if not config.is_mla_model or config.tp_size == 1:
        return salt
    return bytes(Ranks(get_parallel().attn_tp_group.cpu_group).exchange(salt)[0])


def _ends(there: Sequence[bool], window: int) -> set[int]:
    """The prefixes, in pages, of which the last `window` pages are there, or all where they are fewer."""
    ends, run = set(), 0
    for end, is_there in enumerate(there, 1):
        run = run + 1 if is_there else 0
        if run >= min(window, end):
            ends.add(end)
    return ends
