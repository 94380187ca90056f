"""Segments of coded pieces, as the kernels of `encoding` and `decoding` see them: where they lie, and their words.

A program moves a segment at a time, each warp whole chunks of it. Four words of every quarter lie in each thread, so
that loads and stores are as wide as they can be, and what a chunk needs is found within a warp.

`ASM` says what may be written in the GPU's own instructions: 0 nothing, as the interpreter has none, 1 what all have,
2 what Hopper and later have. All give the same bytes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def launch_metadata(grid: tuple[int, ...], kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    count = args["num_items"] // (args["num_regions"] * args["segments"])
    return {"name": kernel.name, "bytes": count * args["block_bytes"] * 7 // 4}


@triton.jit  # type: ignore[untyped-decorator]
def even_bytes(a, b, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes 0 of both words, then bytes 2: signs and mantissas of two rotated words, or the first word of those and
    exponents."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6240;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return (a & 0x00FF00FF) | ((b << 8) & 0xFF00FF00)


@triton.jit  # type: ignore[untyped-decorator]
def odd_bytes(a, b, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes 1 of both words, then bytes 3: exponents of two rotated words, or the second word."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7351;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)


@triton.jit
def rotated(words):  # type: ignore[no-untyped-def]
    return (words << 1) | (words >> 31)


@triton.jit
def rotated_back(words):  # type: ignore[no-untyped-def]
    return (words >> 1) | (words << 31)


@triton.jit
def pattern(lowest):  # type: ignore[no-untyped-def]
    """Of the lowest exponents of a chunk's quarters, a byte each: those of the first two and of the last two, as they
    lie in words of exponents."""
    return ((lowest & 0xFFFF) * 0x10001)[None, :, None], ((lowest >> 16) * 0x10001)[None, :, None]


@triton.jit
def split_item(item, num_regions, segments):  # type: ignore[no-untyped-def]
    """Which segment of which region of which block."""
    return item % segments, item // segments % num_regions, item // segments // num_regions


@triton.jit
def next_item(segment, region, block, step, num_regions, segments):  # type: ignore[no-untyped-def]
    """The one so many further on, without a division."""
    segment += step[0]
    carry = (segment >= segments).to(tl.int32)
    segment -= carry * segments
    region += step[1] + carry
    carry = (region >= num_regions).to(tl.int32)
    return segment, region - carry * num_regions, block + step[2] + carry


@triton.jit  # type: ignore[untyped-decorator]
def segment_of(  # type: ignore[no-untyped-def]
    block_ids,
    flat_ids,
    bases,
    strides,
    sizes,
    offsets,
    flat_base,
    row_bytes,
    block,
    region,
    segment,
    num_blocks,
    segments,
    IN_ORDER: tl.constexpr,
):
    """Address of a segment's elements and of its coded form, and its elements: none behind the last block."""
    there = block < num_blocks
    size = tl.load(sizes + region).to(tl.int32)
    block_id = tl.load(block_ids + block, mask=there, other=0)
    row_id = block.to(tl.int64) if IN_ORDER else tl.load(flat_ids + block, mask=there, other=0)
    piece = tl.load(bases + region) + block_id * tl.load(strides + region)
    row = flat_base + row_id * row_bytes + tl.load(offsets + region)
    step = (size + 2047) >> 11
    if segments > 1:  # a smaller piece may have fewer: its last ones are empty
        own = (step + 15) >> 4
        step = (step + own - 1) // own
    first = segment * step
    elements = tl.where(there, tl.maximum(tl.minimum((size >> 1) - first * 1024, step * 1024), 0), 0)
    # Of several segments each but the last has the same number of chunks, and more than one.
    piece = tl.multiple_of(piece + first.to(tl.int64) * 2048, 16)
    row = tl.multiple_of(row + first.to(tl.int64) * 1568, 16)
    return piece, row, elements


@triton.jit  # type: ignore[untyped-decorator]
def places(ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks, and words of a quarter of them: four for each of a warp's threads."""
    rows, words = tl.arange(0, ROWS)[None, :, None], tl.arange(0, 4)[None, None, :]
    return rows, tl.arange(0, 32)[:, None, None] * 4 + words


@triton.jit  # type: ignore[untyped-decorator]
def shape_of(elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a segment's chunks: words of a quarter each, and which of ROWS times 128 of them there are."""
    rows, columns = places(ROWS)
    if WHOLE:
        quarter = tl.full((1, ROWS, 1), 128, tl.int32)
        there = (rows * 1024 < elements) & (columns >= 0)
    else:
        # A multiple of four, which Triton sees: loads and stores are as wide as those of whole chunks.
        quarter = (tl.minimum(tl.maximum(elements - rows * 1024, 0), 1024) >> 5) * 4
        there = columns < quarter
    return quarter, there


@triton.jit
def words_at(address):  # type: ignore[no-untyped-def]
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def num_slots(chunks):  # type: ignore[no-untyped-def]
    """Exceptions for which a segment has room, and its head's words; none of what is not there."""
    head = tl.where(chunks > 0, tl.maximum(chunks * 8, 12), 0)
    return (head - chunks - 1) * 4 // 6, head
