"""What an attack is, for `integration.attacks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """`claims`: counts that are to be 0, by name; `details`: whatever else a reader of the result should know;
    `milliseconds`: waits that are to be no longer than one, by name; `not_tried`: how many tries ended before they
    began, or were not what the attack's name says."""

    claims: dict[str, int]
    details: dict[str, float] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    not_tried: int = 0


@dataclass(frozen=True, slots=True)
class Attack:
    """`run` tries so many times, from a seed; `tries` is how often it is tried where nobody says otherwise."""

    name: str
    tries: int
    run: Callable[[int, int], Outcome]
