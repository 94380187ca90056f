"""Distributions of what the scheduler half sees (layer 0): fixed buckets in flat lists, added to where a job ends or a
request is admitted, and nowhere in between."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

_SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKENS = tuple(float(1 << octave) for octave in range(4, 21))
_BLOCKS = tuple(float(1 << octave) for octave in range(6, 27))


@dataclass(frozen=True, slots=True)
class HistogramKind:
    """What one histogram is of. `bounds` are the inclusive upper ends of its buckets but the last, which has none;
    there is a series for each of `tiers`."""

    documentation: str
    bounds: tuple[float, ...]
    tiers: tuple[str, ...]


HISTOGRAMS = {
    "load_seconds": HistogramKind(
        "Seconds from the plan of a load to the last rank's report: from the host to the device, from storage to the "
        "host, from another engine to the device.",
        _SECONDS,
        ("host", "storage", "peer"),
    ),
    "save_seconds": HistogramKind(
        "Seconds from the plan of a save to the last rank's report: from the device to the host, from the host to "
        "storage, to another engine (with its waiting for that).",
        _SECONDS,
        ("host", "storage", "peer"),
    ),
    "lookup_seconds": HistogramKind(
        "Seconds from the plan of a lookup to the last rank's answer.", _SECONDS, ("storage",)
    ),
    "storage_read_seconds": HistogramKind(
        "Seconds that storage took for a read of up to 64 blocks, on each rank, with its waiting for a thread.",
        _SECONDS,
        ("storage",),
    ),
    "storage_write_seconds": HistogramKind(
        "Seconds that storage took for a write of up to 256 blocks, on each rank, with its waiting for a thread.",
        _SECONDS,
        ("storage",),
    ),
    "load_stall_seconds": HistogramKind(
        "Seconds that the model waited for a step's loads, on each rank. Only with trace_loads.", _SECONDS, ("host",)
    ),
    "hit_tokens": HistogramKind(
        "Tokens of an admitted request that a tier had, where it had any. What storage brought for the request is in "
        "its own series and in the host's.",
        _TOKENS,
        ("device", "host", "storage", "peer"),
    ),
    "reuse_distance_blocks": HistogramKind(
        "Blocks that requests asked for between two uses of a part of a prefix, once for each part of an admitted "
        "request. A host with fewer blocks than that loses the part in between.",
        _BLOCKS,
        ("all",),
    ),
}


class Histogram:
    """How many values fell into each bucket, and their sum by bucket. Plain lists, for whoever reports them."""

    __slots__ = ("bounds", "count", "counts", "sums")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sums = [0.0] * (len(bounds) + 1)
        self.count = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sums[bucket] += value
        self.count += 1


class Histograms:
    """All of `HISTOGRAMS`, empty at first. One thread observes and reads."""

    def __init__(self) -> None:
        self._series = {
            (name, tier): Histogram(kind.bounds) for name, kind in HISTOGRAMS.items() for tier in kind.tiers
        }

    def observe(self, name: str, tier: str, value: float) -> None:
        """Count one value of a series; its unit is in the name."""
        self._series[name, tier].observe(value)

    def series(self) -> Iterator[tuple[tuple[str, str], Histogram]]:
        """Each with its name and tier. They go on counting."""
        return iter(self._series.items())

    def __getitem__(self, key: tuple[str, str]) -> Histogram:
        """That of a name and a tier."""
        return self._series[key]
