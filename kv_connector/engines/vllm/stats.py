"""Our counters as vLLM carries, logs and exports them.

The scheduler side knows all of them, of every rank. What travels is plain data: increments of counters and of the
buckets of histograms, and the latest values of gauges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ...histograms import HISTOGRAMS, Histograms
from ...histograms import Histogram as Distribution
from ...metrics import DOCUMENTATION, GAUGES, TENANT_DOCUMENTATION, TENANT_GAUGES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kv_tiered_"
TENANTS = "tenants"
"""Names what is told of each tenant among the data."""

TenantSums = Mapping[str, Mapping[str, float]]
"""By tenant: counters and gauges, those of `TENANT_DOCUMENTATION` among them."""
Buckets = dict[str, list[list[float]]]
"""By tier: how many values fell into each bucket since the last time, and the sum of those."""


@dataclass
class TieredStats(KVConnectorStats):
    """`data` maps names to increments of counters, to values of gauges, and to `Buckets` of histograms; `TENANTS`
    to the same of each tenant."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TieredStats:
        for name, value in other.data.items():
            if name in HISTOGRAMS:
                _add(self.data.setdefault(name, {}), value)
            elif name == TENANTS:
                known = self.data.setdefault(TENANTS, {})
                for tenant, values in value.items():
                    _add_tenant(known.setdefault(tenant, {}), values)
            else:
                self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What one log line says of an interval."""
        data = {name: value for name, value in self.data.items() if name not in HISTOGRAMS and name != TENANTS}
        shown = {name: round(value, 1) for name, value in data.items() if value}
        if data.get("load_milliseconds") and data.get("loaded_bytes"):
            shown["load_gigabytes_per_second"] = round(data["loaded_bytes"] / data["load_milliseconds"] / 1e6, 1)
        return shown

    def is_empty(self) -> bool:
        return not self.data

    def __getitem__(self, name: str) -> dict[str, Any]:
        """As of a dictionary: MultiConnector of 0.25 takes it for one where nothing was serialised on the way."""
        assert name == "data", f"TieredStats has no {name!r}"
        return self.data


def _add_tenant(known: dict[str, float], new: Mapping[str, float]) -> None:
    for name, value in new.items():
        known[name] = value if name in TENANT_GAUGES else known.get(name, 0) + value


def _changes(now: Mapping[str, float], last: Mapping[str, float], gauges: frozenset[str]) -> dict[str, float]:
    changed = {name: value for name, value in now.items() if value != last.get(name, 0)}
    return {name: value if name in gauges else value - last.get(name, 0) for name, value in changed.items()}


def _add(known: Buckets, new: Mapping[str, list[list[float]]]) -> None:
    for tier, (counts, sums) in new.items():
        old_counts, old_sums = known.get(tier) or [[0] * len(counts), [0.0] * len(sums)]
        known[tier] = [_sum(old_counts, counts), _sum(old_sums, sums)]


def _sum(values: list[float], others: list[float]) -> list[float]:
    return [value + other for value, other in zip(values, others, strict=True)]


class StatsFeed:
    """Turns sums since start-up into what has changed since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._last_of: dict[str, dict[str, float]] = {}  # by tenant
        self._told: dict[tuple[str, str], list[list[float]]] = {}  # of histograms, by name and tier
        self._num_told: dict[tuple[str, str], int] = {}

    def take(
        self, sums: Mapping[str, float], histograms: Histograms, tenants: Callable[[], TenantSums] = dict
    ) -> TieredStats | None:
        """The changes; None where there are none. `tenants` says what there is of each, if anything; it is asked where
        `sums` have changed, for nothing of a tenant's changes without them."""
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
        return TieredStats(data=data) if data else None

    def _tenants(self, now: TenantSums) -> dict[str, dict[str, float]]:
        """Of each tenant that anything has changed of; all that there is of one that was not told of before."""
        told = {}
        for tenant, values in now.items():
            known = {name: values[name] for name in TENANT_DOCUMENTATION}
            last = self._last_of.get(tenant)
            if changes := known if last is None else _changes(known, last, TENANT_GAUGES):
                told[tenant], self._last_of[tenant] = changes, known
        return told

    def _increments(self, key: tuple[str, str], histogram: Distribution) -> list[list[float]]:
        now: list[list[float]] = [list(histogram.counts), list(histogram.sums)]
        before = self._told.get(key) or [[0] * len(now[0]), [0.0] * len(now[1])]
        self._told[key], self._num_told[key] = now, histogram.count
        return [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(now, before, strict=True)]


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:kv_tiered_*`: a counter or gauge for each of our statistics and a histogram for each of our distributions,
    made at start-up so that all read 0; those of tenants have values as soon as the engine tells who they are."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, documentation in DOCUMENTATION.items():
            kind = metric_types[Gauge if name in GAUGES else Counter]
            metric = kind(name=PREFIX + name, documentation=documentation, labelnames=labelnames)
            self._metrics[name] = {engine: metric.labels(*v) for engine, v in per_engine_labelvalues.items()}
        self._labels = per_engine_labelvalues
        self._of_tenants: dict[str, Any] = {}
        for name, documentation in TENANT_DOCUMENTATION.items():
            kind = metric_types[Gauge if name in TENANT_GAUGES else Counter]
            full_name = f"{PREFIX}tenant_{name}"
            self._of_tenants[name] = kind(
                name=full_name, documentation=documentation, labelnames=[*labelnames, "tenant"]
            )
        self._histograms: dict[tuple[str, str, int], Any] = {}
        for name, of in HISTOGRAMS.items():
            metric = metric_types[Histogram](
                name=PREFIX + name, documentation=of.documentation, buckets=of.bounds, labelnames=[*labelnames, "tier"]
            )
            for engine, values in per_engine_labelvalues.items():
                for tier in of.tiers:
                    self._histograms[name, tier, engine] = metric.labels(*values, tier)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in HISTOGRAMS:
                for tier, (counts, sums) in value.items():
                    _observe(self._histograms[name, tier, engine_idx], HISTOGRAMS[name].bounds, counts, sums)
            elif name == TENANTS:
                for tenant, values in value.items():
                    self._observe_tenant(engine_idx, tenant, values)
            else:
                _move(self._metrics[name][engine_idx], value, name in GAUGES)

    def _observe_tenant(self, engine: int, tenant: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            _move(self._of_tenants[name].labels(*self._labels[engine], tenant), value, name in TENANT_GAUGES)


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
