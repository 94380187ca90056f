"""Weights of the mini engine's model: random ones, or those of a Llama folder in Hugging Face's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are (out, in) as for `torch.nn.functional.linear`.

    qkv: queries, keys, values, stacked; a key-only layer has no rows for values. gate_up: gate, then up.
    """

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model; `layers` are the main layers, then the draft layers, in the order of the forward pass."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


def random_weights(config: ModelConfig, seed: int, device: torch.device | str, dtype: torch.dtype) -> ModelWeights:
    """Random weights, the same on every device.

    Queries are scaled up so that attention is peaked: a wrong block in the cache then changes the tokens, where with
    the usual initialisation it would drown in the average over the context.
    """
    generator = torch.Generator().manual_seed(seed)
    q_size, kv_size = _qkv_sizes(config)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return values.mul_(gain / math.sqrt(columns)).to(device, dtype)

    def layer() -> LayerWeights:
        hidden, ones = config.hidden_size, torch.ones(config.hidden_size, device=device, dtype=dtype)
        num_kv = kv_size if config.key_only else 2 * kv_size
        return LayerWeights(
            input_norm=ones,
            qkv=torch.cat([matrix(q_size, hidden, gain=3.0), matrix(num_kv, hidden)]),
            out=matrix(hidden, q_size),
            mlp_norm=ones,
            gate_up=matrix(2 * config.intermediate_size, hidden),
            down=matrix(hidden, config.intermediate_size),
        )

    embedding = matrix(config.vocab_size, config.hidden_size, gain=math.sqrt(config.hidden_size))
    lm_head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, config.hidden_size)
    layers = tuple(layer() for _ in config.layer_names)
    return ModelWeights(embedding, layers, torch.ones(config.hidden_size, device=device, dtype=dtype), lm_head)


def load_weights(folder: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> ModelWeights:
    """Weights from the `*.safetensors` files of a folder with a Llama."""
    from safetensors.torch import load_file

    if config.key_only or config.num_draft_layers:
        raise ValueError("a Llama folder has no weights for key_only or draft layers")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    tensors: Mapping[str, Tensor] = {name: t for file in files for name, t in load_file(file).items()}

    def get(name: str) -> Tensor:
        return tensors[name].to(device, dtype)

    embedding = get("model.embed_tokens.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(f"model.layers.{i}", get) for i in range(config.num_hidden_layers)),
        norm=get("model.norm.weight"),
        lm_head=embedding if config.tie_word_embeddings else get("lm_head.weight"),
    )


def _load_layer(prefix: str, get: Callable[[str], Tensor]) -> LayerWeights:
    def stacked(block: str, *names: str) -> Tensor:
        return torch.cat([get(f"{prefix}.{block}.{name}_proj.weight") for name in names])

    return LayerWeights(
        input_norm=get(f"{prefix}.input_layernorm.weight"),
        qkv=stacked("self_attn", "q", "k", "v"),
        out=stacked("self_attn", "o"),
        mlp_norm=get(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=stacked("mlp", "gate", "up"),
        down=stacked("mlp", "down"),
    )


def _qkv_sizes(config: ModelConfig) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
