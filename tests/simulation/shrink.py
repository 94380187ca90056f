"""The shortest history that still fails: actions are left out, half of them at a time and then one by one (delta
debugging).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .world import Outcome, simulate

MOST_SECONDS = 60.0


def shrink(outcome: Outcome, seconds: float = MOST_SECONDS) -> Outcome:
    """The outcome of a subset of its actions that fails in the same way; itself where nothing can be left out.

    `seconds` of this machine's time bound the search: what is found by then is returned.
    """
    assert outcome.violation is not None
    end = time.monotonic() + seconds
    before = frozenset(action.number for action in outcome.actions if action.time <= outcome.time)
    shorter = simulate(outcome.seed, before)  # what had not happened yet; only the start of the last part may move
    best = shorter if is_same(shorter, outcome) else outcome
    size = max(1, len(best.actions) // 2)
    while True:
        before = len(best.actions)
        start = 0
        while start < len(best.actions) and time.monotonic() < end:
            kept = [action.number for i, action in enumerate(best.actions) if not start <= i < start + size]
            shorter = simulate(outcome.seed, frozenset(kept))
            if is_same(shorter, outcome):
                best = shorter
            else:
                start += size
        if time.monotonic() >= end or (size == 1 and len(best.actions) == before):
            return best
        size = max(1, min(size, len(best.actions)) // 2)


def is_same(outcome: Outcome, other: Outcome) -> bool:
    """Whether both fail in the same way."""
    if outcome.violation is None or other.violation is None or outcome.violation.kind != other.violation.kind:
        return False
    if outcome.violation.kind == "crash":
        return outcome.violation.text.split(" in ")[0] == other.violation.text.split(" in ")[0]
    return True


def describe(outcome: Outcome, command: str) -> list[str]:
    """What a person needs: what failed, in which world, by which actions, and how to see it again."""
    numbers = ",".join(str(action.number) for action in outcome.actions)
    return [
        f"seed {outcome.seed}: {outcome.violation}",
        *(f"  engine {index}: {text}" for index, text in enumerate(outcome.engines)),
        *(f"  {action}" for action in outcome.actions),
        f"  again: {command} --seed {outcome.seed} --worlds 1 --keep {numbers}",
    ]


def numbers_of(text: str) -> frozenset[int] | None:
    """What `--keep` says; None where it was not given."""
    return frozenset(int(number) for number in text.split(",") if number) if text else None


def summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many worlds failed, by kind."""
    kinds: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.violation is not None:
            kinds[outcome.violation.kind] = kinds.get(outcome.violation.kind, 0) + 1
    return kinds
