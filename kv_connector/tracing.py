"""Spans for OpenTelemetry (layer 1), which is imported where traces are asked for and nowhere else.

Where and how they are exported the standard variables say: OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME and the others. A process that has a tracer provider already, as vLLM's has with
--otlp-traces-endpoint, exports ours with its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

from .errors import ConfigError
from .extras import pip_line
from .values import shown

_PIP_LINE = pip_line("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
Attributes = Mapping[str, "str | int | float | bool"]


class OpenSpan:
    """One span that has begun; see `scheduler.traces.Span`."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer = tracer
        self._span = span

    def child(self, name: str, attributes: Attributes) -> OpenSpan:
        """Begin a part of it."""
        from opentelemetry import trace

        inside = trace.set_span_in_context(self._span)
        return OpenSpan(self._tracer, self._tracer.start_span(name, inside, attributes=dict(attributes)))

    def note(self, name: str, attributes: Attributes) -> None:
        """Something has happened in it."""
        self._span.add_event(name, dict(attributes))

    def end(self, attributes: Attributes, ok: bool = True) -> None:
        """It is over, and exported soon, on a thread of the exporter's."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(dict(attributes))
        if not ok:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class SpanTracer:
    """See `scheduler.traces.Tracer`."""

    def __init__(self, provider: Any) -> None:
        self._tracer = provider.get_tracer("kv_connector")

    def begin(self, name: str, trace_headers: Mapping[str, str], attributes: Attributes) -> OpenSpan:
        """Begin a span, in the trace that these headers name if they name one."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(trace_headers)
        return OpenSpan(self._tracer, self._tracer.start_span(name, context, attributes=dict(attributes)))


def open_tracer() -> SpanTracer:
    """Spans go to this process's tracer provider, or to one of their own that the environment configures, which exports
    them on a thread and once more at the end of the process. Raises ConfigError where OpenTelemetry is missing or the
    environment names what is not there."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"trace_requests needs OpenTelemetry, which is not installed: {_PIP_LINE}, or leave trace_requests out"
        ) from error
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        for exporter in _exporters():
            provider.add_span_processor(BatchSpanProcessor(exporter))
        # The engine's processes are children of multiprocessing, which know no atexit.
        Finalize(None, provider.shutdown, exitpriority=10)
    return SpanTracer(provider)


def _exporters() -> list[Any]:
    """Those that OTEL_TRACES_EXPORTER names, with commas between them; `none` is none."""
    from importlib.metadata import entry_points

    exporters = []
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        name = name.strip()
        if name == "none":
            continue
        full_name = name
        if name == "otlp":
            by_all = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
            protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", by_all)
            full_name = _PROTOCOLS.get(protocol, protocol)
        found = list(entry_points(group="opentelemetry_traces_exporter", name=full_name))
        if not found:
            raise ConfigError(
                f"trace_requests: OTEL_TRACES_EXPORTER={shown(name)} asks for the exporter {full_name}, which is not "
                f"installed: {_PIP_LINE} brings otlp over http/protobuf; console and none need no more than that"
            )
        exporters.append(found[0].load()())
    return exporters
