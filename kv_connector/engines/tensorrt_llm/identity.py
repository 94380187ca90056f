"""What decides the bytes of TensorRT-LLM's KV cache: settings and weights once at start, tokens and more by request.

TensorRT-LLM's own block hashes have 64 bits, and only one of its two cache managers tells them. So tokens are hashed
here, under a root of identity, salt and adapter.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from typing import Any

from ...index import BlockHasher, CacheIdentity, MultimodalItem, root_hash
from ...types import BlockHash
from ..weights import named_weights

_DECIDES_NOTHING = {
    *("kv_connector_config", "scheduler_config", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "revision"),
    *("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "enable_chunked_prefill", "mpi_session"),
    *("disable_overlap_scheduler", "batched_logits_processor", "return_perf_metrics", "iter_stats_max_iterations"),
    *("postprocess_tokenizer_dir", "num_postprocess_workers", "print_iter_log", "enable_iter_perf_stats"),
    *("garbage_collection_gen0_threshold", "stream_interval", "telemetry_config", "perf_metrics_max_requests"),
    *("cuda_graph_config", "gpus_per_node"),
}
_CACHE_SETTINGS = ("dtype", "tokens_per_block")


def read_identity(llm_args: Any, block_size: int, num_ranks: int) -> CacheIdentity:
    """The identity of what this engine caches: the same on every rank of it."""
    import tensorrt_llm

    settings = {name: getattr(llm_args, name) for name in sorted(_fields(llm_args)) if name not in _DECIDES_NOTHING}
    cache = settings.pop("kv_cache_config", None)
    settings |= {f"kv_cache_config.{name}": getattr(cache, name, None) for name in _CACHE_SETTINGS}
    text = json.dumps(settings, sort_keys=True, default=repr)
    return CacheIdentity(
        model=f"{llm_args.model}@{getattr(llm_args, 'revision', None) or ''}",
        cache_dtype=f"{getattr(cache, 'dtype', 'auto')}/{getattr(llm_args, 'dtype', 'auto')}",
        layout="",
        block_size=block_size,
        tp_size=num_ranks,
        engine=f"tensorrt_llm {tensorrt_llm.__version__}",
        config=hashlib.sha256(text.encode()).hexdigest()[:32],
        weights=named_weights(
            str(llm_args.model), getattr(llm_args, "load_format", "auto"), getattr(llm_args, "revision", None)
        ),
    )


def read_backend(llm_args: Any) -> str:
    """What computes attention."""
    return str(getattr(llm_args, "attn_backend", ""))


def _fields(llm_args: Any) -> list[str]:
    return list(getattr(type(llm_args), "model_fields", None) or vars(llm_args))


class PromptHasher:
    """Makes the hasher of each request. `identity` is that of the engine."""

    def __init__(self, identity: CacheIdentity, block_size: int) -> None:
        self._identity = identity
        self._block_size = block_size
        self._nonce = secrets.token_hex(16)

    def start(self, request: Any) -> BlockHasher:
        """`request`: TensorRT-LLM's LlmRequest, of which this reads what its C++ side shows."""
        return BlockHasher(self._block_size, self._root(request), _items(request))

    def _root(self, request: Any) -> BlockHash:
        """An adapter is known by a number that a user gave to it, so what it has computed is for this start alone."""
        adapter, salt = getattr(request, "lora_task_id", None), getattr(request, "cache_salt", None)
        salt_id = getattr(request, "cache_salt_id", None)
        return root_hash(
            self._identity,
            None if adapter is None else f"{adapter} {self._nonce}",
            salt if salt is not None or salt_id is None else f"number {salt_id}",
        )


def is_named(request: Any) -> bool:
    """Whether tokens, salt and adapter, and the hashes of its images, are all that decides a request's blocks. Only
    TensorRT-LLM's Python side shows images that it has not hashed."""
    return bool(getattr(request, "multimodal_hashes", None)) or not getattr(request, "py_multimodal_data", None)


def _items(request: Any) -> list[MultimodalItem]:
    hashes = getattr(request, "multimodal_hashes", None) or ()
    if not hashes:
        return []
    starts, lengths = request.multimodal_positions, request.multimodal_lengths
    named = [b"".join(struct.pack("<q", word) for word in words) for words in hashes]
    return [MultimodalItem(*item) for item in zip(named, starts, lengths, strict=True)]
