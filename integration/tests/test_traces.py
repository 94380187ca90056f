"""Requests of the mini engine followed by OpenTelemetry, from look-up to bytes, and the environment's exporters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.scheduler import Scheduler
from integration.tests.test_mini_engine import BLOCK_SIZE, NUM_BLOCKS, build_local, chat
from kv_connector.build import build_scheduler
from kv_connector.config import Config
from kv_connector.errors import ConfigError
from kv_connector.index import CacheIdentity
from kv_connector.scheduler.traces import RequestTraces
from kv_connector.tracing import SpanTracer, open_tracer

pytest.importorskip("opentelemetry.sdk", reason="pip install '.[otel]'")


def traced_engine(folder: Path, observers: tuple[RequestTraces, ...], share: float = 0.0) -> MiniEngine:
    """With storage, so that every kind of job but those of other engines comes up."""
    storage = {"path": str(folder), "capacity": "64MiB", "prefetch": "wait_complete"}
    settings = {"host_memory": "1MiB", "write_policy": "write_through", "load_choice": "sync", "storage": storage}
    config = Config.from_mapping(settings | {"trace_requests": share})
    identity = CacheIdentity("random", "float32", "NHD", BLOCK_SIZE)
    scheduler = Scheduler(NUM_BLOCKS, BLOCK_SIZE, max_step_tokens=48)
    half = build_scheduler(config, BLOCK_SIZE, tree=scheduler.tree, identity=identity, observers=observers)
    return MiniEngine(scheduler, build_local({}, config), identity, half)


def test_a_request_is_followed_from_look_up_to_bytes(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for _ in range(2):  # the second engine finds in storage what the first has computed
        engine = traced_engine(tmp_path, (RequestTraces(SpanTracer(provider), 1.0),))
        list(chat(engine))
        assert engine.connector is not None
        stats = engine.connector.get_kv_connector_stats()
    spans = exporter.get_finished_spans()
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name.removeprefix("kv_connector."), []).append(span)
    requests = {span.context.span_id: span for span in by_name["request"]}
    assert len(requests) == 2 * 9 and not any(span.parent for span in requests.values())
    assert by_name.keys() == {
        *("request", "load", "save"),
        *("storage.look_up", "storage.fetch", "storage.back_up"),
    }
    for name in ("load", "save", "storage.look_up", "storage.fetch"):
        for span in by_name[name]:
            parent = requests[span.parent.span_id]
            assert span.context.trace_id == parent.context.trace_id
            assert parent.start_time <= span.start_time <= span.end_time
    saves = {span.context.span_id for span in by_name["save"]}
    assert {span.parent.span_id for span in by_name["storage.back_up"]} <= saves
    moved = [event for span in by_name["storage.fetch"] for event in span.events]
    assert all(event.name == "moved" and event.attributes["kv_connector.seconds"] > 0 for event in moved) and moved
    fetched = sum(span.attributes["kv_connector.blocks"] for span in by_name["storage.fetch"])
    assert fetched >= stats["fetched_blocks"] > 0
    admitted = [event for span in requests.values() for event in span.events if event.name == "admitted"]
    assert sum(event.attributes["kv_connector.hit_blocks.host"] for event in admitted) > 0


CHAT = """
from pathlib import Path
from integration.tests.test_traces import chat, traced_engine
list(chat(traced_engine(Path({folder!r}), (), 1.0)))
"""


def test_the_environment_says_where_spans_go(tmp_path: Path) -> None:
    """All of them, also those that ended just before the process did."""
    variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "3600000", "OTEL_SERVICE_NAME": "mini"}
    done = subprocess.run(
        [sys.executable, "-c", CHAT.format(folder=str(tmp_path))],
        cwd=Path(__file__).parents[2],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.count('"name": "kv_connector.request"') == 9
    assert '"service.name": "mini"' in done.stdout


def test_what_is_missing_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin_of_nobody")
    with pytest.raises(ConfigError, match=r"the exporter zipkin_of_nobody, which is not installed: pip install"):
        open_tracer()
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'opentelemetry-sdk>=1.25' .*, or leave trace_requests out"):
        build_scheduler(Config(host_memory=1 << 20, trace_requests=0.01), 16)
    build_scheduler(Config(host_memory=1 << 20), 16)  # and who asks for none needs nothing
