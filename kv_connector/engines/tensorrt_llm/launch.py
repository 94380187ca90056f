"""What TensorRT-LLM's settings mean for the halves; refuses at start-up what is not supported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ...config import Config, Prefetch
from ...errors import ConfigError
from ..settings import Slot, read_config

VARIABLE = "TRTLLM_KV_CONNECTOR"
"""Of the environment: TensorRT-LLM has no field for a connector's own settings, and hands variables that begin with
TRTLLM or TLLM on to the processes of its ranks."""

_SLOT = Slot(
    engine="TensorRT-LLM",
    unit="blocks",
    example=f"""set {VARIABLE}='{{"host_memory": "64GiB"}}' (all ranks together)""",
    why_no_peer="TensorRT-LLM hands blocks over itself: leave it out, and see its cache transceiver",
    why_no_async="TensorRT-LLM has no way to hear that a load has failed that a request waits for: leave it out",
    prefetches=(Prefetch.BEST_EFFORT,),
    why_no_wait="TensorRT-LLM asks once and cannot be told to wait: leave it out, and what storage has is fetched for "
    "those that come later",
)
"""TensorRT-LLM asks once, with its block manager locked and all ranks waiting: nobody waits for storage then."""


def read_settings() -> Config:
    """From the environment. Raises ConfigError, naming the fix, for what is unknown or of no use to this slot."""
    text = os.environ.get(VARIABLE, "")
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={text!r} is not JSON: {error}; {_SLOT.example}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{VARIABLE}={text!r} is not an object: {_SLOT.example}")
    return read_config(given, _SLOT)


def read_block_size(llm_args: Any) -> int:
    """Tokens of a block, as they were asked for; the worker checks that the cache has been made so."""
    return int(llm_args.kv_cache_config.tokens_per_block)


def waits_up_front(llm_args: Any) -> bool:
    """Whether a forward pass may be replayed or compiled, so that no hook says which layer it is at."""
    return any(getattr(llm_args, name, None) is not None for name in ("cuda_graph_config", "torch_compile_config"))


def refuse_unsupported(llm_args: Any) -> None:
    """Raises ConfigError, naming the reason and what would help. `llm_args`: TensorRT-LLM's TorchLlmArgs."""
    for name, why in (
        ("pipeline_parallel_size", "stages of a pipeline do not agree on what is loaded"),
        ("context_parallel_size", "a block's tokens are on several ranks"),
        ("max_beam_width", "beams share blocks that differ later"),
    ):
        value = getattr(llm_args, name, None) or 1
        if value > 1:
            raise ConfigError(f"{name}={value} is not supported, as {why}: give 1")
    if getattr(llm_args, "enable_attention_dp", False):
        raise ConfigError("enable_attention_dp=True is not supported yet, as its ranks schedule apart: give False")
    if getattr(llm_args, "speculative_config", None) is not None:
        raise ConfigError("speculative_config: the cache of a draft model is not kept yet: leave it out")
    if getattr(getattr(llm_args, "cache_transceiver_config", None), "backend", None):
        raise ConfigError("cache_transceiver_config: blocks in transfer may be reused too early: leave it out")
    cache = llm_args.kv_cache_config
    if getattr(cache, "host_cache_size", None):
        raise ConfigError(
            f"kv_cache_config.host_cache_size={cache.host_cache_size}: with it a block id may not name a "
            "block on the device: give 0, this connector is the host tier"
        )
    if getattr(cache, "max_attention_window", None):
        raise ConfigError(
            f"kv_cache_config.max_attention_window={cache.max_attention_window}: sliding windows are not supported "
            "yet: leave it out, or start without kv_connector_config"
        )
    if "nvfp4" in str(getattr(cache, "dtype", "")).lower():
        raise ConfigError("kv_cache_config.dtype='nvfp4': the connector is not given its scales: give 'fp8'")
