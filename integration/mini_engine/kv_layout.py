"""The paged KV cache of one layer on one rank: its layouts, and how tokens are written to it and read from it.

Attention always reads what lies in the cache, also for the tokens computed in the same step. So a block that was
loaded gives the same result as the block that was computed, whatever the precision it is stored in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KVDtype = Literal["auto", "fp8"]
KVLayout = Literal["NHD", "split", "HND"]
LayerCache = Tensor | list[Tensor]
"""A layer's tensor, or for fp8 the pair [values, scales]."""

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides the form of one layer's cache on one rank; `num_heads` counts that rank's KV heads."""

    num_heads: int
    head_dim: int
    layout: KVLayout = "NHD"
    kv_dtype: KVDtype = "auto"
    key_only: bool = False

    def allocate(self, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype) -> LayerCache:
        """Zeroed cache tensor(s): values of `dtype` (fp8: float8_e4m3fn), scales fp32 with last dimension 1 or 2."""
        value_dtype = _FP8 if self.kv_dtype == "fp8" else dtype
        values = torch.zeros(self._dims(num_blocks, block_size, self.head_dim), device=device, dtype=value_dtype)
        if self.kv_dtype == "auto":
            return values
        return [values, torch.zeros(self._dims(num_blocks, block_size, 1), device=device, dtype=torch.float32)]

    def view(self, cache: LayerCache) -> PagedKV:
        """The cache as views that start with (num_blocks, block_size, num_heads), whatever its layout."""
        if isinstance(cache, Tensor):
            return PagedKV(*self._split(cache), scales=None)
        values, scales = cache
        # Indexing kernels know bytes on every device, float8 only on some.
        return PagedKV(*self._split(values.view(torch.uint8)), scales=self._split(scales))

    def _dims(self, num_blocks: int, block_size: int, width: int) -> tuple[int, ...]:
        if self.key_only:
            return num_blocks, block_size, width
        if self.layout == "HND":
            return num_blocks, self.num_heads, block_size, 2 * width
        tail = (block_size, self.num_heads, width)
        return (num_blocks, 2, *tail) if self.layout == "NHD" else (2, num_blocks, *tail)

    def _split(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of keys and values, each (num_blocks, block_size, num_heads, width); no values where key-only."""
        if self.key_only:
            return tensor.unsqueeze(2), None
        if self.layout == "HND":
            width = tensor.shape[-1] // 2
            keys, values = torch.split(tensor.permute(0, 2, 1, 3), width, dim=-1)
            return keys, values
        keys, values = tensor.unbind(1 if self.layout == "NHD" else 0)
        return keys, values


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's cache as views (num_blocks, block_size, num_heads, head_dim); scales have a last dimension of 1.

    `values` is None for a key-only layer, where the cached latent is key and value at once.
    """

    keys: Tensor
    values: Tensor | None
    scales: tuple[Tensor, Tensor | None] | None

    def write(self, slots: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Store keys and values (num_tokens, num_heads, head_dim) at `slots`: block ids and offsets, (num_tokens,)."""
        key_scales, value_scales = self.scales or (None, None)
        _put(self.keys, key_scales, slots, keys)
        if self.values is not None:
            _put(self.values, value_scales, slots, values)

    def read(self, block_ids: Tensor, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's first tokens, each (num_tokens, num_heads, head_dim) of `dtype`."""
        key_scales, value_scales = self.scales or (None, None)
        keys = _get(self.keys, key_scales, block_ids, dtype)[:num_tokens]
        if self.values is None:
            return keys, keys
        return keys, _get(self.values, value_scales, block_ids, dtype)[:num_tokens]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values of x and their fp32 scales (last dimension 1): one scale per token and head."""
    scales = x.abs().amax(dim=-1, keepdim=True).float().clamp_(min=1e-12) / _FP8_MAX
    return (x / scales).to(_FP8), scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `quantize`, up to rounding."""
    return (values.float() * scales).to(dtype)


def _put(pages: Tensor, scales: Tensor | None, slots: Sequence[Tensor], x: Tensor) -> None:
    if scales is not None:
        quantized, x_scales = quantize(x)
        scales.index_put_(tuple(slots), x_scales)
        x = quantized.view(torch.uint8)
    pages.index_put_(tuple(slots), x)


def _get(pages: Tensor, scales: Tensor | None, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
    gathered = pages.index_select(0, block_ids).flatten(0, 1)
    if scales is None:
        return gathered
    return dequantize(gathered.view(_FP8), scales.index_select(0, block_ids).flatten(0, 1), dtype)
