"""Chained block hashes: the name of a block, the same in every process, on every run and every machine.

Byte encoding, version 1 (all integers little-endian, no padding):

    root   = SHA-256( "kvc1.root"  | field(identity) | field(lora) | field(salt) )
    block  = SHA-256( "kvc1.block" | parent (32 bytes) | u32 number of tokens | u32 each token | item* )
    adopt  = root XOR the engine's hash where that has 32 bytes,
             else root XOR SHA-256( "kvc1.adopt" | the engine's hash )
    item   = u32 length | content hash | i64 (first token of the item - first token of the block)
    field  = u8 0 where the value is absent, else u8 1 | u32 length | bytes (text is UTF-8)

A multimodal item belongs to a block when they share at least one token, so an item that ends where the block starts
does not, one that starts where the block ends does not, and one that spans several blocks is in each of them.

Adopted names are as hard to confuse as the engine's own hashes. Under one root two of them are equal only if the hashes
are; under two roots only if the hashes differ by exactly what the roots differ by, which is as hard to bring about as
equal hashes. NumPy is used for them alone: a prompt of 32k tokens has 2,048.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..types import BlockHash
from .identity import CacheIdentity, encode_field

_HASH_BYTES = 32
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or video that stands in the prompt as `length` placeholder tokens from position `start`."""

    content_hash: bytes
    start: int
    length: int


def root_hash(identity: CacheIdentity, lora: str | None = None, salt: str | None = None) -> BlockHash:
    """The parent of a sequence's first block. Sequences with different adapters or salts share no block."""
    text = b"kvc1.root" + encode_field(identity.encode()) + encode_field(lora) + encode_field(salt)
    return BlockHash(hashlib.sha256(text).digest())


def adopt_hash(root: BlockHash, engine_hash: bytes) -> BlockHash:
    """Our name for a block that an engine has already hashed (its hash covers tokens and its own extra keys)."""
    return BlockHash(adopt_hashes(root, (engine_hash,)))


def adopt_hashes(root: BlockHash, engine_hashes: Sequence[bytes]) -> bytes:
    """`adopt_hash` of many blocks, one behind the other: 32 bytes a block, microseconds a thousand."""
    if set(map(len, engine_hashes)) <= {_HASH_BYTES}:
        text = b"".join(engine_hashes)
    else:
        text = b"".join(map(_fit, engine_hashes))
    rows = np.frombuffer(text, np.uint8).reshape(-1, _HASH_BYTES)
    return (rows ^ np.frombuffer(root, np.uint8)).tobytes()


class BlockHasher:
    """Hashes one sequence block by block as it grows; earlier tokens and items are never looked at again."""

    __slots__ = ("_block_size", "_first_item", "_items", "hashes", "_root")

    def __init__(self, block_size: int, root: BlockHash, items: Sequence[MultimodalItem] = ()) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size={block_size} is impossible: give at least 1 token")
        self._block_size = block_size
        self._root = root
        self._items = sorted((item for item in items if item.length > 0), key=lambda item: item.start)
        self._first_item = 0
        self.hashes: list[BlockHash] = []

    def update(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """Hash the blocks that `token_ids`, the whole sequence so far, has filled since the last call.

        Returns the new hashes, which are also appended to `hashes`. Raises ValueError for a token id outside 32 bits.
        """
        done, size = len(self.hashes), self._block_size
        parent = self.hashes[-1] if done else self._root
        for start in range(done * size, len(token_ids) - size + 1, size):
            text = _encode_tokens(token_ids[start : start + size]) + self._encode_items(start)
            parent = BlockHash(hashlib.sha256(b"kvc1.block" + parent + text).digest())
            self.hashes.append(parent)
        return self.hashes[done:]

    def _encode_items(self, start: int) -> bytes:
        """Items that share a token with the block at `start`; those that end before it are dropped for good."""
        items, first, end = self._items, self._first_item, start + self._block_size
        while first < len(items) and items[first].start + items[first].length <= start:
            first += 1
        self._first_item = first
        text = b""
        for item in items[first:]:
            if item.start >= end:
                break
            if item.start + item.length > start:
                text += _U32.pack(len(item.content_hash)) + item.content_hash + _I64.pack(item.start - start)
        return text


def _fit(engine_hash: bytes) -> bytes:
    return engine_hash if len(engine_hash) == _HASH_BYTES else hashlib.sha256(b"kvc1.adopt" + engine_hash).digest()


def _encode_tokens(token_ids: Sequence[int]) -> bytes:
    try:
        words = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1, got {list(token_ids)!r}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return _U32.pack(len(words)) + words.tobytes()
