"""How much may be saved in a step: a bandwidth, spent in blocks."""

from __future__ import annotations

BURST_SECONDS = 0.1
"""What was not spent for longer than this is lost, so that an engine that was quiet does not fill the link at once."""
_NO_LIMIT = 1 << 62


class SaveBudget:
    """A bucket that fills at `bytes_per_second`, over all ranks, and that saves are taken out of; 0 sets no limit.

    It holds what comes in `BURST_SECONDS`, or one block where that is more, and is full at the start. `block_bytes` of
    a host block over all ranks are set once ranks have told: until then no host block is ready, and nothing is limited.
    """

    def __init__(self, bytes_per_second: int) -> None:
        self.block_bytes = 0
        self._rate = bytes_per_second
        self._level = bytes_per_second * BURST_SECONDS  # bytes
        self._filled_at: float | None = None  # seconds

    def fill(self, now: float) -> None:
        """Time has passed; `now` never goes back."""
        if self._filled_at is not None:
            most = max(self._rate * BURST_SECONDS, float(self.block_bytes))
            self._level = min(self._level + self._rate * (now - self._filled_at), most)
        self._filled_at = now

    @property
    def num_blocks(self) -> int:
        """Blocks that may be saved now."""
        if not self._rate or not self.block_bytes:
            return _NO_LIMIT
        return int(self._level // self.block_bytes)

    def spend(self, num_blocks: int) -> None:
        """So many of them are saved."""
        self._level -= num_blocks * self.block_bytes
