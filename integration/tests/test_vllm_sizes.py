"""What `kv-connector size` reads from a config.json against what real vLLM makes of the same file: its groups of KV
cache and the bytes of their pages. No weights: models are made on the meta device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM is needed")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from integration.models import tiny, tiny_configs
from kv_connector.cli.size.blocks import to_blocks
from kv_connector.cli.size.layers import Engine, Kind, read_layers
from kv_connector.cli.size.model import read_model
from kv_connector.engines.vllm.groups import TELLS_STATES

pytestmark = pytest.mark.skipif(not TELLS_STATES, reason="groups are as in vLLM 0.32 and newer")

BLOCK_SIZE = 32
GEMMA4 = tiny_configs.CONFIGS["two_sizes"]
MADE = {name: config for name, config in tiny_configs.CONFIGS.items() if name != "compressed"}
"""Without the one whose layers vLLM makes on a GPU, or where the CPU has AMX."""
CONFIGS: dict[str, dict[str, Any]] = MADE | {
    "the last layers read what others keep": GEMMA4 | {"num_hidden_layers": 6, "num_kv_shared_layers": 3},
    "keys are values": GEMMA4 | {"attention_k_eq_v": True},
    "as many windows as not quite": tiny_configs.CONFIGS["sinks"]
    | {"num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    "no heads are shared": tiny_configs.CONFIGS["dense"] | {"num_key_value_heads": 4, "head_dim": 32},
}
KINDS = {
    "FullAttentionSpec": Kind.FULL,
    "MLAAttentionSpec": Kind.LATENT,
    "SlidingWindowSpec": Kind.WINDOW,
    "ChunkedLocalAttentionSpec": Kind.CHUNK,
    "MambaSpec": Kind.STATE,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of processes, of this one alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers import rotary_embedding

    folder = tmp_path_factory.mktemp("world")
    with set_current_vllm_config(vllm_config(tiny.write("delta", folder), 32)):  # it has experts
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    yield
    rotary_embedding._ROPE_DICT.clear()  # of models on the meta device, for others of this process
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels of some CPUs vLLM keeps states in float32, which no GPU asks for."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


def vllm_config(folder: Path, block_size: int, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=2048,
        block_size=block_size,
        enforce_eager=True,
        enable_prefix_caching=True,
        **options,
    ).create_engine_config()


def groups_of_vllm(config: Any) -> list[Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils

    with set_current_vllm_config(config):
        with torch.device("meta"):
            initialize_model(config)
        layers = {
            name: spec
            for name, layer in config.compilation_config.static_forward_context.items()
            if isinstance(layer, AttentionLayerBase)
            and getattr(layer, "kv_sharing_target_layer_name", None) is None  # as vLLM's runner asks them
            and (spec := layer.get_kv_cache_spec(config)) is not None
        }
        resolve_kv_cache_layout(config, [["LBNHC"]], list(layers.values()))
        (found,) = kv_cache_utils.get_kv_cache_configs(config, [layers], [1 << 30])
    return list(found.kv_cache_groups)


def shown(group: Any) -> tuple[Kind, int, int, int]:
    """Kind, tokens of a block, layers, and bytes of all of them."""
    spec = group.kv_cache_spec
    own = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
    wraps = hasattr(spec, "kv_cache_specs")
    num_bytes = spec.page_size_bytes if wraps else spec.page_size_bytes * len(group.layer_names)
    return KINDS[type(own).__name__], spec.block_size, len(group.layer_names), num_bytes


@pytest.mark.parametrize("name", CONFIGS.keys() - {"kimi"})  # for the CPU alone vLLM cannot configure it
def test_groups_and_bytes_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    """Block by block: kinds, tokens, layers and bytes of every group."""
    folder = written(name, tmp_path)
    config = vllm_config(folder, BLOCK_SIZE)
    theirs = sorted(map(shown, groups_of_vllm(config)), key=str)
    layers = read_layers(read_model(str(folder)), Engine("bfloat16", "bfloat16", 1))
    blocks = to_blocks(layers, config.cache_config.block_size)  # of a latent cache the CPU's kernels want 16
    pages = blocks.block_bytes // max(group.num_layers for group in blocks.groups)
    ours = [(g.kind, g.block_tokens, g.num_layers, pages * g.num_layers) for g in blocks.groups]
    assert sorted(ours, key=str) == theirs


@pytest.mark.parametrize(("heads", "tp_size"), [(2, 1), (2, 2), (2, 4), (4, 2), (1, 4)])
def test_heads_of_a_rank_are_those_of_vllm(heads: int, tp_size: int, tmp_path: Path) -> None:
    """Where there are fewer heads than ranks, each has one."""
    values = tiny_configs.CONFIGS["dense"] | {"num_key_value_heads": heads}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = vllm_config(tmp_path, BLOCK_SIZE)
    config.parallel_config.tensor_parallel_size = tp_size
    per_rank = config.model_config.get_num_kv_heads(config.parallel_config)
    layers = read_layers(read_model(str(tmp_path)), Engine("bfloat16", "bfloat16", tp_size))
    assert {layer.token_bytes for layer in layers} == {2 * per_rank * values["head_dim"] * 2}


def written(name: str, folder: Path) -> Path:
    if name in tiny_configs.CONFIGS:
        return Path(tiny.write(name, folder))
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder
