"""Real attention on a random Llama: with the connector and evictions, tokens are those of an engine without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.model import ModelConfig, PagedLlama
from integration.mini_engine.runner import LlamaModel, LocalRunner, ProcessRunner
from integration.mini_engine.scheduler import Scheduler
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import Config, WritePolicy
from kv_connector.index import CacheIdentity

BLOCK_SIZE = 8
NUM_BLOCKS = 24
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split K and V": {"kv_layout": "split"},
    "head-major": {"kv_layout": "HND"},
    "fp8 with scales": {"kv_dtype": "fp8"},
    "key-only": {"key_only": True, "num_key_value_heads": 1},
    "draft layer": {"num_draft_layers": 1},
    "two ranks": {"tp_size": 2},
    "fp8, draft layer, two ranks": {"kv_dtype": "fp8", "num_draft_layers": 1, "tp_size": 2},
}
COPY_SETTINGS = [{"pin_memory": False}, {"copy_path": "runs"}, {"copy_path": "direct"}, {"copy_path": "staged"}]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def build_local(variant: dict[str, Any], config: Config | None, device: str = "cpu") -> LocalRunner:
    """Model, caches and worker halves; importable by a spawned process."""
    model = PagedLlama.random(ModelConfig(num_hidden_layers=4, **variant), seed=0, device=device)
    worker = partial(build_worker, config) if config is not None else None
    return LocalRunner(LlamaModel(model), NUM_BLOCKS, BLOCK_SIZE, worker)


def make_engine(
    variant: dict[str, Any], config: Config | None = None, device: str = "cpu", own_process: bool = False
) -> MiniEngine:
    build = partial(build_local, variant, config, device)
    runner = ProcessRunner(build) if own_process else build()
    scheduler = Scheduler(NUM_BLOCKS, BLOCK_SIZE, max_step_tokens=48, prefix_caching=config is not None)
    identity = CacheIdentity("random", "float32", "NHD", BLOCK_SIZE, tp_size=runner.world_size)
    connector = (
        build_scheduler(config, BLOCK_SIZE, runner.world_size, tree=scheduler.tree) if config is not None else None
    )
    return MiniEngine(scheduler, runner, identity, connector)


def chat(engine: MiniEngine, batched: bool = False) -> Iterator[tuple[list[int], list[int]]]:
    """Three users, three turns each: together twice what the device holds. Yields (tokens, draft tokens)."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 500, (90,), generator=generator).tolist() for _ in range(3)]
    for turn in range(3):
        asked = [prompt + [turn] * 5 for prompt in prompts]
        requests = engine.generate(asked, 6) if batched else [engine.generate([prompt], 6)[0] for prompt in asked]
        prompts = [request.token_ids for request in requests]
        yield from ((request.output_token_ids, request.draft_token_ids) for request in requests)
    engine.shutdown()


@pytest.fixture(scope="module")
def reference() -> dict[str, list[tuple[list[int], list[int]]]]:
    """What each variant answers without any cache."""
    return {name: list(chat(make_engine(variant))) for name, variant in VARIANTS.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_cache_tensor_survives_eviction(
    name: str, policy: WritePolicy, device: str, reference: dict[str, list[tuple[list[int], list[int]]]]
) -> None:
    config = Config(host_memory="16MiB", write_policy=policy, write_through_threshold=1, layer_group_bytes=1)
    engine = make_engine(VARIANTS[name], config, device)
    expected = reference[name] if device == "cpu" else list(chat(make_engine(VARIANTS[name], None, device)))
    assert list(chat(engine)) == expected
    assert engine.connector is not None
    assert engine.connector.metrics.host_hit_tokens > 200, "nothing came from the host: the test shows nothing"
    engine.connector.check()


@pytest.mark.parametrize("name", ["plain", "fp8, draft layer, two ranks"])
def test_the_worker_half_in_another_process(name: str, reference: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    config = Config(host_memory="16MiB", write_policy="write_through")
    engine = make_engine(VARIANTS[name], config, own_process=True)
    assert list(chat(engine)) == reference[name]
    assert engine.connector is not None and engine.connector.metrics.host_hit_tokens > 200


@pytest.mark.gpu
@pytest.mark.parametrize("settings", COPY_SETTINGS)
def test_every_copy_path_on_a_gpu(settings: dict[str, Any]) -> None:
    expected = list(chat(make_engine({}, None, "cuda")))
    for extra in ({}, {"layer_group_bytes": 1}):
        engine = make_engine({}, Config(host_memory="16MiB", write_policy="write_through", **settings, **extra), "cuda")
        assert list(chat(engine)) == expected
        assert engine.connector is not None and engine.connector.metrics.host_hit_tokens > 200


def test_users_at_once_with_preemptions(reference: dict[str, list[tuple[list[int], list[int]]]]) -> None:
    """All users' turns in one batch, which the device cannot hold: chunked prefill, preemption, shared steps."""
    engine = make_engine({}, Config(host_memory="16MiB", write_policy="write_through"))
    assert list(chat(engine, batched=True)) == reference["plain"]
    assert engine.scheduler.num_preemptions > 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = make_engine({})
    with pytest.raises(ValueError, match=r"needs 38 device blocks for 301 tokens, the pool has 24"):
        engine.add([1] * 300, 1)
    engine.shutdown()


def test_a_worker_process_that_dies_is_reported() -> None:
    engine = make_engine({}, Config(host_memory="1MiB"), own_process=True)
    runner = engine._runner
    assert isinstance(runner, ProcessRunner)
    runner._process.kill()
    engine.add([1, 2, 3], 1)
    with pytest.raises(RuntimeError, match=r"worker process ended with exit code -9"):
        engine.step()
