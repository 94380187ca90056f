"""Blocks that did not fit into the lossless form of a host block: known once they were copied, and not tried again.

Where most do not fit, nothing is saved any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from ...types import BlockHash

logger = logging.getLogger("kv_connector.scheduler")

_MOST = 1 << 16
"""That are known, the last ones: a few megabytes."""
JUDGED_BLOCKS = 1024
"""By so many, the last ones, a cache is judged: a gigabyte, or a few long prompts, of which one may be unusual."""
UNFIT_SHARE = 0.5
"""Of those. Of real keys and values less than one in a thousand does not fit, and of noise nearly all: anything between
tells them apart. At a half a prefix ends on the host behind one block on average, which serves nobody."""


class Refusals:
    """What a block holds follows from its hash, and so does whether it fits, until a reset."""

    def __init__(self) -> None:
        self.are_too_many = False
        """So few fit that nothing is to be saved any more, until a reset."""
        self.num_found = 0
        """How many there ever were: who has seen fewer may have blocks among them."""
        self.judged_blocks = JUDGED_BLOCKS
        self._keys: dict[BlockHash, None] = {}  # the oldest first
        self._saves: deque[tuple[int, int]] = deque()  # the last ones: blocks judged, and refused among them
        self._num_judged = 0
        self._num_refused = 0

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._keys

    def judge(self, num_fitting: int, refused: Sequence[BlockHash]) -> None:
        """Of a save so many blocks fitted, and these did not."""
        self._add(refused)
        self._count(num_fitting + len(refused), len(refused))
        while self._num_judged - self._saves[0][0] >= self.judged_blocks:
            num_judged, num_refused = self._saves.popleft()
            self._num_judged -= num_judged
            self._num_refused -= num_refused
        if self.are_too_many or self._num_judged < self.judged_blocks:
            return
        self.are_too_many = self._num_refused >= UNFIT_SHARE * self._num_judged
        if self.are_too_many:
            logger.warning(
                "%d of the last %d blocks that were to be saved do not fit into the lossless form of host blocks: "
                'nothing is saved any more until a reset of the cache; give host_form="raw"',
                self._num_refused,
                self._num_judged,
            )

    def first_in(self, keys: Sequence[BlockHash]) -> int:
        """Index of the first of these that is known not to fit; their number where none is."""
        if not self._keys:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self._keys), len(keys))

    def reset(self) -> None:
        """The same hashes may stand for other bytes from now on."""
        self._keys.clear()
        self._saves.clear()
        self._num_judged = self._num_refused = 0
        self.are_too_many = False

    def _add(self, keys: Iterable[BlockHash]) -> None:
        known = dict.fromkeys(keys)
        self.num_found += len(known)
        self._keys |= known
        while len(self._keys) > _MOST:
            del self._keys[next(iter(self._keys))]

    def _count(self, num_judged: int, num_refused: int) -> None:
        self._saves.append((num_judged, num_refused))
        self._num_judged += num_judged
        self._num_refused += num_refused
