"""Device blocks that steps under way still use (layer 1), after the engine has given them to somebody else."""

from __future__ import annotations

from collections.abc import Iterable


class StepsUnderWay:
    """An engine that plans ahead frees blocks while the device still works on steps that were planned before.

    What such a step computes for a request that has ended is dropped, so it may read whatever it likes; but it writes,
    and what it computes for a request that was preempted counts. A step is under way until the one behind it was
    reported: drafts may run on after a step's own tokens are out.
    """

    def __init__(self) -> None:
        self._used: dict[int, set[int]] = {}

    def planned(self, step: int, written: Iterable[int]) -> None:
        """A step that writes to these blocks."""
        self._used[step] = set(written)

    def freed(self, block_ids: Iterable[int]) -> None:
        """Blocks were taken from a request that goes on later."""
        taken = set(block_ids)
        for used in self._used.values():
            used |= taken

    def reported(self, step: int) -> None:
        """The engine took in what ranks said of this step."""
        self._used = {number: used for number, used in self._used.items() if number >= step}

    def used(self) -> frozenset[int]:
        """All of these blocks."""
        return frozenset().union(*self._used.values())
