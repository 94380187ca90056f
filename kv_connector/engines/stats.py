"""Our statistics on their way to an engine's Prometheus: what has changed since the last call, and the series it is
added to.

What travels is plain data by name: increments of counters and of the buckets of histograms, and the latest values of
gauges. Where the series live is the engine's: it hands over the classes that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..histograms import HISTOGRAMS, Histogram, Histograms
from ..metrics import DOCUMENTATION, GAUGES, TENANT_DOCUMENTATION, TENANT_GAUGES

TENANTS = "tenants"
"""Names what is told of each tenant among the data."""

TenantSums = Mapping[str, Mapping[str, float]]
"""By tenant: counters and gauges, those of `TENANT_DOCUMENTATION` among them."""
Buckets = dict[str, list[list[float]]]
"""By tier: how many values fell into each bucket since the last time, and the sum of those."""


class StatsFeed:
    """Turns sums since start-up into what has changed since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._last_of: dict[str, dict[str, float]] = {}  # by tenant
        self._told: dict[tuple[str, str], list[list[float]]] = {}  # of histograms, by name and tier
        self._num_told: dict[tuple[str, str], int] = {}

    def take(
        self, sums: Mapping[str, float], histograms: Histograms, tenants: Callable[[], TenantSums] = dict
    ) -> dict[str, Any]:
        """The changes: increments of counters, values of gauges, `Buckets` of histograms, and under `TENANTS` the same
        of each tenant. `tenants` says what there is of each, if anything; it is asked where `sums` have changed, for
        nothing of a tenant's changes without them."""
        data: dict[str, Any] = {}
        if sums != self._last:  # in most steps they are the same
            data |= _changes(sums, self._last, GAUGES)
            self._last = dict(sums)
            if told := self._tenants(tenants()):
                data[TENANTS] = told
        for key, histogram in histograms.series():
            if histogram.count != self._num_told.get(key, 0):
                name, tier = key
                data.setdefault(name, {})[tier] = self._increments(key, histogram)
        return data

    def _tenants(self, now: TenantSums) -> dict[str, dict[str, float]]:
        """Of each tenant that anything has changed of; all that there is of one that was not told of before."""
        told = {}
        for tenant, values in now.items():
            known = {name: values[name] for name in TENANT_DOCUMENTATION}
            last = self._last_of.get(tenant)
            if changes := known if last is None else _changes(known, last, TENANT_GAUGES):
                told[tenant], self._last_of[tenant] = changes, known
        return told

    def _increments(self, key: tuple[str, str], histogram: Histogram) -> list[list[float]]:
        now: list[list[float]] = [list(histogram.counts), list(histogram.sums)]
        before = self._told.get(key) or [[0] * len(now[0]), [0.0] * len(now[1])]
        self._told[key], self._num_told[key] = now, histogram.count
        return [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(now, before, strict=True)]


class Series:
    """A counter or gauge for each of our statistics and a histogram for each of our distributions. The classes are
    prometheus_client's, or take what those take."""

    def __init__(
        self,
        prefix: str,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        histogram: Callable[..., Any],
        labelnames: Sequence[str],
    ) -> None:
        """Registers all of them."""
        self._metrics = {
            name: (gauge if name in GAUGES else counter)(
                name=prefix + name, documentation=documentation, labelnames=labelnames
            )
            for name, documentation in DOCUMENTATION.items()
        }
        self._of_tenants = {
            name: (gauge if name in TENANT_GAUGES else counter)(
                name=f"{prefix}tenant_{name}", documentation=documentation, labelnames=[*labelnames, "tenant"]
            )
            for name, documentation in TENANT_DOCUMENTATION.items()
        }
        self._histograms = {
            name: histogram(
                name=prefix + name, documentation=of.documentation, buckets=of.bounds, labelnames=[*labelnames, "tier"]
            )
            for name, of in HISTOGRAMS.items()
        }

    def of(self, labels: Iterable[object]) -> LabelledSeries:
        """Those with these values for the labels."""
        values = list(labels)
        return LabelledSeries(
            {name: metric.labels(*values) for name, metric in self._metrics.items()},
            {
                (name, tier): metric.labels(*values, tier)
                for name, metric in self._histograms.items()
                for tier in HISTOGRAMS[name].tiers
            },
            lambda name, tenant: self._of_tenants[name].labels(*values, tenant),
        )


class LabelledSeries:
    """`Series` of one engine. All read 0 from the start; those of tenants have values as soon as it tells who they
    are."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        histograms: Mapping[tuple[str, str], Any],
        of_tenant: Callable[[str, str], Any],
    ) -> None:
        self._metrics = metrics
        self._histograms = histograms
        self._of_tenant = of_tenant

    def observe(self, data: Mapping[str, Any]) -> None:
        """Add what `StatsFeed.take` has returned."""
        for name, value in data.items():
            if name in HISTOGRAMS:
                for tier, (counts, sums) in value.items():
                    _observe(self._histograms[name, tier], HISTOGRAMS[name].bounds, counts, sums)
            elif name == TENANTS:
                for tenant, values in value.items():
                    for statistic, change in values.items():
                        _move(self._of_tenant(statistic, tenant), change, statistic in TENANT_GAUGES)
            else:
                _move(self._metrics[name], value, name in GAUGES)


def _changes(now: Mapping[str, float], last: Mapping[str, float], gauges: frozenset[str]) -> dict[str, float]:
    changed = {name: value for name, value in now.items() if value != last.get(name, 0)}
    return {name: value if name in gauges else value - last.get(name, 0) for name, value in changed.items()}


def _move(metric: Any, value: float, is_gauge: bool) -> None:
    if is_gauge:
        metric.set(value)
    else:
        metric.inc(value)


def _observe(metric: Any, bounds: Sequence[float], counts: Sequence[int], sums: Sequence[float]) -> None:
    """As often as there were values in a bucket, their mean: bucket and sum come out as they were. A few in a step, as
    there is one for each job and request."""
    for index, count in enumerate(counts):
        for _ in range(count):
            metric.observe(min([sums[index] / count, *bounds[index : index + 1]]))
