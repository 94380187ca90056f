"""What a side of a link says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...values import shown
from ..base import Connected, PeerError
from ..identity import PeerIdentity
from .fields import check_int, check_text


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a side says of itself once the other is known. `extra` is the backend's; both must have its `transport`."""

    identity: PeerIdentity
    engine_id: str
    num_blocks: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """As plain JSON."""
        identity = self.identity.encode()
        return {"identity": identity, "engine_id": self.engine_id, "num_blocks": self.num_blocks} | {
            "extra": dict(self.extra)
        }

    def differences(self, other: PeerInfo) -> list[str]:
        """Each thing that has to be equal and differs, with both values; "here" is this side."""
        found = self.identity.differences(other.identity)
        ours, theirs = self.extra.get("transport"), other.extra.get("transport")
        if ours != theirs:
            values = f"{shown(ours)} here and {shown(theirs)} there"
            found.append(f"transport is {values}: give both the same peer.kind and peer.route")
        return found

    def connected(self, link: int) -> Connected:
        """A link to who says this of itself is open."""
        return Connected(link, self.engine_id, self.num_blocks, self.identity.shard)

    @classmethod
    def decode(cls, body: object) -> PeerInfo:
        """The reverse of `encode`; raises PeerError for anything else."""
        if not isinstance(body, Mapping) or not isinstance(body.get("extra"), dict):
            raise PeerError("peer info is not an object")
        identity = PeerIdentity.decode(body.get("identity"))
        num_blocks = check_int(body, "num_blocks", least=1, most=1 << 32)
        return cls(identity, check_text(body, "engine_id"), num_blocks, body["extra"])
