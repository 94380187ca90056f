"""Sizes of engines whose ranks share out a context, the groups of their layers, and what vLLM makes of both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)

from integration.models import tiny
from integration.tests.vllm_engines import transfer_config

KEEPS_COPIES = hasattr(kv_cache_utils, "resolve_dcp_kv_block_size")
"""Whether ranks of prefill context parallel have copies of one another's rows; older ones share them out."""
BLOCK_SIZE = 16
"""Tokens of a block on one rank."""


@dataclass(frozen=True)
class Sizes:
    """Of an engine: tensor, decode context and prefill context parallel, and tokens of a run on one rank."""

    tensor: int = 2
    decode: int = 2
    prefill: int = 1
    interleave: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.prefill

    @property
    def num_parts(self) -> int:
        """Of a block's tokens."""
        return self.decode if KEEPS_COPIES else self.decode * self.prefill

    @property
    def span(self) -> int:
        """Tokens of a block over all ranks."""
        return BLOCK_SIZE * self.num_parts

    def part(self, rank: int) -> int:
        """Which of the parts lies on a rank, as vLLM's `initialize_model_parallel` makes the groups."""
        prefill_rank, tensor_rank = divmod(rank, self.tensor)
        if not KEEPS_COPIES:
            return prefill_rank * self.decode + tensor_rank % self.decode
        if self.decode == 1 or self.prefill == 1:
            return tensor_rank % self.decode
        return rank if self.decode == self.world_size else prefill_rank


@dataclass(frozen=True)
class Group:
    """Layers that share a block table; `is_shared_out` where ranks have a part of each block, else copies. Attention is
    local to chunks of `chunk` tokens, or to the last `window`, if there are any. `is_latent`: MLA. A layer keeps a row
    for so many tokens as `tokens_per_row` says, one for each layer."""

    is_shared_out: bool = True
    chunk: int | None = None
    is_latent: bool = False
    num_layers: int = 2
    window: int | None = None
    block_size: int = BLOCK_SIZE
    tokens_per_row: tuple[int, ...] = ()

    def first_read(self, position: int) -> int:
        """Of the positions whose rows the token at this one reads."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk is not None else 0

    def tokens_of_row(self, layer: int) -> int:
        """Of one of its layers."""
        return self.tokens_per_row[layer] if self.tokens_per_row else 1


def groups_of(entries: Sequence[KVCacheGroupSpec]) -> tuple[Group, ...]:
    """What vLLM has made of a model's layers."""
    groups = []
    for entry in entries:
        layers: list[Any] = [*getattr(entry.kv_cache_spec, "kv_cache_specs", {"": entry.kv_cache_spec}).values()]
        (window,) = {getattr(spec, "sliding_window", None) for spec in layers}
        rows = tuple(spec.tokens_per_state for spec in layers)
        groups.append(Group(window=window, block_size=entry.kv_cache_spec.block_size, tokens_per_row=rows))
    return tuple(groups)


def config_of(folder: Path, sizes: Sizes, settings: Mapping[str, Any]) -> Any:
    """vLLM's configuration of such an engine. On a CPU it refuses prefill context parallel, which is set behind it."""
    config = EngineArgs(
        model=str(tiny.write_weights("dense", folder)),
        hf_overrides={"num_key_value_heads": 1},
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=192,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        enforce_eager=True,
        tensor_parallel_size=sizes.tensor if sizes.prefill == 1 else 1,
        decode_context_parallel_size=sizes.decode if sizes.prefill == 1 else 1,
        cp_kv_cache_interleave_size=sizes.interleave,
        distributed_executor_backend="mp",
        kv_transfer_config=transfer_config(dict(settings), kv_load_failure_policy="recompute"),
    ).create_engine_config()
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.decode_context_parallel_size = sizes.tensor, sizes.decode
    parallel.prefill_context_parallel_size, parallel.world_size = sizes.prefill, sizes.world_size
    return config


def entries_of(groups: Sequence[Group]) -> list[KVCacheGroupSpec]:
    """vLLM's groups of such layers."""
    numbers = itertools.count()
    entries = []
    for group in groups:
        own: dict[str, Any] = {} if group.is_shared_out else {"dcp_sharded": False}
        own |= {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        spec: Any
        if group.chunk is None:
            spec = (MLAAttentionSpec if group.is_latent else FullAttentionSpec)(**own)
        else:
            spec = ChunkedLocalAttentionSpec(attention_chunk_size=group.chunk, **own)
        entries.append(KVCacheGroupSpec([f"layers.{next(numbers)}" for _ in range(group.num_layers)], spec))
    return entries


def cache_of(config: Any, entries: list[KVCacheGroupSpec], num_blocks: int) -> tuple[KVCacheConfig, int, int]:
    """The cache of each rank, and what a step's blocks and a hash have of tokens, as vLLM's core finds them."""
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=entries)
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
    if hasattr(cache, "hash_block_size"):
        cache.hash_block_size = hash_size
    return cache, scheduler_size, hash_size
