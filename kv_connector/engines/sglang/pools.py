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


class PageIds:
    """Ids of the pages that some token slots are, on their way from the device.

    SGLang's scheduler makes slots on a stream that also waits for the forward pass under way: whoever waits for them at
    once keeps it from planning the next one.
    """

    def __init__(self, slots: torch.Tensor, page_size: int) -> None:
        """`slots`: int64 of shape (tokens,)."""
        self.num_tokens = slots.numel()
        # The first slot of each page and the last.
        shape, step = (self.num_tokens // page_size, 2), slots.stride(0)
        ends = slots.as_strided(shape, (page_size * step, (page_size - 1) * step))
        self._ends = ends
        self._event: Any = None
        if slots.is_cuda:
            self._ends = torch.empty(shape, dtype=ends.dtype, pin_memory=True)
            self._ends.copy_(ends, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(slots.device))

    def have_come(self) -> bool:
        """Whether `ends` will not wait."""
        return self._event is None or bool(self._event.query())

    def ends(self) -> torch.Tensor:
        """Wait for them: the first slot of each page and the last, of shape (pages, 2)."""
        if self._event is not None:
            self._event.synchronize()
        return self._ends


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
        # By page, its first slot and its last.
        firsts = torch.arange(self.num_pages, dtype=torch.int64, device="cpu") * page_size
        self._ends = torch.stack([firsts, firsts + page_size - 1], dim=1).numpy()

    def ids_of(self, slots: torch.Tensor) -> PageIds:
        """The pages that these token slots, int64 of shape (tokens,), are. Does not wait for the current stream, which
        makes the slots."""
        return PageIds(slots, self.page_size)

    def read(self, pages: PageIds) -> list[int] | None:
        """Wait for these. None where they are others than whole pages of the pool."""
        ends = pages.ends().numpy()
        ids = ends[:, 0] // self.page_size
        # Compared as bytes: a scheduler that has done other things for a while calls each of NumPy's functions slowly.
        are_pages = self._ends.take(ids, axis=0, mode="clip").tobytes() == ends.tobytes()
        return ids.tolist() if are_pages and len(ids) * self.page_size == pages.num_tokens else None

    def touch(self, block_ids: Sequence[int]) -> None:
        """Does nothing: SGLang has locked them."""

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Does nothing: SGLang unlocks them."""

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        """Nothing: SGLang does not tell."""
        return ()

    @property
    def num_available(self) -> int:
        """A number that is always enough: SGLang allocates the pages of a load itself."""
        return self.num_pages

    def forget(self, block_ids: Collection[int]) -> None:
        """Does nothing: pages of a failed load are the request's own, and SGLang aborts it."""

    def _as_pages(self, buffer: torch.Tensor) -> torch.Tensor:
        used = buffer[: self.num_pages * self.page_size]
        return used.view(self.num_pages, self.page_size, *buffer.shape[1:])


def _buffers(pool: Any) -> list[list[torch.Tensor]]:
    """The tensors of each layer, (slots, ...) each."""
    if type(pool) is MLATokenToKVPool:
        return [[buffer] for buffer in pool.kv_buffer]
    if type(pool) is not MHATokenToKVPool:
        raise ConfigError(
            f"the cache of this model ({type(pool).__name__}) is not supported yet: full attention with keys and "
            "values, and MLA, are; start it without --enable-unified-cache-external-linker"
        )
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None:
        raise ConfigError("a KV cache with its own scales is not supported yet: give --kv-cache-dtype auto or fp8_e4m3")
    return [list(layer) for layer in zip(pool.k_buffer, pool.v_buffer, strict=True)]
