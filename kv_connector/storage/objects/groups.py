"""How blocks lie in a store of objects: in groups of a megabyte or more, each block found by its own key.

A group is one object, in the format of a pack (`packs.py`), named by the keys of its blocks. Where a block is a
megabyte it is a group of its own, and its key alone gives the object's name. Smaller blocks are grouped as they are
written, neighbours of a prefix together, and each gets a card: a small object named by the block's key that holds the
keys of its group. So a block is there if its card is; one card leads to a whole group; and whoever asks for a prefix
may begin anywhere in it. Cards are written after their group. Where a group was evicted before its cards, the reader
who finds out removes them, and the blocks can be written again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..base import KEY_BYTES
from ..filesystem.packs import pack_name

GROUP_BYTES = 1 << 20
"""A group holds at least this many bytes, where a batch has as many and a block is not below a 64th of it."""
MAX_BLOCKS = 64
_MAX_KNOWN = 1 << 16


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are one object, in this order."""

    name: str
    keys: tuple[bytes, ...]


class Groups:
    """Names of groups and cards, and which group a block is known to be in. Any thread may call."""

    def __init__(self, identity: bytes, block_bytes: int) -> None:
        """`identity`, 32 bytes, names everything that must be equal for bytes to be shared."""
        self.blocks_per_group = min(MAX_BLOCKS, -(-GROUP_BYTES // block_bytes))
        self.has_cards = self.blocks_per_group > 1
        self.card_bytes = self.blocks_per_group * KEY_BYTES
        self._identity = identity
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Group] = OrderedDict()

    def group(self, keys: Sequence[bytes]) -> Group:
        """The group of these blocks."""
        return Group(f"kvc1.group.{pack_name(self._identity, keys)}", tuple(keys))

    def card(self, key: bytes) -> str:
        """The name of a block's card."""
        return f"kvc1.card.{hashlib.sha256(b'kvc1.card' + self._identity + key).hexdigest()}"

    def entry(self, key: bytes) -> str:
        """The object that is there if the block is."""
        return self.card(key) if self.has_cards else self.group([key]).name

    def objects(self, group: Group) -> list[str]:
        """Everything that is stored of a group."""
        return [group.name, *(map(self.card, group.keys) if self.has_cards else ())]

    def write_card(self, group: Group) -> bytes:
        """The card of every block of a group: its keys, then zeros."""
        return b"".join(group.keys).ljust(self.card_bytes, b"\0")

    def read_card(self, key: bytes, card: bytes) -> Group | None:
        """The group that a block's card names, if it is one. A reader believes nothing."""
        keys = [card[i : i + KEY_BYTES] for i in range(0, len(card), KEY_BYTES)]
        group = self.group([member for member in keys if any(member)])
        return group if key in group.keys and self.write_card(group) == card else None

    def learn(self, group: Group) -> None:
        """Remember where these blocks are."""
        with self._lock:
            for key in group.keys:
                self._known[key] = group
                self._known.move_to_end(key)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def forget(self, group: Group) -> None:
        """Remember it no more."""
        with self._lock:
            for key in group.keys:
                if self._known.get(key) == group:
                    del self._known[key]

    def find(self, key: bytes) -> Group | None:
        """Where a block is, or was when it was last read or written; None where that is not known."""
        if not self.has_cards:
            return self.group([key])
        with self._lock:
            return self._known.get(key)
