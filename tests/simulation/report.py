"""The result of a run, in the form that every benchmark's has: claims, rows, and how often each composition was met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from integration.report import Report

from .floors import FLOORS
from .world import Outcome

_KINDS = {"token": "wrong_tokens", "stuck": "stuck_requests", "leak": "leaks"}


def write(path: Path, outcomes: Sequence[Outcome], num_steps: int, met: Counter[str]) -> None:
    """The object of `simulation.json`; `num_steps` is how many were asked for. A floor that comes to less than one in
    so many steps is not claimed."""
    report = Report("simulation")
    steps = sum(outcome.num_steps for outcome in outcomes)
    failed = Counter(outcome.violation.kind for outcome in outcomes if outcome.violation is not None)
    for kind, name in _KINDS.items():
        report.claim(name, failed[kind], 0, "worlds", "lower")
    others = sum(count for kind, count in failed.items() if kind not in _KINDS)
    report.claim("broken_invariants", others, 0, "worlds", "lower")
    report.claim("steps", steps, num_steps, "steps", "higher")
    for name, floor in FLOORS.items():
        if goal := floor * num_steps // 1_000_000:
            report.claim(f"met: {name}", met[name], goal, "times", "higher")
    report.rows += [
        {"seeds": len(outcomes), "steps": steps, "requests": sum(outcome.num_requests for outcome in outcomes)},
        {"met": dict(sorted(met.items()))},
        *({"seed": o.seed, "violation": str(o.violation)} for o in outcomes if o.violation is not None),
    ]
    report.write(path)
