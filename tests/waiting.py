"""How tests wait for what other threads and processes do: it ends, in words, where that never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

SECONDS = 30.0
ANSWER_SECONDS = 300.0
"""Where models compute meanwhile."""
_LEAST_TURNS = 500  # a machine that stands still meanwhile has lost nothing


def until(
    holds: Callable[[], bool],
    turn: Callable[[], object] = lambda: None,
    told: Callable[[], object] = lambda: "",
    seconds: float = SECONDS,
) -> None:
    """Return once it holds. Who waits does its own part in `turn`, again and again, and leaves other threads the
    processor in between: the first steps of an engine follow one another at once, later ones less and less. Raises
    AssertionError with what `told` says by then, such as statistics, where it does not come within these seconds."""
    pause, end = threading.Event(), time.monotonic() + seconds
    for number in count():
        if holds():
            return
        assert number < _LEAST_TURNS or time.monotonic() < end, f"it never came: {told()}"
        turn()
        pause.wait(min(0.005, 2e-5 * number))
