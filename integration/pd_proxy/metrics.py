"""What the proxy counts, in Prometheus' form."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMetrics:
    """One of them for each proxy. Outcomes of `requests`: `transferred` and `computed_by_decode` were answered by a
    decode engine, with a prompt that was computed elsewhere or by itself; `full`, `bad_request`, `no_engine` and
    `timed_out` were refused by the proxy; `client_gone` hung up before the answer began."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("pd_proxy_requests", "Completions, by outcome.", ["outcome"], registry=self.registry)
        self.in_flight = Gauge("pd_proxy_requests_in_flight", "Completions under way.", registry=self.registry)
        self.failures = Counter(
            "pd_proxy_engine_failures", "Requests that an engine failed.", ["engine", "role"], registry=self.registry
        )
        self.healthy = Gauge(
            "pd_proxy_engine_healthy", "1 where it gets requests.", ["engine", "role"], registry=self.registry
        )
        self.retries = Counter(
            "pd_proxy_retries", "Requests put to another engine of the role.", ["role"], registry=self.registry
        )
        self.broken = Counter(
            "pd_proxy_broken_answers", "Answers that ended in their middle.", ["by"], registry=self.registry
        )
        self.prefill_seconds = self._histogram("pd_proxy_prefill_seconds", "Until a prefill engine had answered.")
        self.first_byte_seconds = self._histogram("pd_proxy_first_byte_seconds", "Until the first byte of the answer.")
        self.request_seconds = self._histogram("pd_proxy_request_seconds", "Until the last byte of the answer.")

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(name, documentation, buckets=SECONDS, registry=self.registry)
