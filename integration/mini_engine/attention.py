"""What one step computes (its chunks, as tensors) and causal attention over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_layout import PagedKV

_FEW_ROWS = 128  # one or two tiles of rows of a fused attention kernel
_MANY_KEYS = 4096  # below, launching three kernels costs more than the idle part of the GPU


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """One sequence's share of a step.

    token_ids: the tokens to compute now, at least one.
    start: position of the first of them; everything in front lies in the cache, or is loaded in this step.
    block_ids: the whole block table, with room for all of them.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Length of the sequence once the chunk is computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Span:
    """Where one chunk lies among the step's tokens, and what it attends to.

    rows: its slice of the concatenated tokens. block_ids: the blocks that hold `num_tokens` tokens, int64.
    mask: bool (chunk length, num_tokens), or None where no mask is needed.
    """

    rows: slice
    num_tokens: int
    block_ids: Tensor
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's chunks on the device; all tokens of all chunks are concatenated, int64 of shape (total,)."""

    token_ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, Tensor]
    last_rows: Tensor
    spans: list[Span]

    @classmethod
    def build(cls, chunks: Sequence[SequenceChunk], block_size: int, device: torch.device) -> StepInputs:
        """Check the chunks and move their indices to the device, in one copy that the host does not wait for."""
        for chunk in chunks:
            _check(chunk, block_size)
        positions = list(chain.from_iterable(range(chunk.start, chunk.num_tokens) for chunk in chunks))
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        tables = [chunk.block_ids[: -(-chunk.num_tokens // block_size)] for chunk in chunks]
        slot_blocks = [
            chunk.block_ids[position // block_size]
            for chunk in chunks
            for position in range(chunk.start, chunk.num_tokens)
        ]
        token_ids, where, blocks, offsets, last_rows, *tables_on_device = _to_device(
            [
                list(chain.from_iterable(chunk.token_ids for chunk in chunks)),
                positions,
                slot_blocks,
                [position % block_size for position in positions],
                [end - 1 for end in ends],
                *tables,
            ],
            device,
        )
        spans = [
            _span(chunk, end, table, device) for chunk, end, table in zip(chunks, ends, tables_on_device, strict=True)
        ]
        return cls(token_ids, where, (blocks, offsets), last_rows, spans)


def attend(queries: Tensor, cache: PagedKV, spans: Sequence[Span]) -> Tensor:
    """Causal attention of queries (total, num_q_heads, head_dim) over the cache; (total, num_q_heads * head_dim)."""
    total, num_q_heads, head_dim = queries.shape
    num_kv_heads = cache.keys.shape[2]
    # KV heads stand in the batch dimension and are broadcast over their query heads: nothing is copied for GQA.
    grouped = queries.view(total, num_kv_heads, num_q_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    out = queries.new_empty(queries.shape)
    grouped_out = out.view(total, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    for span in spans:
        keys, values = (
            x.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1)
            for x in cache.read(span.block_ids, span.num_tokens, queries.dtype)
        )
        rows = grouped[:, :, span.rows]
        if rows.is_cuda and rows.shape[2] <= _FEW_ROWS and span.num_tokens >= _MANY_KEYS:
            grouped_out[:, :, span.rows] = _attend_few(rows, keys, values, span.mask)
        else:
            grouped_out[:, :, span.rows] = F.scaled_dot_product_attention(
                rows, keys, values, attn_mask=span.mask, is_causal=span.is_causal
            )
    return out.view(total, -1)


def _attend_few(rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of few rows to many keys by plain products: they use the whole GPU where a fused kernel, with one
    program per head and tile of rows, uses a corner of it. (On the CPU the fused kernel is the quicker one.)"""
    # Query heads of one KV head are rows of one product: broadcasting would copy the keys for each of them.
    scores = (rows.flatten(1, 2) @ keys[:, 0].transpose(-1, -2)).unflatten(1, rows.shape[1:3]) * rows.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1).flatten(1, 2) @ values[:, 0]).unflatten(1, rows.shape[1:3])


def _span(chunk: SequenceChunk, end: int, block_ids: Tensor, device: torch.device) -> Span:
    length = len(chunk.token_ids)
    mask = None
    if chunk.start > 0 and length > 1:
        # SDPA's own causal mask is aligned to the first key; a chunk with tokens in front needs it at the last one.
        mask = torch.ones(length, chunk.num_tokens, dtype=torch.bool, device=device).tril_(chunk.start)
    return Span(slice(end - length, end), chunk.num_tokens, block_ids, mask, is_causal=chunk.start == 0)


def _check(chunk: SequenceChunk, block_size: int) -> None:
    room = len(chunk.block_ids) * block_size
    assert chunk.token_ids, "a chunk without tokens"
    assert chunk.start >= 0 and chunk.num_tokens <= room, f"{chunk.num_tokens} tokens, blocks for {room}"


def _to_device(columns: Sequence[list[int]], device: torch.device) -> tuple[Tensor, ...]:
    """One int64 tensor per column; from pinned memory, so that the host does not wait for the device."""
    packed = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.int64)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(column) for column in columns])
