"""The coded form of a piece of bf16 elements: fewer bytes, bit for bit the same piece. Format, sizes, torch coder.

A bf16 element is a sign, 8 bits of exponent and 7 of mantissa. The exponents of keys and values lie a few below their
largest, so four bits are enough for nearly all; signs and mantissas are kept as they are, and the few exponents that
are further down are kept whole, in a list.

A piece is cut in chunks of `CHUNK` elements, the last one shorter, and these in segments of equal numbers of chunks, at
most `SEGMENT_CHUNKS`, which are coded one by one and lie one behind the other:

    segment | signs and mantissas: 1 byte an element | codes: half a byte an element | head: 32 bytes a chunk |

Little-endian words of 32 bits throughout. A chunk's words, two elements each, are four quarters w0, w1, w2, w3 of q
words (128 of a whole chunk). With M = 0x00FF00FF and i from 0 to q - 1:

    rk = wk[i] rotated left by one bit: exponents are its bytes 1 and 3, the others a mantissa and a sign each
    signs and mantissas   s0[i] = r0 & M | (r1 & M) << 8        s1[i] the same of r2, r3: first all of s0, then of s1
    exponents             e0[i] = (r0 >> 8) & M | r1 & ~M       e1[i] of r2, r3
    lowest                lowk = the largest exponent of quarter k, less 15, but not below 0
    codes                 t0 = e0[i] - (low0, low1, low0, low1), t1 = e1[i] - (low2, low3, low2, low3), as words
                          c[i] = t0 & 0x0F0F0F0F | (t1 & 0x0F0F0F0F) << 4

Where t0 or t1 has more than four bits in some byte, an exponent is below its quarter's lowest, and the whole word e0[i]
or e1[i] goes into the list, under its number: (128 * chunk + i) * 2, and 1 more for e1. The head of a segment:

    low0..low3 of each chunk, a byte each | number of exceptions, 4 bytes | their words | their numbers, 2 bytes each |

In order, filled up with zeros. A segment with more exceptions than have room does not fit, nor does its piece: what is
stored of it is of no use, and the number of exceptions says so.
"""

from __future__ import annotations

import torch

FORMAT = "bf16-4bit-1"
"""Goes into the identity of what is stored: another one where any byte changes."""
ELEMENT_BYTES = 2
CHUNK = 1024
"""Elements, a warp's widest loads of four words, each of another quarter."""
SEGMENT_CHUNKS = 16
"""They share a list of exceptions; a program moves a segment at a time."""
ALIGN = 16
"""Bytes: of a piece on the device, its distance from block to block, and where it is stored. A thread's widest load."""
LEAST_BYTES = 64
"""A piece's length is a multiple of this, so that each quarter of a chunk is a multiple of `ALIGN`."""
_HEAD = 32  # bytes a chunk
_LEAST_HEAD = 48  # of a segment: one chunk alone has room for six exceptions
_COLUMNS = CHUNK // 8
_EVEN = 0x00FF00FF
_ODD = ~_EVEN
_NIBBLES = 0x0F0F0F0F


def can_code(piece_bytes: int) -> bool:
    """Whether a piece of so many bytes can be coded and is shorter then."""
    return piece_bytes > 0 and piece_bytes % LEAST_BYTES == 0 and coded_bytes(piece_bytes) < piece_bytes


def coded_bytes(piece_bytes: int) -> int:
    """Bytes that a piece is stored in, a multiple of `ALIGN`: 49/64 of it where it is whole chunks, two at least."""
    return sum(3 * size // 4 + head_bytes(chunks_of(size)) for size in segments_of(piece_bytes))


def chunks_of(num_bytes: int) -> int:
    """Number of chunks in `num_bytes` raw bytes, a short last one included."""
    return -(-num_bytes // (CHUNK * ELEMENT_BYTES))


def segment_chunks(piece_bytes: int) -> int:
    """Chunks of each of the piece's segments but the last one."""
    chunks = chunks_of(piece_bytes)
    return -(-chunks // -(-chunks // SEGMENT_CHUNKS))


def segments_of(piece_bytes: int) -> list[int]:
    """Bytes of each segment of a piece, in order. Raises ValueError for a length that is no positive multiple of
    `LEAST_BYTES`."""
    if piece_bytes <= 0 or piece_bytes % LEAST_BYTES:
        raise ValueError(f"a piece of {piece_bytes} bytes cannot be coded: give a multiple of {LEAST_BYTES}")
    step = segment_chunks(piece_bytes) * CHUNK * ELEMENT_BYTES
    return [min(step, piece_bytes - start) for start in range(0, piece_bytes, step)]


def head_bytes(num_chunks: int) -> int:
    """Bytes of the head of a segment with this many chunks."""
    return max(_HEAD * num_chunks, _LEAST_HEAD)


def num_slots(num_chunks: int) -> int:
    """Exceptions for which a segment of so many chunks has room."""
    return (head_bytes(num_chunks) - 4 * num_chunks - 4) // 6


def encode_reference(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The coded form of uint8 `pieces` of shape (num_pieces, piece_bytes), on their device, and whether each fits.

    Returns uint8 of shape (num_pieces, coded_bytes) and bool of shape (num_pieces,). All bytes are those that the
    kernels write. Raises ValueError for a length that cannot be coded.
    """
    num_pieces, piece_bytes = pieces.shape
    coded = torch.empty((num_pieces, coded_bytes(piece_bytes)), dtype=torch.uint8, device=pieces.device)
    fits = torch.ones(num_pieces, dtype=torch.bool, device=pieces.device)
    read = written = 0
    for size in segments_of(piece_bytes):
        stored = 3 * size // 4 + head_bytes(chunks_of(size))
        fits &= _encode_segment(pieces[:, read : read + size], coded[:, written : written + stored])
        read, written = read + size, written + stored
    return coded, fits


def decode_reference(coded: torch.Tensor, piece_bytes: int) -> torch.Tensor:
    """The pieces, uint8 of shape (num_pieces, piece_bytes), of `coded`, uint8 of shape (num_pieces, coded_bytes).

    Any bytes are accepted: bytes that are no coded piece decode to some piece. Raises ValueError for a `piece_bytes`
    that cannot be coded.
    """
    pieces = torch.empty((coded.shape[0], piece_bytes), dtype=torch.uint8, device=coded.device)
    read = written = 0
    for size in segments_of(piece_bytes):
        stored = 3 * size // 4 + head_bytes(chunks_of(size))
        _decode_segment(coded[:, read : read + stored], pieces[:, written : written + size])
        read, written = read + stored, written + size
    return pieces


def pieces_fit(coded: torch.Tensor, piece_bytes: int) -> torch.Tensor:
    """Whether the pieces of `coded`, uint8 of shape (..., coded_bytes) on the CPU, say that they fit: bool of shape
    (...). For bytes that are no coded piece the answer is mostly False, but may be True."""
    fits = torch.ones(coded.shape[:-1], dtype=torch.bool, device=coded.device)
    start = 0
    for size in segments_of(piece_bytes):
        num_chunks = chunks_of(size)
        at = start + 3 * size // 4 + 4 * num_chunks
        totals = coded[..., at : at + 4].contiguous().view(torch.int32)[..., 0]
        fits &= (totals >= 0) & (totals <= num_slots(num_chunks))
        start += 3 * size // 4 + head_bytes(num_chunks)
    return fits


def _encode_segment(pieces: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
    """Write the coded form of a segment of each piece; returns which fit."""
    num_pieces, size = pieces.shape
    num_chunks, elements = chunks_of(size), size // ELEMENT_BYTES
    head = coded[:, elements * 3 // 2 :]
    head.zero_()
    hits = []
    for first, count, columns in _runs(size):
        start = first * CHUNK
        words = _words(pieces, start * ELEMENT_BYTES, (num_pieces, count, 4, columns))
        rest, codes, lowest, exponents, is_out = _encode_chunks(words)
        _put(coded, start, rest)
        _put(coded, elements + start // 2, codes)
        _put(head, 4 * first, lowest)
        # Hardly any: which they are is looked for in the order of pieces, chunks, columns and halves.
        found = is_out.nonzero()
        number = ((first + found[:, 1]) * _COLUMNS + found[:, 3]) * 2 + found[:, 2]
        hits.append((found[:, 0], number, exponents[tuple(found.T)]))
    piece, number, exponent = (torch.cat(column) for column in zip(*hits, strict=True))
    order = torch.argsort(piece * (1 << 16) + number)
    piece, number, exponent = piece[order], number[order], exponent[order]
    totals = torch.bincount(piece, minlength=num_pieces)
    slot = torch.arange(len(piece), device=piece.device) - (totals.cumsum(0) - totals)[piece]
    slots = num_slots(num_chunks)
    kept = slot < slots
    listed = torch.zeros((num_pieces, slots), dtype=torch.int32, device=piece.device)
    numbers = torch.zeros((num_pieces, slots), dtype=torch.int16, device=piece.device)
    listed[piece[kept], slot[kept]] = exponent[kept]
    numbers[piece[kept], slot[kept]] = number[kept].to(torch.int16)
    _put(head, 4 * num_chunks, totals.to(torch.int32)[:, None])
    _put(head, 4 * num_chunks + 4, listed)
    _put(head, 4 * num_chunks + 4 + 4 * slots, numbers)
    return totals <= slots


def _encode_chunks(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of int32 words (num_pieces, chunks, 4, columns): signs and mantissas, codes, lowest, exponents, exceptions."""
    pairs = words.view(torch.int16)
    largest = (pairs & 0x7FFF).amax(3).to(torch.int32) >> 7
    lowest = (largest - 15).clamp_(min=0)
    pattern = ((lowest[:, :, 0::2] | lowest[:, :, 1::2] << 8) * 0x10001)[..., None]
    rotated = (words << 1).sub_(words >> 31)
    even, odd = rotated[:, :, 0::2], rotated[:, :, 1::2]
    rest = (even & _EVEN).bitwise_or_((odd << 8).bitwise_and_(_ODD))
    exponents = (even >> 8).bitwise_and_(_EVEN).bitwise_or_(odd & _ODD)
    excess = exponents - pattern
    codes = (excess[:, :, 0] & _NIBBLES).bitwise_or_((excess[:, :, 1] << 4).bitwise_and_(~_NIBBLES))
    return rest, codes, lowest.to(torch.uint8), exponents, excess.bitwise_and_(~_NIBBLES) != 0


def _decode_segment(coded: torch.Tensor, pieces: torch.Tensor) -> None:
    num_pieces, size = pieces.shape
    num_chunks, elements = chunks_of(size), size // ELEMENT_BYTES
    head, slots = coded[:, elements * 3 // 2 :], num_slots(num_chunks)
    totals = _words(head, 4 * num_chunks, (num_pieces, 1)).clamp(0, slots)
    listed = _words(head, 4 * num_chunks + 4, (num_pieces, slots))
    numbers = _take(head, 4 * num_chunks + 4 + 4 * slots, (num_pieces, slots), torch.int16).to(torch.int64) & 0xFFFF
    used = torch.arange(slots, device=head.device) < totals
    for first, count, columns in _runs(size):
        start = first * CHUNK
        rest = _words(coded, start, (num_pieces, count, 2, columns))
        codes = _words(coded, elements + start // 2, (num_pieces, count, 1, columns))
        lowest = _take(head, 4 * first, (num_pieces, count, 4), torch.uint8).to(torch.int32)
        pattern = ((lowest[:, :, 0::2] | lowest[:, :, 1::2] << 8) * 0x10001)[..., None]
        exponents = torch.cat([codes & _NIBBLES, (codes >> 4).bitwise_and_(_NIBBLES)], dim=2).add_(pattern)
        chunk, column = numbers // (2 * _COLUMNS) - first, numbers // 2 % _COLUMNS
        there = used & (chunk >= 0) & (chunk < count) & (column < columns)
        piece = there.nonzero()[:, 0]
        exponents[piece, chunk[there], numbers[there] % 2, column[there]] = listed[there]
        words = torch.empty((num_pieces, count, 4, columns), dtype=torch.int32, device=coded.device)
        words[:, :, 0::2] = (rest & _EVEN).bitwise_or_((exponents << 8).bitwise_and_(_ODD))
        words[:, :, 1::2] = (rest >> 8).bitwise_and_(_EVEN).bitwise_or_(exponents & _ODD)
        _put(pieces, start * ELEMENT_BYTES, (words << 31).bitwise_or_((words >> 1).bitwise_and_(0x7FFFFFFF)))


def _runs(size: int) -> list[tuple[int, int, int]]:
    """Chunks of one length in a segment of `size` bytes: the first's number, how many, words of a quarter of each."""
    whole, short = divmod(size, CHUNK * ELEMENT_BYTES)
    runs = [(0, whole, _COLUMNS)] if whole else []
    return [*runs, (whole, 1, short // 16)] if short else runs


def _take(rows: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = dtype.itemsize
    for size in shape[1:]:
        num_bytes *= size
    # A copy of its own: views of wider elements want an alignment that slices of rows need not have.
    return rows[:, start : start + num_bytes].contiguous().view(dtype).view(shape)


def _words(rows: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return _take(rows, start, shape, torch.int32)


def _put(rows: torch.Tensor, start: int, values: torch.Tensor) -> None:
    content = values.contiguous().view(torch.uint8).view(rows.shape[0], -1)
    rows[:, start : start + content.shape[1]] = content
