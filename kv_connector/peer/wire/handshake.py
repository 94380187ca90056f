"""Who may talk: a challenge and response over a shared secret, then identities. Pure: messages in, messages out.

    caller                                             listener
    hello    {version, nonce C}             ------>
                                            <------    challenge {version, nonce S, proof HMAC("listener", C, S)}
    proof    {proof HMAC("caller", C, S), info}  --->
                                            <------    welcome   {info}   or   refused {reason}

HMAC is with SHA-256 under the secret, which is never sent. Nobody's info (identity, engine, pool) is told before
the other has proved that it knows the secret. Both compare them and name both values of what differs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base import VERSION, PeerError, PeerIdentity, check_int, check_text

_NONCE_BYTES = 32


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
            values = f"{ours!r} here and {str(theirs)[:40]!r} there"
            found.append(f"transport is {values}: give both the same peer.kind and peer.route")
        return found

    @classmethod
    def decode(cls, body: object) -> PeerInfo:
        """The reverse of `encode`; raises PeerError for anything else."""
        if not isinstance(body, Mapping) or not isinstance(body.get("extra"), dict):
            raise PeerError("peer info is not an object")
        identity = PeerIdentity.decode(body.get("identity"))
        num_blocks = check_int(body, "num_blocks", least=1, most=1 << 32)
        return cls(identity, check_text(body, "engine_id"), num_blocks, body["extra"])


class Handshake:
    """One side's part. `take` is given each message of the peer and returns the answers; `peer` is set at the end."""

    def __init__(self, secret: bytes, info: PeerInfo, is_caller: bool) -> None:
        self.peer: PeerInfo | None = None
        self.refusal = ""  # what a peer that knows the secret is told of why it is refused
        self._secret = secret
        self._info = info
        self._is_caller = is_caller
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._both = b""
        self._expected = "challenge" if is_caller else "hello"

    def begin(self) -> list[dict[str, Any]]:
        """What is said first."""
        return [{"t": "hello", "version": VERSION, "nonce": self._nonce.hex()}] if self._is_caller else []

    def take(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The peer's next message. Raises PeerError where it fails."""
        kind = body["t"]
        if kind == "refused" and self._is_caller:
            raise PeerError(f"it refused: {check_text(body, 'reason', 4096)}")
        if kind != self._expected:
            raise PeerError(f"{kind[:40]!r} came where {self._expected!r} was expected")
        if kind == "hello":
            self._check_version(body)
            self._both = _nonce_of(body) + self._nonce
            self._expected = "proof"
            proof = self._proof(b"listener")
            return [{"t": "challenge", "version": VERSION, "nonce": self._nonce.hex(), "proof": proof}]
        if kind == "challenge":
            self._check_version(body)
            self._both = self._nonce + _nonce_of(body)
            self._check_proof(body, b"listener")
            self._expected = "welcome"
            return [{"t": "proof", "proof": self._proof(b"caller"), "info": self._info.encode()}]
        if kind == "proof":
            self._check_proof(body, b"caller")
            self._compare(body)
            return [{"t": "welcome", "info": self._info.encode()}]
        self._compare(body)
        return []

    def _compare(self, body: Mapping[str, Any]) -> None:
        peer = PeerInfo.decode(body.get("info"))
        differences = self._info.differences(peer)
        if differences:
            self.refusal = "; ".join(peer.differences(self._info))
            raise PeerError("; ".join(differences))
        self.peer = peer

    def _check_version(self, body: Mapping[str, Any]) -> None:
        if body.get("version") != VERSION:
            raise PeerError(f"version is {VERSION} here and {str(body.get('version'))[:20]} there")

    def _check_proof(self, body: Mapping[str, Any], who: bytes) -> None:
        if not hmac.compare_digest(self._proof(who).encode(), check_text(body, "proof").encode()):
            raise PeerError("it does not know the secret: give both engines the same peer.secret")

    def _proof(self, who: bytes) -> str:
        return hmac.new(self._secret, b"kvc1.peer." + who + b"." + self._both, hashlib.sha256).hexdigest()


def _nonce_of(body: Mapping[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(check_text(body, "nonce"))
    except ValueError:
        nonce = b""
    if len(nonce) != _NONCE_BYTES:
        raise PeerError(f"a nonce is not {_NONCE_BYTES} bytes in hexadecimal")
    return nonce
