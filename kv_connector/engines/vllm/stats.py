"""Our counters as vLLM carries, logs and exports them.

The scheduler side knows all of them, of every rank. What travels is plain data: increments of counters and the latest
values of gauges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ...metrics import DOCUMENTATION, GAUGES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kv_tiered_"


@dataclass
class TieredStats(KVConnectorStats):
    """`data` maps names to increments of counters and to values of gauges."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TieredStats:
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What one log line says of an interval."""
        data = self.data
        shown = {name: round(value, 1) for name, value in data.items() if value}
        if data.get("load_milliseconds") and data.get("loaded_bytes"):
            shown["load_gigabytes_per_second"] = round(data["loaded_bytes"] / data["load_milliseconds"] / 1e6, 1)
        return shown

    def is_empty(self) -> bool:
        return not self.data

    def __getitem__(self, name: str) -> dict[str, float]:
        """As of a dictionary: MultiConnector of 0.25 takes it for one where nothing was serialised on the way."""
        assert name == "data", f"TieredStats has no {name!r}"
        return self.data


class StatsFeed:
    """Turns sums since start-up into what has changed since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, sums: Mapping[str, float]) -> TieredStats | None:
        """The changes; None where there are none."""
        if sums == self._last:
            return None  # so it is in most steps
        last, self._last = self._last, dict(sums)
        changed = {name: value for name, value in sums.items() if value != last.get(name, 0)}
        if not changed:
            return None
        return TieredStats(
            data={name: value if name in GAUGES else value - last.get(name, 0) for name, value in changed.items()}
        )


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:kv_tiered_*`: a counter or gauge for each of our statistics, made at start-up so that all read 0."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in GAUGES:
                metric.set(value)
            else:
                metric.inc(value)
