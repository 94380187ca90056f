"""Sides of a comparison that take turns, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

from integration.report import Report

LEAST_FOR_DECILES = 10
"""Samples; of fewer `quantiles` makes figures up that lie outside of what was measured."""


def take_turns(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each side `repeats` times, another one first in every round."""
    names, times = list(sides), {name: list[float]() for name in sides}
    for number in range(repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(sides[name]())
    return times


def record(report: Report, case: str, times: Mapping[str, Sequence[float]], unit: str = "us") -> dict[str, float]:
    """Print and record the medians of a case, which are returned."""
    medians = {}
    for side, values in times.items():
        low, high = _spread(values)
        low_name, high_name = ("p10", "p90") if len(values) >= LEAST_FOR_DECILES else ("min", "max")
        medians[side] = median(values)
        row = {"case": case, "side": side, "unit": unit, "median": medians[side], low_name: low, high_name: high}
        report.rows.append(row | {"count": len(values)})
        print(f"{case:14}{side:28}{medians[side]:12.1f} {unit} ({low:.1f}..{high:.1f})", flush=True)
    return medians


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Of the lowest tenth and the highest; of few samples the lowest and the highest, as nothing lies between."""
    if len(values) < LEAST_FOR_DECILES:
        return min(values), max(values)
    low, *_, high = quantiles(values, n=10)
    return low, high
