"""A link's session: frames that nobody can make, change, drop, repeat or reorder who does not know the secret. Pure.

    secret, both nonces --HKDF-SHA256 (RFC 5869)--> listener's proof, caller's key, listener's key
    sealed message      message | first 16 bytes of HMAC-SHA256(key of who sends it, its number | message)

Each direction has a key and a count of its own, so what a side has said is nothing that it will accept. Nothing is
encrypted: whoever carries frames can read them. TLS with a pre-shared key would hide them; Python's `ssl` has it from
3.13 on, and this package runs from 3.10 on. Certificates would be one more thing to hand out beside the secret.
"""

from __future__ import annotations

import hmac
import struct

from ..base import VERSION, PeerError

NONCE_BYTES = 32
SEAL_BYTES = 16
_NUMBER = struct.Struct(">Q")


class Session:
    """One side's end; `proof` is what the listener proves with that it knows the secret."""

    def __init__(self, secret: bytes, caller_nonce: bytes, listener_nonce: bytes, is_caller: bool) -> None:
        extracted = hmac.digest(caller_nonce + listener_nonce, secret, "sha256")
        self.proof = _expand(extracted, b"proof")
        keys = _expand(extracted, b"caller"), _expand(extracted, b"listener")
        self._ours, self._theirs = keys if is_caller else keys[::-1]
        self._num_sealed = 0
        self._num_opened = 0

    def seal(self, message: bytes) -> bytes:
        """The sealed form of this side's next message."""
        seal = _seal(self._ours, self._num_sealed, message)
        self._num_sealed += 1
        return message + seal

    def open(self, sealed: bytes) -> bytes:
        """The content of the peer's next message. Raises PeerError where its MAC does not fit."""
        message, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(_seal(self._theirs, self._num_opened, message), seal):
            raise PeerError("a message was changed, lost or added on its way")
        self._num_opened += 1
        return message


def _expand(extracted: bytes, name: bytes) -> bytes:
    return hmac.digest(extracted, b"kv_connector peer %d %s\x01" % (VERSION, name), "sha256")


def _seal(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + message, "sha256")[:SEAL_BYTES]
