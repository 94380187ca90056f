"""The kernels of `code_pieces`: a program moves a segment at a time, each warp whole chunks of it.

Four words of every quarter lie in each thread, so that loads and stores are as wide as they can be, and what a chunk
needs is found within a warp. The words of the program's next segment are on their way meanwhile. Exceptions are
numbered by prefix sums, without atomics, so that the same piece always has the same bytes; every element is read once,
so that one that changes meanwhile spoils no other.

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
def _even_bytes(a, b, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes 0 of both words, then bytes 2: signs and mantissas of two rotated words, or the first word of those and
    exponents."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6240;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return (a & 0x00FF00FF) | ((b << 8) & 0xFF00FF00)


@triton.jit  # type: ignore[untyped-decorator]
def _odd_bytes(a, b, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes 1 of both words, then bytes 3: exponents of two rotated words, or the second word."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7351;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1
        )
    return ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)


@triton.jit
def _larger_halves(a, b):  # type: ignore[no-untyped-def]
    """Of two words, each half's larger, on Hopper and later."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def _lowest_of(words, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of rotated words, as int32: the largest exponent less 15, at least 0."""
    # The upper element of each word decides a comparison of words, once of them and once of them shifted.
    if ASM == 2:
        words = tl.reduce(words, 2, _larger_halves)
        largest = tl.max(tl.maximum(words, words << 16), axis=0)
    else:
        largest = tl.max(tl.max(tl.maximum(words, words << 16), axis=2), axis=0)
    return tl.maximum((largest >> 24).to(tl.int32) - 15, 0)


@triton.jit
def _rotated(words):  # type: ignore[no-untyped-def]
    return (words << 1) | (words >> 31)


@triton.jit
def _rotated_back(words):  # type: ignore[no-untyped-def]
    return (words >> 1) | (words << 31)


@triton.jit
def _pattern(lowest):  # type: ignore[no-untyped-def]
    """Of the lowest exponents of a chunk's quarters, a byte each: those of the first two and of the last two, as they
    lie in words of exponents."""
    return ((lowest & 0xFFFF) * 0x10001)[None, :, None], ((lowest >> 16) * 0x10001)[None, :, None]


@triton.jit
def _split(item, num_regions, segments):  # type: ignore[no-untyped-def]
    """Which segment of which region of which block."""
    return item % segments, item // segments % num_regions, item // segments // num_regions


@triton.jit
def _next(segment, region, block, step, num_regions, segments):  # type: ignore[no-untyped-def]
    """The one so many further on, without a division."""
    segment += step[0]
    carry = (segment >= segments).to(tl.int32)
    segment -= carry * segments
    region += step[1] + carry
    carry = (region >= num_regions).to(tl.int32)
    return segment, region - carry * num_regions, block + step[2] + carry


@triton.jit  # type: ignore[untyped-decorator]
def _put_exceptions(words, numbers, at, slots, exponents, number, is_out, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store those `exponents` that are exceptions in slot `at` of `words`, and `number` in that of `numbers`."""
    mask = (is_out != 0) & (at < slots)
    if ASM:  # by the threads that have them: few do, and `tl.store` would share all of them out anew
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b64 a, b;
            setp.ne.u32 p, $6, 0;
            mad.wide.u32 a, $3, 4, $1;
            mad.wide.u32 b, $3, 2, $2;
            @p st.global.u32 [a], $4;
            @p st.global.u16 [b], $5;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,r,r,r",
            [words.to(tl.int64), numbers.to(tl.int64), at, exponents, number, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(words + at, exponents, mask=mask)
        tl.store(numbers + at, number.to(tl.uint16), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _segment(  # type: ignore[no-untyped-def]
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
def _places(ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks, and words of a quarter of them: four for each of a warp's threads."""
    rows, words = tl.arange(0, ROWS)[None, :, None], tl.arange(0, 4)[None, None, :]
    return rows, tl.arange(0, 32)[:, None, None] * 4 + words


@triton.jit  # type: ignore[untyped-decorator]
def _shape(elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a segment's chunks: words of a quarter each, and which of ROWS times 128 of them there are."""
    rows, columns = _places(ROWS)
    if WHOLE:
        quarter = tl.full((1, ROWS, 1), 128, tl.int32)
        there = (rows * 1024 < elements) & (columns >= 0)
    else:
        # A multiple of four, which Triton sees: loads and stores are as wide as those of whole chunks.
        quarter = (tl.minimum(tl.maximum(elements - rows * 1024, 0), 1024) >> 5) * 4
        there = columns < quarter
    return quarter, there


@triton.jit
def _words(address):  # type: ignore[no-untyped-def]
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _load_words(piece, elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four quarters of a segment's chunks."""
    quarter, there = _shape(elements, ROWS, WHOLE)
    rows, columns = _places(ROWS)
    at = _words(piece) + rows * 512 + columns
    w0 = tl.load(at, mask=there, other=0)
    w1 = tl.load(at + quarter, mask=there, other=0)
    w2 = tl.load(at + 2 * quarter, mask=there, other=0)
    w3 = tl.load(at + 3 * quarter, mask=there, other=0)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def _load_coded(row, elements, ROWS: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Signs and mantissas, codes, lowest exponents and number of exceptions of a segment."""
    quarter, there = _shape(elements, ROWS, WHOLE)
    rows, columns = _places(ROWS)
    words = _words(row)
    rest = words + rows * 256 + columns
    s0 = tl.load(rest, mask=there, other=0)
    s1 = tl.load(rest + quarter, mask=there, other=0)
    codes = tl.load(tl.multiple_of(words + (elements >> 2), 16) + rows * 128 + columns, mask=there, other=0)
    head = words + (elements >> 3) * 3
    row = tl.arange(0, ROWS)
    lowest = tl.load(head + row, mask=row * 1024 < elements, other=0)
    total = tl.load(head + ((elements + 1023) >> 10), mask=elements > 0, other=0).to(tl.int32)
    return s0, s1, codes, lowest, total


@triton.jit
def _num_slots(chunks):  # type: ignore[no-untyped-def]
    """Exceptions for which a segment has room, and its head's words; none of what is not there."""
    head = tl.where(chunks > 0, tl.maximum(chunks * 8, 12), 0)
    return (head - chunks - 1) * 4 // 6, head


@triton.jit  # type: ignore[untyped-decorator]
def _list_exceptions(  # type: ignore[no-untyped-def]
    head, chunks, is_out0, is_out1, e0, e1, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Write those words of exponents that are exceptions, in their order, and their numbers."""
    slots, _ = _num_slots(chunks)
    rows, columns = _places(ROWS)
    of_column = is_out0 + is_out1
    of_thread = tl.reshape(tl.trans(tl.sum(of_column, 2)), (ROWS * 32,))
    before = tl.trans(tl.reshape(tl.cumsum(of_thread, 0) - of_thread, (ROWS, 32)))[:, :, None]
    at = before + tl.cumsum(of_column, 2) - of_column
    words = head + chunks + 1
    numbers = (words + slots).to(tl.pointer_type(tl.uint16))
    number = (rows * 128 + columns) * 2
    _put_exceptions(words, numbers, at, slots, e0, number, is_out0, ASM)
    _put_exceptions(words, numbers, at + is_out0, slots, e1, number + 1, is_out1, ASM)


@triton.jit  # type: ignore[untyped-decorator]
def _patch_exceptions(  # type: ignore[no-untyped-def]
    words, rest, head, elements, total, ROWS: tl.constexpr, ASM: tl.constexpr
):
    """Write the two words of each exception again, to what holds the others already."""
    chunks = (elements + 1023) >> 10
    slots, _ = _num_slots(chunks)
    slot = tl.arange(0, 8 * ROWS)
    listed = head + chunks + 1
    used = (slot < slots) & (slot < total)
    exponents = tl.load(listed + slot, mask=used, other=0)
    number = tl.load((listed + slots).to(tl.pointer_type(tl.uint16)) + slot, mask=used, other=0).to(tl.int32)
    chunk, column, half = number >> 8, (number >> 1) & 127, number & 1
    quarter = tl.minimum(tl.maximum(elements - chunk * 1024, 0), 1024) >> 3
    used = used & (column < quarter)
    own = tl.load(rest + chunk * 256 + half * quarter + column, mask=used, other=0)
    at = words + chunk * 512 + half * 2 * quarter + column
    tl.store(at, _rotated_back(_even_bytes(own, exponents, ASM)), mask=used)
    tl.store(at + quarter, _rotated_back(_odd_bytes(own, exponents, ASM)), mask=used)


@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=launch_metadata,
    do_not_specialize=["verdicts", "flat_base", "row_bytes", "num_items", "num_regions", "segments", "block_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"],
)
def encode_kernel(  # type: ignore[no-untyped-def]
    block_ids,
    flat_ids,
    bases,
    strides,
    sizes,
    offsets,
    verdicts,
    flat_base,
    row_bytes,
    num_items,
    num_regions,
    segments,
    block_bytes,  # for launch_metadata only
    IN_ORDER: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
):
    rows, columns = _places(ROWS)
    num_blocks = num_items // num_regions // segments
    segment, region, block = _split(tl.program_id(0), num_regions, segments)
    step = _split(tl.num_programs(0), num_regions, segments)
    piece, row, elements = _segment(
        block_ids, flat_ids, bases, strides, sizes, offsets,
        flat_base, row_bytes, block, region, segment, num_blocks, segments, IN_ORDER,
    )  # fmt: skip
    w0, w1, w2, w3 = _load_words(piece, elements, ROWS, WHOLE)
    for _ in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment, region, next_block = _next(segment, region, block, step, num_regions, segments)
        next_piece, next_row, next_elements = _segment(
            block_ids, flat_ids, bases, strides, sizes, offsets,
            flat_base, row_bytes, next_block, region, segment, num_blocks, segments, IN_ORDER,
        )  # fmt: skip
        n0, n1, n2, n3 = _load_words(next_piece, next_elements, ROWS, WHOLE)
        r0, r1, r2, r3 = _rotated(w0), _rotated(w1), _rotated(w2), _rotated(w3)
        lowest = (
            _lowest_of(r0, ASM) | (_lowest_of(r1, ASM) << 8) | (_lowest_of(r2, ASM) << 16) | (_lowest_of(r3, ASM) << 24)
        )
        lowest = lowest.to(tl.uint32)
        low0, low1 = _pattern(lowest)
        e0, e1 = _odd_bytes(r0, r1, ASM), _odd_bytes(r2, r3, ASM)
        t0, t1 = e0 - low0, e1 - low1
        quarter, there = _shape(elements, ROWS, WHOLE)
        words = _words(row)
        rest = words + rows * 256 + columns
        tl.store(rest, _even_bytes(r0, r1, ASM), mask=there)
        tl.store(rest + quarter, _even_bytes(r2, r3, ASM), mask=there)
        codes = (t0 & 0x0F0F0F0F) | ((t1 << 4) & 0xF0F0F0F0)
        tl.store(tl.multiple_of(words + (elements >> 2), 16) + rows * 128 + columns, codes, mask=there)
        is_out0 = tl.minimum(t0 & 0xF0F0F0F0, 1).to(tl.int32)
        is_out1 = tl.minimum(t1 & 0xF0F0F0F0, 1).to(tl.int32)
        if not WHOLE:  # what is not there has exponent 0
            is_out0, is_out1 = tl.where(there, is_out0, 0), tl.where(there, is_out1, 0)
        counts = tl.sum(tl.sum(is_out0 + is_out1, 2), 0)
        total = tl.sum(counts, 0)
        chunks = (elements + 1023) >> 10
        slots, head_words = _num_slots(chunks)
        head = words + (elements >> 3) * 3
        chunk = tl.arange(0, ROWS)
        tl.store(head + chunk, lowest, mask=chunk < chunks)
        tl.store(head + chunks, total.to(tl.uint32), mask=chunks > 0)
        slot = tl.arange(0, 8 * ROWS)
        listed = head + chunks + 1
        is_free = slot >= tl.minimum(total, slots)
        tl.store(listed + slot, tl.zeros((8 * ROWS,), tl.uint32), mask=is_free & (slot < slots))
        numbers = (listed + slots).to(tl.pointer_type(tl.uint16))
        halves = 2 * (head_words - chunks - 1 - slots)
        tl.store(numbers + slot, tl.zeros((8 * ROWS,), tl.uint16), mask=is_free & (slot < halves))
        if total > 0:
            _list_exceptions(head, chunks, is_out0, is_out1, e0, e1, ROWS, ASM)
            if total > slots:
                tl.store((verdicts + block.to(tl.int64) * 4).to(tl.pointer_type(tl.int32)), 1)
        piece, row, elements, block = next_piece, next_row, next_elements, next_block
        w0, w1, w2, w3 = n0, n1, n2, n3


@triton.jit(  # type: ignore[untyped-decorator]
    launch_metadata=launch_metadata,
    do_not_specialize=["flat_base", "row_bytes", "num_items", "num_regions", "segments", "block_bytes"],
    do_not_specialize_on_alignment=["block_ids", "flat_ids", "bases", "strides", "sizes", "offsets"],
)
def decode_kernel(  # type: ignore[no-untyped-def]
    block_ids,
    flat_ids,
    bases,
    strides,
    sizes,
    offsets,
    flat_base,
    row_bytes,
    num_items,
    num_regions,
    segments,
    block_bytes,  # for launch_metadata only
    IN_ORDER: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
):
    rows, columns = _places(ROWS)
    num_blocks = num_items // num_regions // segments
    segment, region, block = _split(tl.program_id(0), num_regions, segments)
    step = _split(tl.num_programs(0), num_regions, segments)
    piece, row, elements = _segment(
        block_ids, flat_ids, bases, strides, sizes, offsets,
        flat_base, row_bytes, block, region, segment, num_blocks, segments, IN_ORDER,
    )  # fmt: skip
    s0, s1, codes, lowest, total = _load_coded(row, elements, ROWS, WHOLE)
    for _ in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment, region, next_block = _next(segment, region, block, step, num_regions, segments)
        next_piece, next_row, next_elements = _segment(
            block_ids, flat_ids, bases, strides, sizes, offsets,
            flat_base, row_bytes, next_block, region, segment, num_blocks, segments, IN_ORDER,
        )  # fmt: skip
        n0, n1, next_codes, next_lowest, next_total = _load_coded(next_row, next_elements, ROWS, WHOLE)
        low0, low1 = _pattern(lowest)
        e0, e1 = (codes & 0x0F0F0F0F) + low0, ((codes >> 4) & 0x0F0F0F0F) + low1
        quarter, there = _shape(elements, ROWS, WHOLE)
        words = _words(piece)
        at = words + rows * 512 + columns
        tl.store(at, _rotated_back(_even_bytes(s0, e0, ASM)), mask=there)
        tl.store(at + quarter, _rotated_back(_odd_bytes(s0, e0, ASM)), mask=there)
        tl.store(at + 2 * quarter, _rotated_back(_even_bytes(s1, e1, ASM)), mask=there)
        tl.store(at + 3 * quarter, _rotated_back(_odd_bytes(s1, e1, ASM)), mask=there)
        if total != 0:
            tl.debug_barrier()  # other threads have written these words
            rest = _words(row)
            _patch_exceptions(words, rest, rest + (elements >> 3) * 3, elements, total, ROWS, ASM)
        piece, row, elements, block = next_piece, next_row, next_elements, next_block
        s0, s1, codes, lowest, total = n0, n1, next_codes, next_lowest, next_total
