"""Device blocks of a request in one block group, as the engine has told them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """`next_block` and `unsaved` say how far the write policy has seen it."""

    block_ids: list[int] = field(default_factory=list)  # NO_BLOCK where the engine holds none
    next_block: int = 0  # blocks from here on have not been shown to the policy
    unsaved: deque[int] = field(default_factory=deque)  # earlier blocks that are wanted and wait, in order

    def has_new(self, num_blocks: int) -> bool:
        """Whether of its first so many blocks some have not been shown to the policy, or any wait."""
        return num_blocks > self.next_block or len(self.unsaved) > 0
