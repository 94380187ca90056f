"""Our statistics as vLLM carries, logs and exports them. The scheduler side knows all of them, of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ...histograms import HISTOGRAMS
from ...metrics import GAUGES, TENANT_GAUGES
from ..stats import TENANTS, Buckets, Series

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kv_tiered_"


@dataclass
class TieredStats(KVConnectorStats):
    """`data` is as `StatsFeed.take` returns it."""

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
        """The statistics of one interval's log line, by name."""
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


def _add(known: Buckets, new: Mapping[str, list[list[float]]]) -> None:
    for tier, (counts, sums) in new.items():
        old_counts, old_sums = known.get(tier) or [[0] * len(counts), [0.0] * len(sums)]
        known[tier] = [_sum(old_counts, counts), _sum(old_sums, sums)]


def _sum(values: list[float], others: list[float]) -> list[float]:
    return [value + other for value, other in zip(values, others, strict=True)]


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:kv_tiered_*`, made at start-up for every engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = (metric_types[kind] for kind in (Counter, Gauge, Histogram))
        series = Series(PREFIX, counter, gauge, histogram, labelnames)
        self._engines = {engine: series.of(values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._engines[engine_idx].observe(transfer_stats_data)
