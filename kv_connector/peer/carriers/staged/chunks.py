"""Pushes cut into parts that fit a slot."""

from __future__ import annotations

from dataclasses import dataclass

from ...base import Ids, Push
from .forms import SlotForm


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A part of push `number`: blocks `source_ids` for positions `first` and following of the peer's grant, which lie
    in a slot as `form` says."""

    number: int
    grant: int
    first: int
    source_ids: Ids
    regions: range
    form: SlotForm


def cut(part: Push | Chunk, form: SlotForm, slot_bytes: int) -> list[Chunk]:
    """Parts of whole blocks, or of some regions of one block each where that is too large. No piece may be."""
    chunks = []
    for regions in _cut_regions(part.regions, form, slot_bytes):
        per_slot = max(1, slot_bytes // form.bytes_of(regions))
        for start in range(0, len(part.source_ids), per_slot):
            ids = part.source_ids[start : start + per_slot]
            chunks.append(Chunk(part.number, part.grant, part.first + start, ids, regions, form))
    return chunks


def _cut_regions(regions: range, form: SlotForm, slot_bytes: int) -> list[range]:
    parts, start = [], regions.start
    for index in regions:
        if form.bytes_of(range(start, index + 1)) > slot_bytes:
            parts.append(range(start, index))
            start = index
    return [*parts, range(start, regions.stop)]
