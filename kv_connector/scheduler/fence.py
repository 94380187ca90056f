"""A wait of the device for copies whose blocks are not pinned any more."""

from __future__ import annotations

from .ledger import JobLedger


class Fence:
    """An engine that goes idle may never step again, and a cache reset needs every block free: then the device blocks
    of copies under way are let go of, and the next step that writes to any block waits for those copies first."""

    def __init__(self, ledger: JobLedger) -> None:
        self._ledger = ledger
        self._is_due = False

    def unpin(self) -> None:
        """Nothing of the engine's pool stays pinned for copies between device and host."""
        self._is_due |= self._ledger.unpin()

    def take(self, overwrites: bool) -> bool:
        """Whether the step being planned has to wait. One that `overwrites` nothing, neither computing nor loading,
        leaves the wait to the next."""
        due = self._is_due and overwrites
        self._is_due &= not due
        return due
