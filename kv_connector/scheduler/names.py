"""Names of blocks for whoever outlives this engine, or is another one: storage and peers.

    name = root of the engine's identity  XOR  digest of the adapter, if the block was computed with one  XOR  hash

To other engines a block has the same name whatever the TP size: who holds which heads of it, their links know.

Keys of block groups but the first are the hash and a byte: such a key is hashed first (`index.adopt_hashes`), so that
no two groups' blocks have one name, and those of the first are named as in a model that has no other.

The engine's own hash tells adapters apart by their names alone, which says nothing of what was trained since. So a name
takes in the adapter's fingerprint. Who names a block for a request asks the request; for a block of the host all that
is known is its hash, so `BlockNames` remembers which hashes are those of adapters, for as long as the tree knows them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..base import Request
from ..index import CacheIdentity, GroupedTree, adopt_hash, adopt_hashes, group_key, root_hash, split_key
from ..types import BlockHash

_LEAST = 1 << 12


def no_adapter(request: Request) -> str:
    """Of an engine that has none."""
    return ""


class Roots:
    """What the names of a request's blocks begin with. `adapter_of` gives the fingerprint of the adapter that computes
    the request, "" for none."""

    def __init__(self, root: BlockHash, adapter_of: Callable[[Request], str] = no_adapter) -> None:
        self.root = root
        self._adapter_of = adapter_of

    @classmethod
    def named(cls, identity: CacheIdentity | None, adapter_of: Callable[[Request], str]) -> Roots:
        """Of an engine; without an identity nothing is kept or told for which names are needed."""
        return cls(root_hash(identity) if identity is not None else BlockHash(bytes(32)), adapter_of)

    def of(self, request: Request) -> BlockHash:
        """32 bytes."""
        adapter = self._adapter_of(request)
        if not adapter:
            return self.root
        return adopt_hash(self.root, hashlib.sha256(b"kvc1.adapter" + adapter.encode()).digest())


@dataclass(slots=True)
class _Noted:
    """A live request of an adapter, and how many of its hashes are noted."""

    request: Request
    root: BlockHash
    num_blocks: int = 0


class BlockNames:
    """Names blocks by their keys alone. `grouped` says which hashes may still be asked for."""

    def __init__(self, roots: Roots, grouped: GroupedTree) -> None:
        self._roots = roots
        self._grouped = grouped
        self._salt = BlockHash(bytes(32))  # until a reset
        self._live: dict[str, _Noted] = {}
        self._root_of: dict[BlockHash, BlockHash] = {}  # of blocks that adapters have computed
        self._most = _LEAST

    def admitted(self, request: Request) -> None:
        """The request will be named, or compute blocks that are. Again is no harm."""
        known = self._live.get(request.request_id)
        if known is not None and known.request is request:
            return
        root = self._roots.of(request)
        if root != self._roots.root:
            self._live[request.request_id] = _Noted(request, root)

    def finished(self, request: Request) -> None:
        """It gets no more blocks; those that it has may be named later."""
        noted = self._live.pop(request.request_id, None)
        if noted is not None:
            self._note(noted)
            self._forget_lost()

    def of(self, keys: Sequence[BlockHash]) -> bytes:
        """32 bytes for each; a key is the hash of a block, or `index.group_key` of it."""
        for noted in self._live.values():
            self._note(noted)
        if not self._root_of:
            return adopt_hashes(adopt_hash(self._roots.root, self._salt), keys)
        roots = [self._root_of.get(split_key(key)[0], self._roots.root) for key in keys]
        parts = zip(roots, keys, strict=True)
        return b"".join(adopt_hash(adopt_hash(root, self._salt), key) for root, key in parts)

    def reset(self) -> None:
        """Names of before are none of after."""
        self._salt = adopt_hash(self._salt, np.random.default_rng().bytes(32))

    def _note(self, noted: _Noted) -> None:
        hashes = noted.request.block_hashes
        for block_hash in hashes[noted.num_blocks :]:
            known = self._root_of.setdefault(block_hash, noted.root)
            if known != noted.root:
                # Two adapters with one hash: which of them has computed a copy is not known. Nobody finds this name.
                self._root_of[block_hash] = BlockHash(np.random.default_rng().bytes(32))
        noted.num_blocks = len(hashes)

    def _forget_lost(self) -> None:
        """What the tree has forgotten has no copy, and gets none before a request with it is noted anew."""
        if len(self._root_of) <= self._most:
            return
        self._root_of = {known: root for known, root in self._root_of.items() if self._is_known(known)}
        for noted in self._live.values():
            noted.num_blocks = 0
            self._note(noted)
        self._most = max(_LEAST, 2 * len(self._root_of))

    def _is_known(self, block_hash: BlockHash) -> bool:
        """Of any group: where blocks have many hashes, a hash may be that of one group's blocks alone."""
        groups = range(len(self._grouped.groups))
        return any(self._grouped.tree.get(group_key(block_hash, group)) is not None for group in groups)
