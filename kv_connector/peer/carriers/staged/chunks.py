"""Pushes cut into parts that fit a slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...base import Ids, PeerPool, Push


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A part of push `number`: blocks `source_ids` for positions `first` and following of the peer's grant."""

    number: int
    grant: int
    first: int
    source_ids: Ids
    regions: range
    is_last: bool = False


def cut(push: Push, pool: PeerPool, slot_bytes: int) -> list[Chunk]:
    """Parts of whole blocks, or of some regions of one block each where that is too large. No piece may be."""
    chunks = []
    for regions in _cut_regions(push.regions, pool, slot_bytes):
        per_slot = max(1, slot_bytes // pool.bytes_of(regions))
        for start in range(0, len(push.source_ids), per_slot):
            ids = push.source_ids[start : start + per_slot]
            chunks.append(Chunk(push.number, push.grant, push.first + start, ids, regions))
    chunks[-1] = replace(chunks[-1], is_last=True)
    return chunks


def _cut_regions(regions: range, pool: PeerPool, slot_bytes: int) -> list[range]:
    parts, start, size = [], regions.start, 0
    for index in regions:
        piece = pool.regions[index].piece_bytes
        if size + piece > slot_bytes:
            parts.append(range(start, index))
            start, size = index, 0
        size += piece
    return [*parts, range(start, regions.stop)]
