"""How blocks lie in a store of objects: in groups of a megabyte or more, which lie where the prefix says.

    prefix     0  1  2  3 | 4  5  6  7 | 8  9          groups of four
    objects    named by 3 | named by 7 | named by 9    the last only once its request has ended

A group is one object, in the format of a pack (`packs.py`). It begins at a multiple of the group size, so whoever has a
prefix knows its groups, and it is named by its last block's key alone: keys are chained, and the last one names all in
front of it. So a group is looked up, read and written as one object, and nothing else is stored. A block of a sliding
window or of recurrent states is a group of its own: what lies in front of it may be gone. The name has the
format's version and the group size in it: what another version has stored is not found, and in time evicted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_BYTES = 1 << 20
"""A whole group holds at least this many bytes, where a block is not below a 64th of it."""
MAX_BLOCKS = 64
_VERSION = b"kvc2.group"


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are one object, in this order."""

    name: str
    keys: tuple[bytes, ...]


class Groups:
    """Names groups of blocks of `block_bytes`. Any thread may call."""

    def __init__(self, identity: bytes, block_bytes: int, group_bytes: int = GROUP_BYTES) -> None:
        """`identity`, 32 bytes, names everything that must be equal for bytes to be shared."""
        num_blocks = min(MAX_BLOCKS, -(-group_bytes // block_bytes))
        self.blocks_per_group = 1 << (num_blocks - 1).bit_length()
        """A power of two."""
        self._root = _VERSION + bytes((self.blocks_per_group,)) + identity

    def cut(self, keys: Sequence[bytes], singly: bool = False) -> list[Group]:
        """The groups of these blocks, which begin with one; only the last of them may be shorter than the others. Where
        blocks are kept `singly`, each is one."""
        size = 1 if singly else self.blocks_per_group
        return [self._group(keys[start : start + size]) for start in range(0, len(keys), size)]

    def name(self, last: bytes) -> str:
        """The object of the group that ends in this block."""
        return f"kvc2.group.{hashlib.sha256(self._root + last).hexdigest()}"

    def _group(self, keys: Sequence[bytes]) -> Group:
        return Group(self.name(keys[-1]), tuple(keys))
