"""One rank of SGLang that is driven by hand: the linker between SGLang's own pools and classes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import integration.tests.sglang_engines  # noqa: F401  # what SGLang imports
from kv_connector.engines.sglang import TieredKVLinker, linker
from kv_connector.index import CacheIdentity

PAGE, PAGES, LAYERS = 4, 32, 3


def make_pool(is_latent: bool = False) -> Any:
    """A pool of SGLang's, with pages 1 to 32."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if is_latent:
        return MLATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 16, 8, LAYERS, "cpu", False)
    return MHATokenToKVPool(PAGE * PAGES, PAGE, torch.float32, 2, 16, LAYERS, "cpu", False)


def buffers(pool: Any) -> list[torch.Tensor]:
    """All of its tensors."""
    return [*pool.kv_buffer] if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def keys(count: int, name: str = "chat", first: int = 0) -> list[str]:
    """SGLang's hashes of pages that follow one another."""
    return [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(first, first + count)]


class Driver:
    """One rank of SGLang: it calls the linker in the order that SGLang does."""

    def __init__(self, pool: Any, linker: TieredKVLinker) -> None:
        self.pool = pool
        self.linker = linker
        self.half = linker._half

    def transfer(self, names: Sequence[str], pages: Sequence[int] | None = None) -> list[Any]:
        """Of these pages, told by token slots."""
        slots = None
        if pages is not None:
            slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        return [SimpleNamespace(name="kv", keys=list(names), device_indices=slots)]

    def write(self, names: Sequence[str], pages: Sequence[int]) -> None:
        """What a forward pass computes for these pages."""
        for name, page in zip(names, pages, strict=True):
            for layer, buffer in enumerate(buffers(self.pool)):
                generator = torch.Generator().manual_seed(int(name[:8], 16) + layer)
                rows = buffer[page * PAGE : (page + 1) * PAGE]
                rows.copy_(torch.rand(rows.shape, generator=generator))

    def holds(self, names: Sequence[str], pages: Sequence[int]) -> bool:
        """Whether the pages hold what belongs there."""
        before = [buffer.clone() for buffer in buffers(self.pool)]
        self.write(names, pages)
        return all(torch.equal(old, new) for old, new in zip(before, buffers(self.pool), strict=True))

    def save(self, names: Sequence[str], pages: Sequence[int]) -> bool:
        """In a round, compute and offer them, and in the next what is wanted is saved; whether anything was."""
        self.round()
        self.write(names, pages)
        num_saved = self.linker.stats()["saves_on_compute_blocks"]
        self.linker.offload(self.transfer(names, pages))
        self.round()
        return self.linker.stats()["saves_on_compute_blocks"] > num_saved

    def round(self) -> int:
        """What SGLang's scheduler begins a round with; returns how many offers have ended."""
        ended = self.linker.num_completed_offloads()
        for _ in range(ended):
            assert self.linker.pop_completed_offload() is False
        return ended

    def learn(self) -> None:
        """What was asked for, as a step does that comes a while later."""
        self.linker._replica.learn()

    def lookup(self, request_id: str, names: Sequence[str]) -> int:
        """In a round, how many pages can be loaded."""
        self.round()
        return max(self.linker.lookup(request_id, self.transfer(names)), default=0)

    def load(self, request_id: str, names: Sequence[str], pages: Sequence[int]) -> bool:
        """From look-up to the end of the forward pass; whether all of it came."""
        assert self.lookup(request_id, names) == len(names)
        assert self.linker.load(request_id, self.transfer(names, pages))
        return self.forward()

    def forward(self) -> bool:
        """A batch: every layer waits."""
        index = self.linker.start_layer_wise_loading()
        counter: Any = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
        return index < 0 or self.linker.finish_layer_wise_loading(index)

    def check(self) -> None:
        """Once SGLang has heard of all that ended: nothing is leased, no request is kept, all invariants hold."""
        self.round()  # behind a launch, it may be
        self.round()
        self.half.check()
        assert len(self.half._requests) == 0
        assert self.linker.stats()["host_leased_blocks"] == 0


Make = Callable[..., Driver]


@contextmanager
def linkers() -> Iterator[Make]:
    """Linkers without an engine around them, which says what it was started with."""
    made: list[TieredKVLinker] = []

    def make(pool: Any = None, group: Any = None, enable_metrics: bool = False, **settings: Any) -> Driver:
        pool = pool if pool is not None else make_pool()
        params: Any = SimpleNamespace(
            page_size=PAGE,
            attn_tp_cache_group=None,
            tp_cache_group=group,
            enable_metrics=enable_metrics,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        )
        given = {"host_memory": "256KiB", "write_policy": "write_through"} | settings
        made.append(TieredKVLinker(None, params, components=(), extra_config=given))  # type: ignore[arg-type]
        return Driver(pool, made[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linker, "refuse_unsupported", lambda params, components: None)
        patch.setattr(linker, "read_backend", lambda: "")
        patch.setattr(linker, "read_identity", lambda *_: CacheIdentity("model", "float32", "", PAGE))
        yield make
        for each in made:
            each.close()
