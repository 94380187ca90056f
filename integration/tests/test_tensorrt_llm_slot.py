"""What TensorRT-LLM's slot is told and asked: offers, the names of blocks, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.tensorrt_llm.blocks import LlmRequest
from integration.tensorrt_llm.engine import llm_args
from integration.tensorrt_llm.executor import Options
from integration.tests.tensorrt_llm_engines import ModelledEngine, running, scheduler_of, worker_of
from kv_connector.engines.tensorrt_llm import TieredKVScheduler, TieredKVWorker
from kv_connector.engines.tensorrt_llm.identity import PromptHasher
from kv_connector.engines.tensorrt_llm.launch import VARIABLE, read_settings, refuse_unsupported
from kv_connector.errors import ConfigError, KVConnectorError
from kv_connector.index import CacheIdentity
from kv_connector.testing.engine_contract import evict, loadable, prompts


def about_to_be_offered(engine: ModelledEngine, seed: str) -> tuple[TieredKVScheduler, Any]:
    """The scheduler, and a request for a prompt that the host has; the engine does not know of it."""
    (prompt,) = asked = prompts(engine, 1, seed=seed)
    engine.generate(asked)
    request = SimpleNamespace(request_id=10**6, get_tokens=lambda beam: list(prompt))
    return scheduler_of(engine.llm.ranks[0]), request


def test_what_was_offered_is_leased_until_it_is_loaded() -> None:
    """The engine's second cache manager may take an offer up some iterations later."""
    with running(Options()) as engine:
        scheduler, request = about_to_be_offered(engine, "offered")
        num_offered, is_async = scheduler.get_num_new_matched_tokens(request, 0)
        assert (num_offered, is_async) == (loadable(engine, request.get_tokens(0)), False)
        assert scheduler.stats()["host_leased_blocks"] == num_offered // engine.block_tokens
        assert not scheduler.reset_cache()
        engine.limit_host(num_offered // engine.block_tokens + 2)
        evict(engine, "offered")
        leased = scheduler._live[10**6].offered_ids
        nodes = scheduler._half.tree.match(scheduler._live[10**6].block_hashes[: len(leased)])
        assert scheduler._half.host.blocks_of(nodes) == leased
        assert not scheduler.request_finished(request, [])
        assert scheduler.stats()["host_leased_blocks"] == 0


def test_an_offer_that_is_given_back_is_leased_no_more() -> None:
    with running(Options()) as engine:
        scheduler, request = about_to_be_offered(engine, "given back")
        num_offered, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.cancel_load(request, num_offered // 2, num_offered)
        assert scheduler.stats()["host_leased_blocks"] > 0
        scheduler.cancel_load(request, 0, num_offered)
        assert scheduler.stats()["host_leased_blocks"] == 0
        engine.check_idle()


def test_a_part_of_an_offer_is_loaded_where_blocks_for_no_more_are_there() -> None:
    """And what a step of such a request computes is believed to end too soon rather than too late."""
    with running(Options()) as engine:
        scheduler, request = about_to_be_offered(engine, "part")
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc_by_layer_group(request, [[3, 4]])
        scheduler.update_state_after_alloc_by_layer_group(request, [[3, 4, 5]])  # told with the step
        live = scheduler._live[10**6]
        data = SimpleNamespace(
            request_id=10**6,
            new_tokens=request.get_tokens(0),
            new_block_ids=[3, 4, 5],
            computed_position=0,
            num_scheduled_tokens=16,
        )
        assert live.scheduled(data) == (str(10**6), 0, 16, [[5]])
        plan = scheduler.build_connector_meta(SimpleNamespace(new_requests=[], cached_requests=[]))
        assert [job.device_ids.tolist() for job in plan.loads] == [[3, 4]]
        engine.shutdown()


def test_names_cover_salts_adapters_and_images() -> None:
    identity = CacheIdentity("model", "auto", "", 4)
    request = {"lora_task_id": None, "cache_salt": None, "cache_salt_id": None, "multimodal_hashes": None}
    picture = {"multimodal_hashes": [[1] * 8], "multimodal_positions": [2], "multimodal_lengths": [3]}
    kinds = [{}, {"cache_salt": "mine"}, {"cache_salt_id": 7}, {"lora_task_id": 7}, picture]
    kinds.append(picture | {"multimodal_hashes": [[2] * 8]})

    def name(kind: dict[str, Any], hasher: PromptHasher) -> bytes:
        return hasher.start(SimpleNamespace(**request | kind)).update([5, 6, 7, 8])[0]

    hashers = [PromptHasher(identity, 4) for _ in range(2)]
    assert len({name(kind, hashers[0]) for kind in kinds}) == len(kinds)
    same = [name(kind, hashers[0]) == name(kind, hashers[1]) for kind in kinds]
    assert same == [True, True, True, False, True, True], "the number of an adapter means nothing to another start"


def test_images_without_a_hash_are_neither_saved_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt has placeholders for them, the same for every image."""
    with running(Options()) as engine:
        engine.generate(prompts(engine, 1, seed="before"))
        (prompt,) = asked = prompts(engine, 1, seed="image")
        num_cached = engine.stats()["host_cached_blocks"]
        with monkeypatch.context() as patch:
            patch.setattr(LlmRequest, "py_multimodal_data", {"image": "pixels"}, raising=False)
            engine.generate(asked)
            assert engine.stats()["host_cached_blocks"] == num_cached
        engine.llm.call(lambda executor: executor.kv.reset())
        engine.generate(asked)
        assert engine.stats()["host_cached_blocks"] > num_cached
        scheduler = scheduler_of(engine.llm.ranks[0])
        request = SimpleNamespace(request_id=10**6, get_tokens=lambda beam: prompt, py_multimodal_data={"image": 1})
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "TRTLLM_KV_CONNECTOR="),
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ('{"host_memroy": "1GiB"}', "host_memroy"),
        ('{"host_memory": "1GiB", "load_choice": "async"}', "load_choice"),
        ('{"host_memory": "1GiB", "write_policy": "write_back"}', "write_policy"),
        ('{"host_memory": "1GiB", "peer": {"port": 7100}}', "peer"),
        ('{"host_memory": "1GiB", "storage": {"path": "/x", "capacity": "1GiB", "prefetch": "timeout"}}', "prefetch"),
    ],
)
def test_settings_that_the_slot_has_no_use_for(settings: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, settings)
    with pytest.raises(ConfigError, match=said):
        read_settings()


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"max_beam_width": 4},
        {"enable_attention_dp": True},
        {"speculative_config": object()},
        {"cache_transceiver_config": SimpleNamespace(backend="UCX")},
        {"kv_cache_config": SimpleNamespace(host_cache_size=1 << 30)},
        {"kv_cache_config": SimpleNamespace(max_attention_window=[4096])},
        {"kv_cache_config": SimpleNamespace(dtype="nvfp4")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_engines_that_are_not_served(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        refuse_unsupported(llm_args(Options(), **settings))


def test_blocks_of_another_size_than_was_asked_for() -> None:
    """Attention kernels may change it behind the settings: nothing is loaded or saved then under wrong names."""
    with running(Options()) as engine:
        scheduler = scheduler_of(engine.llm.ranks[0])
        request = SimpleNamespace(request_id=10**6, get_tokens=lambda beam: list(range(40)))
        with pytest.raises(ConfigError, match="tokens_per_block"):
            scheduler.update_state_after_alloc(request, [1])
        request.request_id += 1
        with pytest.raises(KVConnectorError, match="window"):
            scheduler.update_state_after_alloc(request, [1, -1, 2])
        worker: TieredKVWorker = worker_of(engine.llm.ranks[0])
        with pytest.raises(ConfigError, match="FlashMLA"):
            worker.register_kv_caches(torch.zeros(4, 2, 1, 64))
        layout = SimpleNamespace(tokens_per_block=32, groups=[])
        with pytest.raises(ConfigError, match="give 32"):
            worker.register_kv_cache_layout(layout)
        window = SimpleNamespace(window_size=512)
        with pytest.raises(ConfigError, match="full attention"):
            worker.register_kv_cache_layout(SimpleNamespace(tokens_per_block=16, groups=[window]))


def test_the_module_needs_no_engine() -> None:
    """Nor does it look for one."""
    code = "import sys, kv_connector.engines.tensorrt_llm; sys.exit('tensorrt_llm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
