"""What operators and routers see: statistics through vLLM's logger and Prometheus, and events by medium."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from vllm.distributed import kv_events

from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, prompts, running, transfer_config, vllm_version
from kv_connector.engines.stats import StatsFeed
from kv_connector.engines.vllm.groups import TELLS_STATES
from kv_connector.metrics import TENANT_DOCUMENTATION, CacheMetrics
from tests.waiting import until


def test_prometheus_counts_what_we_count(tmp_path: Path) -> None:
    from prometheus_client import REGISTRY

    config = transfer_config({"write_policy": "write_through"})
    asked = prompts(6)
    with running(tmp_path, kv_transfer_config=config) as engine:
        for _ in range(2):
            engine.alone(asked)
        stats = engine.stats()
        samples = {sample.name: sample.value for family in REGISTRY.collect() for sample in family.samples}
    assert samples["vllm:kv_tiered_host_hit_tokens_total"] == stats["host_hit_tokens"] == 6 * 13 * BLOCK_SIZE
    assert samples["vllm:kv_tiered_loaded_bytes_total"] == stats["loaded_bytes"]
    assert samples["vllm:kv_tiered_host_capacity_blocks"] == stats["host_capacity_blocks"]
    assert samples["vllm:kv_tiered_failed_load_jobs_total"] == 0


@pytest.mark.skipif(vllm_version() < "0.32", reason="its LLM, no server, drops statistics of steps without outputs")
def test_prometheus_has_the_distributions_that_we_have(tmp_path: Path, stable_hashes: None) -> None:
    """Through storage and back: every bucket of every tier, and the sums. vLLM begins anew with each engine."""
    from prometheus_client import REGISTRY

    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "backup": "on_save", "prefetch": "wait_complete"}
    settings = {"write_policy": "write_through", "host_memory": "4MiB", "storage": storage, "trace_loads": True}
    with running(tmp_path, num_blocks=40, kv_transfer_config=transfer_config(settings)) as engine:
        for _ in range(3):
            engine.alone(prompts(6))
            engine.drain()
        engine.alone(prompts(1, 40, seed=9))  # what has ended since the last step that was reported
        ours = dict(engine.half.metrics.histograms.series())
        after = buckets(REGISTRY)
        stats = engine.stats()
    for (name, tier), histogram in ours.items():
        counts, total = after[f"vllm:kv_tiered_{name}", tier]
        assert counts == list(accumulate(histogram.counts)), (name, tier)
        assert total == pytest.approx(sum(histogram.sums)), (name, tier)
    assert sum(ours["hit_tokens", "host"].sums) == stats["host_hit_tokens"] > 0
    assert sum(ours["hit_tokens", "storage"].sums) == stats["storage_hit_tokens"] > 0
    for series in ("load_seconds", "save_seconds"):
        assert ours[series, "host"].count and ours[series, "storage"].count
    assert ours["load_stall_seconds", "host"].count == stats["sync_loads"]
    for series in ("lookup_seconds", "storage_read_seconds", "storage_write_seconds"):
        assert ours[series, "storage"].count
    assert ours["reuse_distance_blocks", "all"].count


def test_prometheus_has_each_tenants_share_and_hits(tmp_path: Path) -> None:
    from prometheus_client import REGISTRY

    tenants = {"calm": {"weight": 1}, "loud": {"weight": 2}}
    config = transfer_config({"write_policy": "write_through", "tenants": tenants})
    with running(tmp_path, num_blocks=60, kv_transfer_config=config) as engine:
        for _ in range(2):
            engine.alone(prompts(1, seed=70), cache_salt="calm:alice")
            engine.alone(prompts(3, seed=71), cache_salt="loud")
            engine.drain()
            assert engine.llm.reset_prefix_cache()
        engine.alone(prompts(1, 40, seed=72), cache_salt="nobody")
        ours = engine.half.tenant_stats()
        told = of_tenants(REGISTRY)
    assert ours["calm"]["host_hit_tokens"] == 13 * BLOCK_SIZE and ours["loud"]["host_hit_tokens"] == 3 * 13 * BLOCK_SIZE
    assert told.keys() == {(name, tenant) for name in TENANT_DOCUMENTATION for tenant in ("default", "calm", "loud")}
    for (name, tenant), value in told.items():
        assert value == ours[tenant][name], (name, tenant)


def of_tenants(registry: Any) -> dict[tuple[str, str], float]:
    """Each statistic of each tenant."""
    found = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        name = sample.name.removesuffix("_total").removeprefix("vllm:kv_tiered_tenant_")
        if name in TENANT_DOCUMENTATION and sample.name.startswith("vllm:kv_tiered_tenant_"):
            found[name, sample.labels["tenant"]] = sample.value
    return found


def buckets(registry: Any) -> dict[tuple[str, str], tuple[list[float], float]]:
    """Cumulated counts and sum of every histogram with a tier, by name and tier."""
    found: dict[tuple[str, str], tuple[list[float], float]] = {}
    for family in registry.collect():
        for sample in family.samples if family.type == "histogram" else ():
            key = family.name, sample.labels.get("tier", "")
            counts, _ = found.setdefault(key, ([], 0.0))
            if sample.name.endswith("_bucket"):
                counts.append(sample.value)
            elif sample.name.endswith("_sum"):
                found[key] = counts, sample.value
    return found


def test_statistics_of_several_intervals_are_added_up() -> None:
    """As the logger of several engines does: counters and buckets are summed, of gauges the latest counts."""
    from kv_connector.engines.vllm.stats import TieredStats

    metrics, feed = CacheMetrics(), StatsFeed()
    metrics.histograms.observe("hit_tokens", "host", 20.0)
    first = feed.take({"requests": 1, "known_blocks": 5}, metrics.histograms)
    metrics.histograms.observe("hit_tokens", "host", 20.0)
    metrics.histograms.observe("hit_tokens", "peer", 17.0)
    second = feed.take({"requests": 3, "known_blocks": 4}, metrics.histograms)
    assert feed.take({"requests": 3, "known_blocks": 4}, metrics.histograms) == {}
    total = TieredStats().aggregate(TieredStats(first)).aggregate(TieredStats(second))
    assert total.data["requests"] == 3 and total.data["known_blocks"] == 4
    whole = StatsFeed().take({"requests": 3, "known_blocks": 4}, metrics.histograms)
    assert total.data == whole
    assert second["hit_tokens"]["host"][0] == first["hit_tokens"]["host"][0], "one more, and not two"
    assert total.reduce() == {"requests": 3, "known_blocks": 4}


def test_statistics_of_tenants_are_added_up() -> None:
    """Counters of each tenant are summed, of gauges the latest counts; who has changed in nothing is not told of."""
    from kv_connector.engines.vllm.stats import TieredStats

    def sums(requests: int, held: int) -> dict[str, float]:
        return dict.fromkeys(TENANT_DOCUMENTATION, 0.0) | {"requests": requests, "held_blocks": held, "weight": 3}

    feed, none = StatsFeed(), CacheMetrics().histograms
    first = feed.take({"requests": 2}, none, lambda: {"a": sums(2, 8), "b": sums(0, 0)})
    second = feed.take({"requests": 5}, none, lambda: {"a": sums(5, 6), "b": sums(0, 0)})
    assert feed.take({"requests": 5}, none, lambda: {"a": sums(6, 6)}) == {}, "nothing has changed, so none is asked"
    assert second["tenants"] == {"a": {"requests": 3, "held_blocks": 6}}
    total = TieredStats().aggregate(TieredStats(first)).aggregate(TieredStats(second))
    assert total.data["tenants"]["a"]["requests"] == 5 and total.data["tenants"]["a"]["held_blocks"] == 6
    assert total.data["tenants"]["b"] == dict.fromkeys(TENANT_DOCUMENTATION, 0.0), "so that all read 0"
    assert first["tenants"]["a"]["requests"] == 2, "what was added up is left as it was"
    assert total.reduce() == {"requests": 5}


def host_blocks(events: list[Any]) -> set[tuple[Any, Any]]:
    """(hash, group) of the blocks that a router believes to be on the host, when it has read all these events."""
    held: set[tuple[Any, Any]] = set()
    for event in events:
        if isinstance(event, kv_events.AllBlocksCleared):
            held.clear()
        elif event.medium == "CPU":
            blocks = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
            held = held | blocks if isinstance(event, kv_events.BlockStored) else held - blocks
    return held


def contents(events: list[Any], medium: str) -> dict[tuple[Any, Any], tuple[Any, ...]]:
    """What a router learns of each block that is stored on this medium: tokens, parent, and what goes for its group.

    Where a window is cached in part, vLLM says which tokens the blocks are among and not which are theirs.
    """
    known: dict[tuple[Any, Any], tuple[Any, ...]] = {}
    for event in events:
        if not isinstance(event, kv_events.BlockStored) or event.medium != medium:
            continue
        size, parent = event.block_size, event.parent_block_hash
        is_whole = len(event.token_ids) == size * len(event.block_hashes)
        kind = getattr(event, "kv_cache_spec_kind", None), getattr(event, "kv_cache_spec_sliding_window", None)
        for i, block_hash in enumerate(event.block_hashes):
            chain = (tuple(event.token_ids[i * size : (i + 1) * size]), parent) if is_whole else None
            keys = event.extra_keys[i] if event.extra_keys else None
            known.setdefault((block_hash, event.group_idx), (chain, keys, event.lora_name, *kind))
            parent = block_hash
    return known


needs_states = pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer")


@contextmanager
def publishing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, num_blocks: int, settings: dict[str, Any]
) -> Iterator[tuple[VllmEngine, list[Any]]]:
    """An engine and the events that it has published."""
    published: list[Any] = []
    with running(
        folder,
        model,
        num_blocks=num_blocks,
        kv_transfer_config=transfer_config(settings),
        kv_events_config=kv_events.KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ) as engine:
        publisher = engine.scheduler.kv_event_publisher
        monkeypatch.setattr(publisher, "publish", lambda batch: published.extend(batch.events))
        yield engine, published


def test_routers_are_told_what_the_host_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were stored on the host and not removed since are exactly those that it holds."""
    settings = {"write_policy": "write_through", "host_memory": "4MiB"}
    with publishing(tmp_path, monkeypatch, "dense", 40, settings) as (engine, events):
        engine.alone(prompts(6))
        engine.drain()
        engine.alone(prompts(1, 40, seed=5))
        before = len(events)
        assert len(host_blocks(events)) == engine.stats()["host_cached_blocks"] == 32
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.alone(prompts(1, 40, seed=6))
        assert any(isinstance(event, kv_events.AllBlocksCleared) for event in events[before:]), "vLLM's own"
        assert len(host_blocks(events)) == engine.stats()["host_cached_blocks"] == 1


def test_a_reset_that_vllm_refused_for_the_device_says_nothing_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request runs: vLLM keeps what is on the device, and only the host's blocks are gone."""
    from vllm import SamplingParams

    settings = {"write_policy": "write_through"}
    with publishing(tmp_path, monkeypatch, "dense", 80, settings) as (engine, events):
        engine.alone(prompts(1))
        engine.drain()
        assert len(host_blocks(events)) == 13
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        engine.llm.llm_engine.add_request("long", {"prompt_token_ids": prompts(1, 40, seed=5)[0]}, params)
        engine.llm.llm_engine.step()
        assert not engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.stats()["host_cached_blocks"] == 0
        core = engine.llm.llm_engine
        until(lambda: not core.has_unfinished_requests(), core.step, engine.stats)
        engine.drain()
        assert not [event for event in events if isinstance(event, kv_events.AllBlocksCleared)]
        assert len(host_blocks(events)) == engine.stats()["host_cached_blocks"]


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("dense", "write_through"),
        ("windows", "write_back"),
        pytest.param("two_sizes", "write_back", marks=needs_states),
        pytest.param("conv", "write_through", marks=needs_states),
    ],
)
def test_routers_learn_the_same_of_a_block_on_the_host_as_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, policy: str
) -> None:
    """Tokens, parent, salt and the kind of the group, also where the request that computed it ended long ago."""
    with publishing(tmp_path, monkeypatch, model, 120, {"write_policy": policy}) as (engine, events):
        for seed, salt in ((1, "alice"), (2, "bob")):
            engine.alone(prompts(6, seed=seed), 40, cache_salt=salt)
        engine.drain()
        on_device, on_host = contents(events, "GPU"), contents(events, "CPU")
        held, groups = host_blocks(events), engine.scheduler.kv_cache_config.kv_cache_groups
    assert held and held == on_host.keys() <= on_device.keys()
    assert {group for _, group in on_host} == set(range(len(groups)))
    for block, (chain, *rest) in on_host.items():
        their_chain, *theirs = on_device[block]
        assert chain is not None and their_chain in (None, chain)
        assert rest == theirs
    assert any(keys for _, keys, *_ in on_host.values()), "the salt is in the first block's"


class TraceReceiver:
    """An OTLP collector on this machine: spans that came over HTTP, as they are."""

    def __init__(self) -> None:
        self.spans: Queue[Any] = Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            receiver.spans.put((scope.scope.name, span))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_spans_reach_a_collector_in_the_clients_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that a client traces: its load from the host is in that trace, under the client's span."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from vllm import SamplingParams

    receiver = TraceReceiver()
    port = receiver.server.server_address[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}/v1/traces")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    trace_id, span_id = "0af7651916cd43dd8448eb2100000001", "b7ad6b7169203331"
    config = transfer_config({"write_policy": "write_through", "trace_requests": 0.001})
    with running(tmp_path, num_blocks=40, kv_transfer_config=config) as engine:
        for _ in range(2):
            engine.alone(prompts(6))
        engine.drain()
        core, asked = engine.llm.llm_engine, prompts(6)[0]
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
        core.add_request("traced", {"prompt_token_ids": asked}, params, trace_headers=headers)
        until(lambda: not core.has_unfinished_requests(), core.step, engine.stats)
        engine.drain()
        found: dict[str, Any] = {}
        while not {"kv_connector.request", "kv_connector.load"} <= found.keys():
            scope, span = receiver.spans.get(timeout=60)
            assert scope == "kv_connector"
            if span.trace_id.hex() == trace_id:
                found[span.name] = span
    receiver.server.shutdown()
    receiver.server.server_close()
    request, load = found["kv_connector.request"], found["kv_connector.load"]
    assert request.parent_span_id.hex() == span_id
    assert load.parent_span_id == request.span_id
    assert [event.name for event in request.events] == ["admitted"]
    attributes = {attribute.key: attribute.value for attribute in load.attributes}
    assert attributes["kv_connector.blocks"].int_value == 13
