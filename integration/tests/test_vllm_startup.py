"""What a user reads when the settings or the model are not served: one error at start-up, with the fix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from integration.tests.vllm_engines import BLOCK_SIZE, CONNECTOR, prompts, running, transfer_config, vllm_version
from kv_connector.engines.vllm.specs import read_shape, refuse_unsupported, to_block_group
from kv_connector.errors import ConfigError


def refusal(folder: Path, model: str = "dense", **options: Any) -> str:
    """What start-up says, in older versions by way of a worker's process."""
    with pytest.raises((ConfigError, RuntimeError)) as error, running(folder, model, **options):
        pass
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_memory": 0}, "give kv_connector_extra_config a size"),
        ({"host_memory": "64 gallons"}, 'text such as "16GiB"'),
        ({"host_memry": "1GiB"}, "did you mean 'host_memory'?"),
        ({"write_policy": "never"}, "'write_through_selective'"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, kv_transfer_config=transfer_config(settings))


def test_host_memory_has_no_default(tmp_path: Path) -> None:
    assert 'such as {"host_memory": "64GiB"}' in refusal(tmp_path, kv_transfer_config=CONNECTOR)


def test_prefix_caching_is_needed(tmp_path: Path) -> None:
    assert "leave prefix caching on" in refusal(tmp_path, enable_prefix_caching=False)


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_ways_of_being_parallel_that_are_not_served(name: str) -> None:
    """vLLM's CPU backend has none of them: it would refuse them itself before the connector is made."""
    sizes = {"pipeline_parallel_size": 1, name: 2}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes), cache_config=SimpleNamespace(enable_prefix_caching=True)
    )
    with pytest.raises(ConfigError, match=f"{name}=2 is not supported"):
        refuse_unsupported(config)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("RSWASpec", {"rswa_window": 64}, "drops blocks from the middle of a request"),
        ("SinkFullAttentionSpec", {"sink_len": 32}, "only full attention"),
        ("HiddenStateCacheSpec", {}, "holds hidden states"),
        ("SlidingWindowMLASpec", {"sliding_window": 64}, "only full attention"),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64}, "only full attention"),
    ],
)
def test_kinds_of_attention_that_are_not_served(name: str, options: dict[str, Any], words: str) -> None:
    """Alone and beside plain attention in one group; some of them are derived from what is served."""
    spec_class = getattr(kv_cache_interface, name, None)
    if spec_class is None:
        pytest.skip("this vLLM does not have it")
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec, plain = spec_class(**common, **options), kv_cache_interface.FullAttentionSpec(**common)
    assert to_block_group(KVCacheGroupSpec(["a"], plain)).window_blocks is None
    both = UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs={"a": plain, "b": spec})
    for group in (KVCacheGroupSpec(["b"], spec), KVCacheGroupSpec(["a", "b"], both)):
        with pytest.raises(ConfigError, match=f"{name} is not supported: .*{words}"):
            to_block_group(group)


def test_an_engine_without_a_kv_cache_is_told_to_leave_the_connector_out() -> None:
    """The encoder of a multimodal model that was given the settings of the others; vLLM caches no prefixes there."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), cache_config=SimpleNamespace(enable_prefix_caching=False)
    )
    with pytest.raises(ConfigError, match="start it without --kv-transfer-config"):
        read_shape(config, SimpleNamespace(kv_cache_groups=[]))


def test_the_short_name_alone_is_enough(tmp_path: Path) -> None:
    """The plugin registers it, so that the module's path can be left out."""
    config = transfer_config({"write_policy": "write_through"})
    del config["kv_connector_module_path"]
    with running(tmp_path, kv_transfer_config=config) as engine:
        engine.alone(prompts(1))
        assert engine.stats()["saved_blocks"] == 13


def test_several_connectors_share_an_engine(tmp_path: Path) -> None:
    """Under vLLM's MultiConnector the first one with a hit loads, and all save."""
    ours = transfer_config({"write_policy": "write_through"})
    del ours["kv_connector_module_path"]
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, ours]},
    }
    asked = prompts(4)
    with running(tmp_path, kv_transfer_config=both) as engine:
        if vllm_version().startswith("0.20"):
            with pytest.raises(ConfigError, match="MultiConnector before"):
                engine.alone(asked)
            return
        rounds = [engine.alone(asked) for _ in range(3)]
        children = engine.scheduler.connector._connectors
        first, second = (child._scheduler.half.get_kv_connector_stats() for child in children)
        engine.drain()
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert all(answers == rounds[0] for answers in rounds)
    assert first["host_hit_tokens"] == 2 * 4 * 13 * BLOCK_SIZE
    assert first["saved_blocks"] == second["saved_blocks"] == 4 * 13
    assert second["host_hit_tokens"] == 0
