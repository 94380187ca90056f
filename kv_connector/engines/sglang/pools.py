"""SGLang's device pages: the tensors of its pool by layer, and its token slots as pages.

    MHATokenToKVPool   k_buffer, v_buffer: by layer (slots, heads, width)
    MLATokenToKVPool   kv_buffer: by layer (slots, 1, width), the same on every rank of tensor parallelism

A page is `page_size` slots that follow one another; page 0 is SGLang's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from ...errors import ConfigError
from ...types import BlockHash


class DevicePages:
    """The pages of one rank, as registered, and as the scheduler half sees them.

    SGLang locks what copies use by itself, until it has heard of their ends: nothing here is pinned. It tells nobody
    which pages it will hand out next.
    """

    def __init__(self, pool: object, page_size: int) -> None:
        """Raises ConfigError for a pool whose pages are not known."""
        self.page_size = page_size
        self.are_replicated = type(pool) is MLATokenToKVPool
        """Every rank holds the same bytes."""
        buffers = _buffers(pool)
        self.num_pages = min(len(buffer) for layer in buffers for buffer in layer) // page_size
        self.tensors: dict[str, list[torch.Tensor]] = {
            str(index): [self._as_pages(buffer) for buffer in layer] for index, layer in enumerate(buffers)
        }
        """By layer, in the order of the forward pass; each of shape (pages, page size, heads, width)."""
        self.device = buffers[0][0].device

    def ids_of(self, slots: torch.Tensor) -> list[int] | None:
        """The pages that these token slots, int64 of shape (tokens,), are. None for others than whole pages of this
        pool. Waits for the current stream, which has made the slots."""
        size = self.page_size
        if slots.numel() % size:
            return None
        ends = slots.view(-1, size)[:, [0, -1]].tolist()
        ids = [first // size for first, _ in ends]
        are_pages = all(first % size == 0 and last == first + size - 1 for first, last in ends)
        return ids if are_pages and all(0 <= page < self.num_pages for page in ids) else None

    def touch(self, block_ids: Sequence[int]) -> None:
        """SGLang has locked them."""

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """SGLang unlocks them."""

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        """Nobody knows."""
        return ()

    @property
    def num_available(self) -> int:
        """Enough: loads are given their pages with the request."""
        return self.num_pages

    def forget(self, block_ids: Collection[int]) -> None:
        """Pages of a load that failed are the request's own, and SGLang aborts it."""

    def _as_pages(self, buffer: torch.Tensor) -> torch.Tensor:
        used = buffer[: self.num_pages * self.page_size]
        return used.view(self.num_pages, self.page_size, *buffer.shape[1:])


def _buffers(pool: Any) -> list[list[torch.Tensor]]:
    """The tensors of each layer, (slots, ...) each."""
    if type(pool) is MLATokenToKVPool:
        return [[buffer] for buffer in pool.kv_buffer]
    if type(pool) is not MHATokenToKVPool:
        raise ConfigError(
            f"the cache of this model ({type(pool).__name__}) is not served yet: full attention with keys and values, "
            "and MLA, are; start it without --enable-unified-cache-external-linker"
        )
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise ConfigError("a KV cache with scales of its own is not served yet: give --kv-cache-dtype auto or fp8_e4m3")
    return [list(layer) for layer in zip(pool.k_buffer, pool.v_buffer, strict=True)]
