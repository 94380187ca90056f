"""`sglang:kv_tiered_*`, in the files that SGLang's server collects for /metrics.

Every scheduler half of an engine has counted the same, and over all ranks: so one rank writes, the one that SGLang has
its own statistics from by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from ...histograms import Histograms
from ...metrics import GAUGES
from ..stats import Series, StatsFeed

PREFIX = "sglang:kv_tiered_"


class PromMetrics:
    """What a scheduler half has counted. At most one in a process."""

    def __init__(self) -> None:
        """All read 0 from now on."""
        # prometheus_client decides where values lie as it is imported, and SGLang says that where metrics are on.
        from prometheus_client import Counter, Gauge, Histogram

        labels = read_labels()
        gauge = partial(Gauge, multiprocess_mode="mostrecent")
        self._series = Series(PREFIX, Counter, gauge, Histogram, list(labels)).of(labels.values())
        self._series.observe(dict.fromkeys(GAUGES, 0.0))  # several processes' are there once they were set
        self._feed = StatsFeed()

    def show(self, sums: Mapping[str, float], histograms: Histograms) -> None:
        """These are there since the start: what has changed since the last call is added."""
        self._series.observe(self._feed.take(sums, histograms))


def read_labels() -> dict[str, object]:
    """Those of SGLang's own scheduler, with its values, so that both can be joined."""
    parallel = get_parallel()
    labels: dict[str, object] = {
        "model_name": get_serving().served_model_name,
        "engine_type": "unified",  # no other is supported
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    return labels | (get_observability().extra_metric_labels or {})
