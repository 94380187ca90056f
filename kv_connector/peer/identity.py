"""Whether two ranks' cached bytes mean the same: equal in everything, or divided over ranks of another number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..values import shown
from .base import PeerError
from .shards import MOST_PARTNERS, Shard

_DIVIDED = ("tp_size", "rank", "pieces", "heads", "head_bytes")
"""What may differ between engines of two TP sizes."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What must be equal on both sides: the fields of `index.RankIdentity`. `pieces` are the bytes of one block in each
    region, in order, and `heads` and `head_bytes` how KV heads lie in each (`PoolRegion`); `arrangement` says what else
    decides what the bytes are. `groups` says in words which block groups there are, where they are several or special.
    """

    model: str
    cache_dtype: str
    layout: str
    block_size: int
    tp_size: int
    pp_size: int
    rank: int
    pieces: tuple[int, ...]
    engine: str = ""
    config: str = ""
    settings: str = ""
    weights: str = ""
    draft_weights: str = ""
    backend: str = ""
    arrangement: str = ""
    groups: str = ""
    heads: tuple[int, ...] = ()
    head_bytes: tuple[int, ...] = ()

    @property
    def shard(self) -> Shard:
        """Which part of the engine's cache the rank holds."""
        return Shard(self.rank, self.tp_size)

    def differences(self, other: PeerIdentity) -> list[str]:
        """Each field that differs and must not, with both values; "here" is this identity."""
        reason = self._why_not_divided(other) if self.tp_size != other.tp_size else ""
        divided = _DIVIDED if self.tp_size != other.tp_size and not reason else ()
        names = [part.name for part in fields(self) if part.name not in divided]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        found = [
            f"{name} is {shown(ours)} here and {shown(theirs)} there" for name, ours, theirs in pairs if ours != theirs
        ]
        return [*found, reason] if reason else found

    def shared_heads(self, other: PeerIdentity, region: int) -> range:
        """Of this rank's heads in a region those that the other holds, too; `differences` has found none."""
        ours, theirs = self.heads[region], other.heads[region]
        if theirs >= ours:
            return range(ours)
        num_heads = ours * self.tp_size
        first = other.shard.first_head(num_heads) - self.shard.first_head(num_heads)
        return range(first, first + theirs)

    def needs(self, other: Shard) -> bool:
        """Whether this partner is to be asked for blocks: no earlier partner holds the same heads in all regions."""
        if other.rank == self.shard.partners(other.tp_size).start:
            return True
        before = Shard(other.rank - 1, other.tp_size)
        nums_heads = {heads * self.tp_size for heads in self.heads}
        return any(before.first_head(number) != other.first_head(number) for number in nums_heads)

    def _why_not_divided(self, other: PeerIdentity) -> str:
        """Why ranks of two TP sizes cannot exchange heads; empty where they can."""
        partners = self.shard.partners(other.tp_size)
        if not partners:
            return f"of two TP sizes one must be a multiple of the other, of {MOST_PARTNERS} times at most"
        if other.rank not in partners:
            return f"rank {other.rank} there holds no heads of rank {self.rank} here"
        small, large = (self, other) if self.tp_size < other.tp_size else (other, self)
        num_regions = len(self.pieces)
        parts = small.pieces, large.pieces, small.heads, large.heads, small.head_bytes, large.head_bytes
        if any(len(part) != num_regions for part in parts) or not all((*self.heads, *other.heads)):
            return "how KV heads lie in these caches is not known: give both engines the same TP size"
        for region in range(num_regions):
            if not _divides(small, large, region):
                return (
                    f"KV heads of region {region} are not divided alike: {self._shown(region)} here, "
                    f"{other._shown(region)} there; give both engines the same TP size"
                )
        return ""

    def _shown(self, region: int) -> str:
        return f"{self.heads[region]} of {self.head_bytes[region]} bytes in {self.pieces[region]}"

    def encode(self) -> dict[str, Any]:
        """As plain JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def decode(cls, body: object) -> PeerIdentity:
        """The reverse of `encode`; raises PeerError for anything else."""
        types = {part.name: str(part.type).partition("[")[0].replace("tuple", "list") for part in fields(cls)}
        if not isinstance(body, Mapping) or sorted(body) != sorted(types):
            raise PeerError(f"an identity has the fields {', '.join(types)}")
        for name, wanted in types.items():
            if type(body[name]).__name__ != wanted:
                raise PeerError(f"the identity's {name} is not of type {wanted}")
            if wanted == "list" and not all(type(number) is int for number in body[name]):
                raise PeerError(f"the identity's {name} are not integers")
        if not (body["tp_size"] >= 1 and body["rank"] >= 0):
            raise PeerError("the identity's rank is none of an engine's")
        values: dict[str, Any] = {name: tuple(v) if type(v) is list else v for name, v in body.items()}
        return cls(**values)


def _divides(small: PeerIdentity, large: PeerIdentity, region: int) -> bool:
    """Whether ranks of the larger TP size hold parts of what those of the smaller one do. Where there are no more heads
    than ranks of the smaller, each rank has one."""
    few, many = large.heads[region], small.heads[region]
    num_heads = many * small.tp_size
    is_whole = num_heads % large.tp_size == 0 or large.tp_size % num_heads == 0
    same_bytes = small.pieces[region] * few == large.pieces[region] * many
    same_order = few == 1 or small.head_bytes[region] == large.head_bytes[region]
    return is_whole and few == max(1, num_heads // large.tp_size) and same_bytes and same_order
