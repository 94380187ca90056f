"""A bucket of a real S3 server behind whole engines: what one has computed another one finds, and no stranger does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.model import ModelConfig, PagedLlama
from integration.mini_engine.runner import LlamaModel, LocalRunner
from integration.mini_engine.scheduler import Scheduler
from integration.s3_server import SECRET_KEY, S3Server, running_s3, s3_settings, why_not
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import Config
from kv_connector.index import CacheIdentity
from kv_connector.storage.objects.backend import ObjectStorage
from tests.storage.objects.stores import connected
from tests.storage.s3.proxy import FaultProxy

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.usefixtures("slow_machine"),
]
BLOCK_SIZE = 8
NUM_BLOCKS = 64
PROMPTS = [[(17 * request + 7 * position) % 500 for position in range(90)] for request in range(3)]
NUM_HIT_TOKENS = 3 * 88
"""Of a prompt's 90 tokens those of whole blocks."""


@pytest.fixture
def server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


def config_for(endpoint: str, **s3: Any) -> Config:
    storage = s3_settings(endpoint, **s3) | {"prefetch": "wait_complete"}
    return Config.from_mapping({"host_memory": "16MiB", "write_policy": "write_through", "storage": storage})


def start(config: Config | None, model_name: str = "random", num_ranks: int = 1) -> MiniEngine:
    """An engine, once it has reached its bucket."""
    model = PagedLlama.random(ModelConfig(num_hidden_layers=4, tp_size=num_ranks), seed=0, device="cpu")
    scheduler = Scheduler(NUM_BLOCKS, BLOCK_SIZE, max_step_tokens=48, prefix_caching=config is not None)
    identity = CacheIdentity(model_name, "float32", "NHD", BLOCK_SIZE, tp_size=num_ranks)
    if config is None:
        return MiniEngine(scheduler, LocalRunner(LlamaModel(model), NUM_BLOCKS, BLOCK_SIZE), identity)
    build = partial(build_worker, config, identity=identity)
    runner = LocalRunner(LlamaModel(model), NUM_BLOCKS, BLOCK_SIZE, build)
    for worker in runner.workers:
        storage = worker._storage._storage  # type: ignore[attr-defined]
        assert isinstance(storage, ObjectStorage)
        connected(storage)
    connector = build_scheduler(config, BLOCK_SIZE, num_ranks, tree=scheduler.tree, identity=identity)
    return MiniEngine(scheduler, runner, identity, connector)


def answers(engine: MiniEngine) -> tuple[list[list[int]], dict[str, float]]:
    """What an engine answers, and what it has counted when it ends."""
    tokens = [engine.generate([prompt], 6)[0].output_token_ids for prompt in PROMPTS]
    engine.run()
    stats = dict(engine.connector.get_kv_connector_stats()) if engine.connector is not None else {}
    engine.shutdown()
    return tokens, stats


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """What is answered without any cache."""
    return answers(start(None))[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_engine_answers_from_what_another_one_has_computed(
    server: S3Server, reference: list[list[int]], num_ranks: int
) -> None:
    config = config_for(server.endpoint)
    expected, first = answers(start(config, num_ranks=num_ranks))
    assert num_ranks > 1 or expected == reference
    assert first["fetched_blocks"] == 0
    tokens, second = answers(start(config, num_ranks=num_ranks))
    assert tokens == expected
    assert second["storage_hit_tokens"] == NUM_HIT_TOKENS
    tokens, third = answers(start(config, model_name="another", num_ranks=num_ranks))
    assert tokens == expected
    assert third["fetched_blocks"] == 0, "other weights are another identity"
    tokens, fourth = answers(start(config_for(server.endpoint, prefix="other/team"), num_ranks=num_ranks))
    assert tokens == expected
    assert fourth["fetched_blocks"] == 0, "another prefix of the bucket is another storage"


@pytest.mark.parametrize("fault", ["flip", "cut", "short", 503, 403, "close"])
def test_whatever_fails_the_answers_are_the_same(
    server: S3Server, reference: list[list[int]], caplog: pytest.LogCaptureFixture, fault: str | int
) -> None:
    proxy = FaultProxy(server.port)
    config = config_for(proxy.endpoint, max_retries=1)
    assert answers(start(config))[0] == reference
    engine = start(config)
    proxy.fault = lambda method, name: fault if method == "GET" and "group" in name else None
    tokens, stats = answers(engine)
    assert tokens == reference
    assert stats["fetched_blocks"] == 0
    proxy.close()
    said = [caplog.text, repr(config), *(worker.describe() for worker in engine._runner.workers)]
    assert not any(SECRET_KEY in text for text in said)
