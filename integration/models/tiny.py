"""Models of a few layers with random weights, as folders that any engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from integration.models.tiny_configs import CONFIGS, LLAMA

_TIED = {"windows": 0.3, "two_sizes": 0.3, "conv": 4.0}
"""Gains of embeddings that are the head as well; Gemma scales its own itself."""
_GAINS = {"embed": 11.0, "lm_head": 4.0, "q_proj": 1.8, "k_proj": 1.8, "kv_": 1.8, "v_proj": 2.0, "o_proj": 2.0}

ENGINES_OWN = {"sinks", "kimi", "compressed"}
"""Of which an engine draws the weights: Transformers has no such model, or names its parameters otherwise."""


def write(name: str, folder: Path) -> Path:
    """Write the model's config.json into `folder` / `name`; returns that folder. KeyError for an unknown name."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
    return target


def write_weights(name: str, folder: Path) -> Path:
    """As `write`, with random weights under which a token depends on all that came before; always the same ones.

    vLLM's own dummy weights hardly look at the context: they give the same tokens whatever is in the cache.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    target = write(name, folder)
    if (target / "model.safetensors").exists():
        return target
    gains = _GAINS | {"embed": _TIED.get(name, _GAINS["embed"])}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                gain = next((gain for part, gain in gains.items() if part in parameter_name), 1.0)
                scale = gain / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(target)
    (target / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
    return target


def write_draft(folder: Path) -> Path:
    """Write an EAGLE draft of `dense` into `folder`: one layer over its embedding and its last hidden state.

    It takes the embedding and the head of its target. Not every vLLM gives a draft dummy weights.
    """
    from safetensors.torch import save_file

    target = write("draft", folder)
    generator = torch.Generator().manual_seed(0)
    hidden, inner, width = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["head_dim"]
    queries, keys = LLAMA["num_attention_heads"] * width, LLAMA["num_key_value_heads"] * width
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, target / "model.safetensors")
    return target


def write_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter of `dense` for keys and values into `folder`, strong enough to change answers."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden = LLAMA["hidden_size"]
    width = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) / hidden**0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
