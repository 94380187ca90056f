"""Everything beside the tokens that determines the bytes of a cached block: equal names, equal bytes.

    CacheIdentity   what both halves read from the engine's configuration, once, at start; it is in the root of every
                    block's name (`hashing.py`), so a block of another one is not found
    RankIdentity    the same, and what only a rank sees: which part of a block it has, who computes it, how it lies

Storage keeps blocks under a rank's digest, and other engines are asked for equal parts. Whatever differs is named by
its field, so a log can say what changed. Text everywhere: none of it is interpreted.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, dataclass, fields, replace

_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What must be equal for two engines to share cached bytes; it is hashed into every block.

    model: name or path of the model, and revision. cache_dtype: element type and quantisation of the cache. layout: the
    engine's name of how a block's bytes are arranged. block_size: tokens a block. tp_size, pp_size: how ranks split a
    block. engine: which one, and its version. config: digest of the model's configuration. settings: those of them that
    a user gave, to be read. weights, draft_weights: fingerprints of the model's and of a draft model's.
    """

    model: str
    cache_dtype: str
    layout: str
    block_size: int
    tp_size: int = 1
    pp_size: int = 1
    engine: str = ""
    config: str = ""
    settings: str = ""
    weights: str = ""
    draft_weights: str = ""

    def undivided(self) -> CacheIdentity:
        """The same for an engine of any TP size."""
        return replace(self, tp_size=1)

    def encode(self) -> bytes:
        """The identity as bytes: each field as `field`, in the order above, numbers as decimal text."""
        return b"".join(encode_field(str(getattr(self, part.name))) for part in fields(self))


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Of the bytes that one rank keeps of each block.

    backend: what computes attention there, and writes the cache. arrangement: see `CacheLayout.arrangement`. groups: of
    a model with several block groups which there are, as `describe_groups` says. pool: which one, of an engine whose
    pools are stored apart. Both are left out of the rest where they are "".
    """

    cache: CacheIdentity | None
    rank: int
    world_size: int
    backend: str = ""
    arrangement: str = ""
    groups: str = ""
    pool: str = ""

    def parts(self) -> dict[str, str]:
        """Every field by its name, as text."""
        common = asdict(self.cache) if self.cache is not None else {}
        own = {"rank": f"{self.rank} of {self.world_size}", "backend": self.backend, "arrangement": self.arrangement}
        if self.groups:
            own["groups"] = self.groups
        if self.pool:
            own["pool"] = self.pool
        return {name: str(value) for name, value in (common | own).items()}

    def shown(self) -> str:
        """Every field that says something, for a log."""
        return ", ".join(f"{name} {value}" for name, value in self.parts().items() if value)

    def digest(self) -> bytes:
        """32 bytes for all of it."""
        text = b"".join(encode_field(name) + encode_field(value) for name, value in self.parts().items())
        return hashlib.sha256(b"kvc1.storage" + text).digest()


def encode_field(value: str | bytes | None) -> bytes:
    """One value of any length, or its absence, so that where it ends is told."""
    if value is None:
        return b"\0"
    raw = value.encode() if isinstance(value, str) else value
    return b"\1" + _U32.pack(len(raw)) + raw
