"""SGLang's own host tier without an engine: its host pools, cache controller, storage threads and launch line, on the
CPU. What moves pages between device and host needs a GPU: tests write the host pools' pages themselves."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch

from integration.models import tiny
from integration.tests.sglang_engines import OPTIONS
from kv_connector.engines.sglang import TieredKVStorage

PAGE, LAYERS, SLOTS = 16, 2, 128
SECONDS = 30.0
TOKENS = list(range(7, 7 + 6 * PAGE))
"""Six pages."""
BACKEND = {
    "backend_name": "kv_connector",
    "module_path": "kv_connector.engines.sglang",
    "class_name": "TieredKVStorage",
    "interface_v1": 1,
}


@contextmanager
def launched(folder: Path, **options: Any) -> Iterator[None]:
    """What a scheduler process of SGLang knows once it was started with these options, as rank 0."""
    from sglang.srt.runtime_context import create_context, get_parallel, use_context
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(tiny.write_weights("dense", folder)), **(OPTIONS | options))
    with use_context(create_context(arguments, role="scheduler")), get_parallel().override(tp_rank=0, pp_rank=0):
        yield


def make_host_pool(layout: str, is_latent: bool = False, width: int = 32, size: int = SLOTS) -> Any:
    """A host pool of SGLang's of twice `size` token slots and a page."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device: Any
    kind: Any
    if is_latent:
        device = MLATokenToKVPool(size, PAGE, torch.float32, width, width, LAYERS, "cpu", False)
        kind, more = MLATokenToKVPoolHost, {"target_layer_num": LAYERS}
    else:
        device = MHATokenToKVPool(size, PAGE, torch.float32, 2, width, LAYERS, "cpu", False)
        kind, more = MHATokenToKVPoolHost, {}
    info = device.get_device_pool_infos()[0].buffer_info
    sizes = {"device_capacity_tokens": size, "start_layer": 0, "end_layer": LAYERS}
    with host_memory_budget_scope(1 << 30):
        host = kind(info, 2.0, 0, PAGE, layout, pin_memory=False, **sizes, **more)
    host.kv_buffer.fill_(-1.0)
    host.device_of_test = device
    return host


def page_hashes(tokens: Sequence[int], **names: str) -> list[str]:
    """SGLang's own, of whole pages; `names` are an `extra_key` and a `cache_salt`."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    hashes: list[str] = get_storage_hash_str(key_of(tokens, **names), page_size=PAGE)
    return hashes


def key_of(tokens: Sequence[int], **names: Any) -> Any:
    """A prefix as SGLang's tree has it."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens), **names)


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    """Token slots of these pages of a host pool."""
    return (torch.tensor(pages, dtype=torch.int64)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def fill(pool: Any, hashes: Sequence[str], pages: Sequence[int]) -> None:
    """What the model has computed for these pages, as copies from the device leave it."""
    for name, page in zip(hashes, pages, strict=True):
        view = pool.get_data_page(page * PAGE, flat=False)
        view.copy_(torch.rand(view.shape, generator=torch.Generator().manual_seed(int(name[:8], 16))))


def holds(pool: Any, hashes: Sequence[str], pages: Sequence[int]) -> list[bool]:
    """Which of the pages are byte for byte what was computed. They are as they were before."""
    found = []
    for name, page in zip(hashes, pages, strict=True):
        view = pool.get_data_page(page * PAGE, flat=False)
        before = view.clone()
        fill(pool, [name], [page])
        found.append(torch.equal(view, before))
        view.copy_(before)
    return found


class HostTier:
    """One rank's cache controller with its storage threads."""

    def __init__(self, pool: Any, settings: dict[str, Any], others: dict[str, Any] | None = None) -> None:
        """`others`: host pools beside that of keys and values, by name."""
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

        device = pool.device_of_test
        entries = [PoolEntry(PoolName.KV, pool, device, int, is_primary_index_anchor=True)]
        entries += [PoolEntry(PoolName(name), each, device, int) for name, each in (others or {}).items()]
        self.pool = pool
        self.controller = HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: device),
            HostPoolGroup(entries),
            PAGE,
            None,
            load_cache_event=threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="tiny",
            storage_backend_extra_config=BACKEND | settings,
            enable_storage_metrics=True,
        )
        self.storage: TieredKVStorage = self.controller.storage_backend
        self._num_requests = 0

    def back_up(self, tokens: Sequence[int], pages: Sequence[int], **names: str) -> int:
        """Compute pages and have them written by SGLang's backup thread; how many tokens were."""
        hashes = page_hashes(tokens, **names)
        fill(self.pool, hashes, pages)
        self.controller.write_storage(slots_of(pages), list(tokens), hashes)
        return int(_next(self.controller.ack_backup_queue).completed_tokens)

    def prefetch(self, tokens: Sequence[int], pages: Sequence[int], **names: str) -> tuple[int, int]:
        """Have SGLang's threads look these tokens up and fetch what there is to the first of the pages; how many tokens
        were found, and how many came."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        self._num_requests += 1
        handle = CacheRequestHandle(f"request {self._num_requests}", 0)
        self.controller.prefetch(handle, key_of(tokens, **names))
        operation = _next(self.controller.prefetch_hit_queue)
        operation.host_indices = slots_of(pages)[: operation.storage_hit_count]
        self.controller.prefetch_buffer.put(operation)
        came = 0
        while not (told := _next(self.controller.ack_prefetch_queue)).completed_req:
            came = told.completed_tokens if told.completed_tokens is not None else came
        return operation.storage_hit_count, came

    def close(self) -> None:
        """As when the storage is detached."""
        self.controller.detach_storage_backend()


def _next(queue: Queue[Any]) -> Any:
    return queue.get(timeout=SECONDS)


Make = Callable[..., HostTier]


@contextmanager
def host_tiers(models: Path, folder: Path) -> Iterator[Make]:
    """Host tiers with one folder; each is an engine that was started with it."""
    made: list[HostTier] = []

    def make(pool: Any = None, others: dict[str, Any] | None = None, **storage: Any) -> HostTier:
        settings = {"path": str(folder), "capacity": "64MiB"} | storage
        made.append(HostTier(pool or make_host_pool("page_first"), {"storage": settings}, others))
        return made[-1]

    with launched(models):
        yield make
        for each in made:
            each.close()
