"""Device blocks that steps in flight still use, after the engine has given them to somebody else."""

from __future__ import annotations

from collections.abc import Iterable


class InFlightSteps:
    """An engine that plans ahead frees blocks while the device still works on steps that were planned before.

    What such a step computes for a request that has ended is dropped, so it may read whatever it likes; but it writes,
    and what it computes for a request that was preempted counts. A step is in flight until every rank has reported the
    next one that computes: drafts may run on after a step's own tokens are out, and a step without requests is reported
    whatever the device still does.
    """

    def __init__(self) -> None:
        self._used: dict[int, list[int]] = {}  # by step, with repetitions: few loads ask, every step tells

    def planned(self, step: int, written: list[int]) -> None:
        """A step that may write to these blocks, a list of its own; to none where it computes nothing."""
        if written:
            self._used[step] = written

    def freed(self, block_ids: Iterable[int]) -> None:
        """Blocks were taken from a request that continues later."""
        taken = list(block_ids)
        for used in self._used.values():
            used += taken

    def reported(self, step: int) -> None:
        """The engine took in what every rank said of this step."""
        for number in [number for number in self._used if number <= step][:-1]:
            del self._used[number]

    def used(self) -> frozenset[int]:
        """All of these blocks."""
        return frozenset().union(*self._used.values())


def first_written(num_computed_tokens: int, num_tokens: int) -> int:
    """The first token whose rows a step may write for a request.

    An engine that plans ahead counts tokens as computed that are not: drafts of steps in flight may be rejected, and
    the step then writes further in front. What it writes lies behind the tokens that are known, but for the last one.
    """
    return min(num_computed_tokens, max(num_tokens - 1, 0))
