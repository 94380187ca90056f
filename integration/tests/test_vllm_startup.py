"""What a user reads when the settings or the model are not supported: one error at start-up, with the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from integration.tests.vllm_engines import BLOCK_SIZE, CONNECTOR, prompts, running, transfer_config, vllm_version
from kv_connector.engines.vllm import TieredKVConnector
from kv_connector.engines.vllm.groups import TELLS_STATES, num_replicas, read_groups, to_block_group
from kv_connector.engines.vllm.specs import read_config, read_shape
from kv_connector.engines.vllm.steps import TELLS_FAILED_REQUESTS
from kv_connector.errors import ConfigError
from kv_connector.index import BlockGroup


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


def test_bad_settings_are_named_before_anything_is_started() -> None:
    """Where CUDA graphs are full, vLLM asks this of the class while it reads its own options."""
    with pytest.raises(ConfigError, match="did you mean 'host_memory'"):
        TieredKVConnector.requires_piecewise_for_cudagraph({"host_memry": "1GiB"})
    assert not TieredKVConnector.requires_piecewise_for_cudagraph({"host_memory": "1GiB"})


def test_host_memory_has_no_default(tmp_path: Path) -> None:
    assert 'such as {"host_memory": "64GiB"}' in refusal(tmp_path, kv_transfer_config=CONNECTOR)


def test_prefix_caching_is_needed(tmp_path: Path) -> None:
    assert "leave prefix caching on" in refusal(tmp_path, enable_prefix_caching=False)


def test_data_parallel_engines_listen_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are given the same settings; two of three ranks each have ports 7100 to 7105."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    settings = {"host_memory": 1, "peer": {"port": 7100, "secret": "0123456789abcdef"}}
    transfer = SimpleNamespace(kv_connector_extra_config=settings, kv_role="kv_both")
    for index, port in ((0, 7100), (1, 7103)):
        parallel = SimpleNamespace(data_parallel_index=index, world_size=3)
        config = read_config(SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel))
        assert config.peer is not None
        assert config.peer.port == port


@pytest.mark.skipif(TELLS_FAILED_REQUESTS, reason="served with vLLM 0.32 and newer")
@pytest.mark.parametrize("model", ["windows", "windows_alone"])
def test_kv_transfers_of_windows_need_a_newer_vllm(tmp_path: Path, model: str, stable_hashes: None) -> None:
    settings = transfer_config({"peer": {"secret": "0123456789abcdef"}})
    assert "needs vLLM 0.32 or newer" in refusal(tmp_path, model, num_blocks=160, kv_transfer_config=settings)


COMMON = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def spec_of(name: str, **options: Any) -> Any:
    spec_class = getattr(kv_cache_interface, name, None)
    if spec_class is None:
        pytest.skip("this vLLM does not have it")
    return spec_class(**options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("RSWASpec", {"rswa_window": 64}, "drops blocks from the middle of a request"),
        ("HiddenStateCacheSpec", {}, "holds hidden states"),
    ],
)
def test_kinds_of_attention_that_are_not_served(name: str, options: dict[str, Any], words: str) -> None:
    """Alone and beside plain attention in one group; some of them are derived from what is supported."""
    spec, plain = spec_of(name, **COMMON, **options), kv_cache_interface.FullAttentionSpec(**COMMON)
    assert to_block_group(KVCacheGroupSpec(["a"], plain), BLOCK_SIZE, BLOCK_SIZE).window_blocks is None
    both = UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs={"a": plain, "b": spec})
    for group in (KVCacheGroupSpec(["b"], spec), KVCacheGroupSpec(["a", "b"], both)):
        with pytest.raises(ConfigError, match=f"{name} is not supported: .*{words}"):
            to_block_group(group, BLOCK_SIZE, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("FullAttentionSpec", {}, BlockGroup()),
        ("MLAAttentionSpec", {}, BlockGroup()),
        ("SinkFullAttentionSpec", {"sink_len": 32}, BlockGroup()),
        ("SlidingWindowSpec", {"sliding_window": 65}, BlockGroup(2)),
        ("SlidingWindowMLASpec", {"sliding_window": 66}, BlockGroup(3)),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 128}, BlockGroup(chunk_blocks=4)),
    ],
)
def test_kinds_of_attention_that_are_served(name: str, options: dict[str, Any], expected: BlockGroup) -> None:
    group = KVCacheGroupSpec(["a"], spec_of(name, **COMMON, **options))
    assert to_block_group(group, BLOCK_SIZE, BLOCK_SIZE) == expected
    smaller = to_block_group(group, BLOCK_SIZE, BLOCK_SIZE // 4)
    assert smaller == replace(expected, hashes_per_block=4)
    with pytest.raises(ConfigError, match="make --block-size a multiple"):
        to_block_group(group, BLOCK_SIZE, BLOCK_SIZE - 1)


def test_chunks_end_with_blocks() -> None:
    spec = spec_of("ChunkedLocalAttentionSpec", **COMMON, attention_chunk_size=48)
    with pytest.raises(ConfigError, match=r"chunks of 48 tokens.*blocks of 32: make --block-size a divisor"):
        to_block_group(KVCacheGroupSpec(["a"], spec), BLOCK_SIZE, BLOCK_SIZE)


DENSE, LATENT = ("FullAttentionSpec", {}), ("MLAAttentionSpec", {})
WINDOW, LATENT_WINDOW = (
    ("SlidingWindowSpec", {"sliding_window": 65}),
    ("SlidingWindowMLASpec", {"sliding_window": 65}),
)


@pytest.mark.parametrize(
    ("kinds", "options", "expected"),
    [
        ([LATENT], {}, 8),
        ([LATENT, LATENT_WINDOW], {}, 8),
        ([LATENT, DENSE], {}, 1),
        ([LATENT], {"decode_context_parallel_size": 2}, 1),
        ([DENSE], {}, 4),
        ([DENSE, WINDOW], {}, 4),
        ([DENSE], {"heads": 8}, 1),
        ([DENSE], {"heads": 16, "heads_of_a_rank": 2}, 1),
        ([DENSE], {"architecture": "Gemma4ForCausalLM"}, 1),
        ([DENSE], {"speculative_config": "a draft model, which may have other heads"}, 1),
        ([DENSE], {"speculative_config": SimpleNamespace(method="ngram")}, 4),
        ([("HiddenStateCacheSpec", {})], {}, 1),
    ],
)
def test_how_many_ranks_of_eight_hold_the_same(
    kinds: list[tuple[str, dict[str, Any]]], options: dict[str, Any], expected: int
) -> None:
    """All of latents; of two heads of keys and values four each, where every layer is known to have as many."""
    own = COMMON | {"num_kv_heads": options.get("heads_of_a_rank", 1)}
    groups = [KVCacheGroupSpec([name], spec_of(name, **own, **more)) for name, more in kinds]
    context = options.get("decode_context_parallel_size", 1)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=8, decode_context_parallel_size=context),
        model_config=SimpleNamespace(
            architectures=[options.get("architecture", "Qwen3MoeForCausalLM")],
            get_total_num_kv_heads=lambda: options.get("heads", 2),
        ),
        speculative_config=options.get("speculative_config"),
    )
    found: Any = config
    assert num_replicas(SimpleNamespace(kv_cache_groups=groups), found) == expected  # type: ignore[arg-type]


def test_recurrent_states_are_served_where_vllm_says_which_block_holds_which() -> None:
    def group(mode: str) -> KVCacheGroupSpec:
        options = {"block_size": 64, "shapes": ((3, 8),), "dtypes": (torch.float32,), "mamba_cache_mode": mode}
        return KVCacheGroupSpec(["a"], spec_of("MambaSpec", **options))

    if not TELLS_STATES:
        with pytest.raises(ConfigError, match=r"MambaSpec is not supported: .*vLLM 0.32 and newer do"):
            to_block_group(group("align"), 64, 32)
        return
    assert to_block_group(group("align"), 64, 32) == BlockGroup(1, 2, states_are_told=True)
    with pytest.raises(ConfigError, match="mamba_cache_mode=none vLLM itself caches no prefixes"):
        to_block_group(group("none"), 64, 32)


def vllm_config_of(decode: int = 1, **cache: Any) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=decode, prefill_context_parallel_size=1)
    return SimpleNamespace(parallel_config=parallel, cache_config=SimpleNamespace(**cache))


def config_of(*specs: Any, hash_block_size: int | None = None) -> Any:
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=hash_block_size)


def test_groups_are_read_in_our_order_with_blocks_of_their_own_size() -> None:
    window = spec_of("SlidingWindowSpec", **COMMON | {"block_size": 64}, sliding_window=100)
    full = spec_of("FullAttentionSpec", **COMMON)
    size, served = read_groups(config_of(window, full, hash_block_size=16), vllm_config_of())
    assert size == 16
    assert [(entry.group_id, entry.group) for entry in served] == [(1, BlockGroup(None, 2)), (0, BlockGroup(2, 4))]
    with pytest.raises(ConfigError, match=r"\[32, 64\] tokens in one model are supported with vLLM 0.32"):
        read_groups(config_of(window, full), vllm_config_of())
    with pytest.raises(ConfigError, match=r"\[16, 32\] tokens in one model are supported with vLLM 0.32"):
        read_groups(config_of(full, full), vllm_config_of(hash_block_size=16))


def test_what_vllm_does_without_behind_its_own_hits_is_left_out() -> None:
    """Rings of rows that are still to be compressed are empty where a hit ends."""
    full, ring = spec_of("FullAttentionSpec", **COMMON), spec_of("CircularBufferSpec", **COMMON | {"block_size": 8})
    size, served = read_groups(config_of(ring, full, hash_block_size=BLOCK_SIZE), vllm_config_of())
    assert [(entry.group_id, entry.group) for entry in served] == [(1, BlockGroup())]
    longer = spec_of("CircularBufferSpec", **COMMON | {"block_size": 48})
    with pytest.raises(ConfigError, match=r"'layer 0': blocks of 48 tokens.*multiples of 32"):
        read_groups(config_of(longer, full, hash_block_size=size), vllm_config_of())
    with pytest.raises(ConfigError, match="vLLM caches no prefixes of this model"):
        read_groups(config_of(ring, hash_block_size=8), vllm_config_of())


@pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer")
def test_ranks_that_share_out_a_context_have_whole_states_and_blocks_of_as_many_tokens_more() -> None:
    """Two ranks, each with a part of attention's blocks: 64 tokens, where a state has 32."""
    full = spec_of("FullAttentionSpec", **COMMON)
    own = {"shapes": ((3, 8),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    state = spec_of("MambaSpec", block_size=BLOCK_SIZE, **own)
    size, served = read_groups(config_of(state, full, hash_block_size=BLOCK_SIZE), vllm_config_of(decode=2))
    assert size == BLOCK_SIZE
    assert [(entry.group_id, entry.group) for entry in served] == [
        (1, BlockGroup(None, 2)),
        (0, BlockGroup(1, 1, states_are_told=True)),
    ]
    ring = spec_of("CircularBufferSpec", **COMMON | {"block_size": 64, "dcp_sharded": False})
    assert read_groups(config_of(ring, full, hash_block_size=64), vllm_config_of(decode=2))[0] == 64
    with pytest.raises(ConfigError, match=r"blocks of 64 tokens.*multiples of 32"):
        read_groups(config_of(ring, full, hash_block_size=BLOCK_SIZE), vllm_config_of())


@pytest.mark.skipif(not TELLS_STATES, reason="older versions are asked in another way")
@pytest.mark.parametrize(("is_hybrid", "block_major", "layout"), [(0, 1, "BLNHC"), (0, 0, None), (1, 1, None)])
def test_layers_are_wanted_side_by_side_but_not_where_kernels_may_split_blocks(
    monkeypatch: pytest.MonkeyPatch, is_hybrid: int, block_major: int, layout: str | None
) -> None:
    """Beside recurrent states vLLM makes attention's blocks as large as those, and some backends split them: it refuses
    to start then where a block is not one run of bytes in each layer."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    settings = SimpleNamespace(
        kv_connector_extra_config={"host_memory": 1 << 20, "block_major": bool(block_major)}, kv_role="kv_both"
    )
    config: Any = SimpleNamespace(kv_transfer_config=settings, model_config=SimpleNamespace(is_hybrid=bool(is_hybrid)))
    assert TieredKVConnector.get_required_kvcache_layout(config) == layout


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
