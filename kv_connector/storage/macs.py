"""Blocks that only holders of a secret can store: a MAC with each, in place of the CRC-32.

Whoever can write to a folder, bucket or store and does not know the secret cannot make an engine take other bytes for a
block, nor one good block for another. He can delete and spoil what lies there, which costs misses.

What follows from the secret, by HMAC-SHA256 with a label for each use:

    label      4 bytes for people: logs show which of several secrets was used
    mark       8 bytes, from the other 24 of an identity, in the place of its first 8: what an engine stores is named by
               this identity, so engines with another secret, or without, look for other names. They find nothing, and
               take nobody's good packs for damaged. Who knows the secret knows from the mark whose packs he can check.
    block key  from the identity with its mark: for its blocks alone
    MAC        from the block key, a block's key (so blocks cannot change places) and its bytes; 16 bytes are stored

What else lies there is not covered, for nothing is taken from it that a MAC does not confirm: a pack's header, or the
journal, says where a block may lie and with which MAC, and the block is checked for the key that was asked for. Sizes
and counts in them are bounded, and a wrong one costs room or misses. An older copy that is put back in the place of a
block is as good: its key covers the tokens, and the identity all that decides its bytes; where that changes and no part
of the identity says so, the secret is to be changed as well.

HMAC-SHA256 is twice as fast as BLAKE2b where the processor has instructions for SHA, as those of servers have since
2021. Neither holds the GIL while it works on a block.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hmac import compare_digest

from .checksums import CRC32, CRC_BYTES, BlockCheck

MAC_BYTES = 16
_MARK_BYTES = 8
_LABEL_BYTES = 4


class OtherSecretError(ValueError):
    """Blocks carry MACs of a secret that is not known here."""


class KeyedMac(BlockCheck):
    """See the module."""

    size = MAC_BYTES

    def __init__(self, secret: bytes, identity: bytes) -> None:
        """`identity`, 32 bytes with the mark of this secret, is what the blocks are stored under."""
        label = _derived(secret, b"label")[:_LABEL_BYTES].hex()
        self.parts: Mapping[str, str] = {"mac": f"HMAC-SHA256, secret {label}"}
        self._keyed = hmac.new(_derived(secret, b"blocks", identity), digestmod="sha256")

    def of(self, key: bytes, block: memoryview) -> bytes:
        """See `BlockCheck.of`."""
        mac = self._keyed.copy()  # to set the key anew takes as long as a page of a block
        mac.update(key)
        mac.update(block)
        return mac.digest()[:MAC_BYTES]


def choose_check(secret: bytes, identity: bytes) -> tuple[BlockCheck, bytes]:
    """How an engine's blocks are checked, and the identity that they are stored under. `identity`, 32 bytes, names all
    that decides their bytes; without a secret it is CRC-32, and the identity itself."""
    if not secret:
        return CRC32, identity
    marked = _mark(secret, identity) + identity[_MARK_BYTES:]
    return KeyedMac(secret, marked), marked


def check_of(size: int, secret: bytes, identity: bytes) -> BlockCheck:
    """How blocks are checked that lie under this identity with `size` bytes of a checksum each; for who looks at them
    from outside. Raises OtherSecretError where they have MACs and not by this secret, which is empty where none is
    known. What has another checksum than its identity's engines would write fits none."""
    if secret and compare_digest(_mark(secret, identity), identity[:_MARK_BYTES]):
        return KeyedMac(secret, identity)
    if size == CRC_BYTES:
        return CRC32
    raise OtherSecretError("its blocks have MACs of a secret that is not known here")


def _mark(secret: bytes, identity: bytes) -> bytes:
    return _derived(secret, b"mark", identity[_MARK_BYTES:])[:_MARK_BYTES]


def _derived(secret: bytes, use: bytes, of: bytes = b"") -> bytes:
    return hmac.digest(secret, b"kv_connector storage " + use + b"\0" + of, "sha256")
