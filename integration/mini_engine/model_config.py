"""Shape of a model of the mini engine, under the names of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .kv_layout import CacheShape, KVDtype, KVLayout


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama; the defaults are a tiny one for tests. The last group are variants of its KV cache.

    kv_dtype: `auto` caches in the model's dtype, `fp8` caches float8_e4m3fn with an fp32 scale per token and head.
    kv_layout: `NHD` (blocks, 2, block_size, heads, head_dim), `split` (2, blocks, block_size, heads, head_dim) or
        `HND` (blocks, heads, block_size, 2 * head_dim).
    key_only: one latent of one head is cached per layer, (blocks, block_size, head_dim), and serves as key and as
        value; as with MLA every tensor-parallel rank holds the whole of it.
    num_draft_layers: layers with a cache of their own that run behind the main ones on their last hidden state.
    tp_size: simulated tensor-parallel ranks, among which heads are divided.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096

    kv_dtype: KVDtype = "auto"
    kv_layout: KVLayout = "NHD"
    key_only: bool = False
    num_draft_layers: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads or self.num_attention_heads % self.tp_size:
            raise ValueError(f"{self.num_attention_heads} heads do not divide among KV heads or ranks")
        if self.key_only and self.num_key_value_heads != 1:
            raise ValueError(f"key_only needs num_key_value_heads=1, not {self.num_key_value_heads}")
        if not self.key_only and self.num_key_value_heads % self.tp_size:
            raise ValueError(f"{self.num_key_value_heads} KV heads do not divide among {self.tp_size} ranks")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **variants: Any) -> ModelConfig:
        """From the content of a Llama's `config.json`; `variants` are fields of this class that it does not know."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type {rope['rope_type']!r} is not supported, only 'default'")
        known = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        known.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
        known.setdefault("head_dim", known["hidden_size"] // known["num_attention_heads"])
        return replace(cls(**known), **variants)

    @property
    def num_q_heads_per_rank(self) -> int:
        """Query heads of one rank."""
        return self.num_attention_heads // self.tp_size

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the cached layers in the order of the forward pass."""
        main = (f"layers.{i}" for i in range(self.num_hidden_layers))
        return (*main, *(f"draft.{i}" for i in range(self.num_draft_layers)))

    @property
    def cache_shape(self) -> CacheShape:
        """Form of one layer's cache on one rank."""
        num_heads = 1 if self.key_only else self.num_key_value_heads // self.tp_size
        return CacheShape(num_heads, self.head_dim, self.kv_layout, self.kv_dtype, self.key_only)
