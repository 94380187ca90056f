"""What each layer of a model keeps of a token or of a request, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...errors import ConfigError
from .model import BYTES, ModelConfig
from .states import STATE_BYTES

_WINDOWS_EVERYWHERE = {"mistral", "mixtral", "ministral"}
"""Families of which `sliding_window` means every layer."""
_PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Families in which, where layers are not listed, all but every n-th have windows."""
_UNKNOWN = ("compress_ratios", "attn_type_list", "rwkv", "layers_block_type", "block_configs", "hybrid_layer_pattern")
"""Keys of families whose caches are not known here: what is not known is not guessed."""


class Kind(Enum):
    """How a layer remembers."""

    FULL = "full attention"
    LATENT = "latent attention (MLA)"
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class Layer:
    """`token_bytes`: of each token; 0 for states. `state_bytes`: of a state. `span`: tokens of a window or chunk."""

    kind: Kind
    token_bytes: int = 0
    state_bytes: int = 0
    span: int = 0


@dataclass(frozen=True, slots=True)
class Engine:
    """How a model is run. `dtype`: of the model; `cache_dtype`: of keys and values; `tp_size`: its ranks."""

    dtype: str
    cache_dtype: str
    tp_size: int


def read_layers(model: ModelConfig, engine: Engine) -> list[Layer]:
    """All layers with a cache of their own, in their order, as one rank has them. Raises ConfigError for families that
    are not known and for what is missing."""
    strange = [key for key in _UNKNOWN if model.values.get(key) is not None]
    if strange:
        raise ConfigError(
            f"{model.path}: caches of models with {', '.join(strange)} (model_type {model.model_type!r}) are not known "
            "here: see what the engine logs for its KV cache"
        )
    kinds = _kinds(model)
    shared = model.optional("num_kv_shared_layers") or 0
    kinds = kinds[: len(kinds) - shared]  # the last ones read what others keep
    layers = []
    for kind in kinds:
        if kind is not None:
            layers += _layers(kind, model, engine)
    if not layers:
        raise ConfigError(f"{model.path}: no layer of it has a cache")
    return layers


def _layers(kind: Kind, model: ModelConfig, engine: Engine) -> list[Layer]:
    if kind is Kind.STATE:
        return [Layer(kind, state_bytes=STATE_BYTES[model.model_type](model, engine.dtype, engine.tp_size))]
    number = BYTES[engine.cache_dtype]
    if model.optional("kv_lora_rank"):
        latent = Layer(Kind.LATENT, (model.integer("kv_lora_rank") + model.integer("qk_rope_head_dim")) * number)
        return [latent, *_indexer(model)]
    span = {Kind.WINDOW: "sliding_window", Kind.CHUNK: "attention_chunk_size"}.get(kind)
    heads, head_dim = _heads(kind, model)
    per_rank = max(1, heads // engine.tp_size)
    return [Layer(kind, 2 * per_rank * head_dim * number, span=model.integer(span) if span else 0)]


def _indexer(model: ModelConfig) -> list[Layer]:
    """Of sparse latent attention (DeepSeek V3.2): keys of fp8 with a scale of four bytes for 128 of them."""
    if not model.optional("index_topk"):
        return []
    dim = model.integer("index_head_dim")
    return [Layer(Kind.LATENT, dim + dim // 128 * 4)]


def _heads(kind: Kind, model: ModelConfig) -> tuple[int, int]:
    """Heads of keys and values, of all ranks, and the numbers of a head."""
    num_heads = model.integer("num_attention_heads", "n_head", "num_heads", least=1)
    heads = model.optional("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num") or num_heads
    if model.get("multi_query") and not model.get("new_decoder_architecture"):
        heads = 1  # Falcon
    head_dim = model.optional("head_dim", "attention_head_dim") or model.hidden_size // num_heads
    if model.model_type in ("granitemoehybrid", "jamba"):
        head_dim = model.hidden_size // num_heads
    if kind is Kind.FULL and model.model_type.startswith("gemma4"):
        head_dim = model.optional("global_head_dim") or head_dim
        if model.get("attention_k_eq_v"):
            heads = model.optional("num_global_key_value_heads") or heads
    return heads, head_dim


def _kinds(model: ModelConfig) -> list[Kind | None]:
    """By layer; None where it has no cache."""
    number, family = model.num_layers, model.model_type
    if family in ("mamba", "mamba2", "falcon_mamba"):
        return [Kind.STATE] * number
    if pattern := model.get("hybrid_override_pattern"):
        return [{"M": Kind.STATE, "*": Kind.FULL}.get(letter) for letter in pattern]
    if recurrent := model.get("linear_attn_config"):
        states = {layer - 1 for layer in recurrent["kda_layers"]}  # counted from one
        return [Kind.STATE if layer in states else Kind.FULL for layer in range(number)]
    if family == "jamba":
        period, offset = model.integer("attn_layer_period"), model.integer("attn_layer_offset")
        return [Kind.FULL if layer % period == offset else Kind.STATE for layer in range(number)]
    if family == "bamba":
        full = set(model.get("attn_layer_indices") or ())
        return [Kind.FULL if layer in full else Kind.STATE for layer in range(number)]
    if family == "llama4_text":
        rope = model.get("no_rope_layers") or [(layer + 1) % 4 for layer in range(number)]
        return [Kind.CHUNK if uses_rope else Kind.FULL for uses_rope in rope]
    return _listed(model, _types(model))


def _types(model: ModelConfig) -> Sequence[str]:
    number, family = model.num_layers, model.model_type
    if types := model.texts("layer_types"):
        return types
    if model.optional("linear_num_value_heads"):
        interval = model.optional("full_attention_interval") or 4
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(number)]
    if model.optional("sliding_window") and family in _WINDOWS_EVERYWHERE:
        return ["sliding_attention"] * number
    if model.optional("sliding_window") and family in _PATTERN:
        every = model.optional("sliding_window_pattern") or _PATTERN[family]
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(number)]
    if model.optional("sliding_window") and model.get("use_sliding_window"):
        first = model.integer("max_window_layers")
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(number)]
    if (window := model.get("sliding_window")) and model.get("use_sliding_window") is None:
        raise ConfigError(
            f"{model.path} has sliding_window={window} and does not say which layers of model_type {family!r} have it: "
            "write layer_types into a copy of the file, or null for sliding_window if none has"
        )
    return ["full_attention"] * number


_BY_TYPE = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.WINDOW,
    "chunked_attention": Kind.CHUNK,
    "linear_attention": Kind.STATE,
    "mamba": Kind.STATE,
    "conv": Kind.STATE,
}


def _listed(model: ModelConfig, types: Sequence[str]) -> list[Kind | None]:
    unknown = sorted(set(types) - set(_BY_TYPE))
    states = any(_BY_TYPE.get(name) is Kind.STATE for name in types)
    if unknown or (states and model.model_type not in STATE_BYTES):
        raise ConfigError(
            f"{model.path}: layers of {', '.join(unknown) or 'recurrent states'} of model_type {model.model_type!r} "
            "are not known here: see what the engine logs for its KV cache"
        )
    return [_BY_TYPE[name] for name in types]
