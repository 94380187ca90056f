"""Sessions of streaming input for a world's history, and resets between their parts.

They are drawn from a stream of their own, so that a seed's other choices do not depend on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from .config import EngineConfig
from .workload import Action

FIRST_NUMBER = 10_000
"""Of an action that is added; those of the history before have lower ones."""


def draw(rng: random.Random, configs: Sequence[EngineConfig], actions: Sequence[Action]) -> list[Action]:
    """What is to be added to the history: nothing in most worlds."""
    if rng.random() < 0.6:
        return []
    drawn: list[Action] = []

    def add(time: float, kind: str, engine: int, **what: Any) -> None:
        drawn.append(Action(FIRST_NUMBER + len(drawn), time, kind, engine, what))

    for _ in range(rng.randint(1, 8)):
        engine, document = rng.randrange(len(configs)), rng.randrange(4)
        if configs[engine].is_recurrent:
            continue  # a state has gone on with what was under way at the session's end
        time = actions[rng.randrange(len(actions) // 2 + 1)].time
        seconds = rng.choice([2e-3, 1e-2, 3e-2])
        inputs = [(seconds, rng.randint(1, 9), rng.randint(1, 6)) for _ in range(rng.randint(2, 5))]
        add(time, "session", engine, document=document, share=rng.choice([0.2, 0.5, 1.0]), inputs=inputs)
        if rng.random() < 0.6:
            time += rng.uniform(0.0, 0.1)
            add(time, rng.choice(["reset", "weights"]), engine)
            for _ in range(2):  # what has been saved meanwhile is asked for
                time += rng.uniform(0.0, 0.1)
                add(time, "arrive", engine, document=document, share=1.0, new=rng.randint(1, 4), outputs=3)
    return drawn
