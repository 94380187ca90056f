"""How far ahead of the engine's reuse blocks are saved, under a policy that saves them just before it."""

from __future__ import annotations


class LookAhead:
    """Device blocks next in line for reuse that a step looks at: twice as many as one of the last steps took are kept
    saved, and looked at anew when half of them are gone, for what was saved stays so."""

    def __init__(self, least: int) -> None:
        """At least so many are looked at in each step."""
        self.may_find = False
        """Whether something has changed since nothing was left to save."""
        self._least = least
        self._num_admitted = 0  # blocks that requests admitted in the step being scheduled have use for
        self._num_begun = 0  # blocks that this step begins to fill
        self._most_taken = 0  # in a recent step
        self._num_ahead = 0  # blocks next in line that were looked at and have not been taken since

    def admitted(self, num_blocks: int, num_hit: int) -> None:
        """A request will take so many blocks, and has those hit on the device, which may have been next in line.

        It takes them step by step where it computes and all at once where it loads: they are counted as a whole.
        """
        self._num_admitted += num_blocks
        self._num_ahead -= num_hit

    def begun(self, num_blocks: int) -> None:
        """The step begins to fill so many."""
        self._num_begun += num_blocks

    def next_step(self) -> int:
        """How many to look at in the step that has been scheduled: all of them after something was freed."""
        self._most_taken = max(self._most_taken - self._most_taken // 8, self._num_admitted, self._num_begun)
        self._num_ahead -= self._num_admitted + self._num_begun
        self._num_admitted = self._num_begun = 0
        if not self.may_find and self._num_ahead >= self._most_taken:
            return self._least
        self._num_ahead = max(self._least, 2 * self._most_taken)
        return self._num_ahead
