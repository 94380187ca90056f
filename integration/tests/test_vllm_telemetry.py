"""What operators and routers see: statistics through vLLM's logger and Prometheus, and events by medium."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import BLOCK_SIZE, prompts, running, transfer_config


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


def test_routers_are_told_what_the_host_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were stored on the host and not removed since are exactly those that it holds."""
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventsConfig

    published = []
    with running(
        tmp_path,
        kv_transfer_config=transfer_config({"write_policy": "write_through", "host_memory": "4MiB"}),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ) as engine:
        monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", published.append)
        engine.alone(prompts(6))
        engine.drain()
        engine.alone(prompts(1, 40, seed=5))
        held = engine.stats()["host_cached_blocks"]
        engine.llm.reset_prefix_cache(reset_connector=True)
        engine.alone(prompts(1, 40, seed=6))
    on_host: set[object] = set()
    before_reset = None
    for event in (event for batch in published for event in batch.events):
        if isinstance(event, AllBlocksCleared):
            before_reset = before_reset or set(on_host)
            on_host.clear()
        elif isinstance(event, BlockStored) and event.medium == "CPU":
            on_host.update(event.block_hashes)
        elif isinstance(event, BlockRemoved) and event.medium == "CPU":
            on_host.difference_update(event.block_hashes)
    assert before_reset is not None
    assert len(before_reset) == held == 32
    assert len(on_host) == 1
