"""Models of a few layers with random weights, as folders that any engine loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
_TIED = {"windows": 0.3, "two_sizes": 0.3, "conv": 4.0}
"""Gains of embeddings that are the head as well; Gemma scales its own itself."""
_GAINS = {"embed": 11.0, "lm_head": 4.0, "q_proj": 1.8, "k_proj": 1.8, "kv_": 1.8, "v_proj": 2.0, "o_proj": 2.0}

_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA = _SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": _LLAMA,
    "one_head": _LLAMA | {"num_key_value_heads": 1},
    "draft": _LLAMA | {"num_hidden_layers": 1},
    # Full attention in every third layer, windows of three blocks of 32 in the others: two kinds of block group.
    "windows": _SHAPE
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 64,
        "sliding_window": 96,
        "sliding_window_pattern": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    # Attention local to chunks of four blocks of 32, and full attention in every other layer (Llama 4).
    "chunks": _SHAPE
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_chunk_size": 128,
        "no_rope_layers": [1, 0, 1, 0],
    },
    # Windows of three blocks of 32 in all layers: they are the only block group.
    "windows_alone": _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 96},
    # One latent vector a token: DeepSeek's attention.
    "latent": _SHAPE
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 192,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    # Mamba2 (Granite 4): states in blocks of 64 tokens, attention in blocks of 128.
    "mamba": _SHAPE
    | {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": False,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 128,
        "position_embedding_type": "rope",
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.125,
    },
    # Mamba2 (Nemotron-H): two block groups of states, of two layers and of one.
    "states_apart": _SHAPE
    | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "M-M*M*",
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 32,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "residual_in_fp32": False,
    },
    # Mamba2 alone: its states are the only block group.
    "states_only": _SHAPE
    | {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "state_size": 32,
        "conv_kernel": 4,
        "expand": 2,
        "num_heads": 8,
        "head_dim": 32,
        "n_groups": 1,
        "chunk_size": 32,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "rms_norm": True,
        "tie_word_embeddings": False,
    },
    # A gated delta net (Qwen3-Next), whose kernels for the CPU know bfloat16 and heads of 128.
    "delta": _SHAPE
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
    # Short convolutions (LFM2): a state of two rows.
    "conv": _SHAPE
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    # Attention with sinks, windows in every other layer (gpt-oss).
    "sinks": _SHAPE
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 96,
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 2048,
        },
    },
    # Kimi delta attention in three layers of four, one latent vector a token in the fourth (Kimi-Linear). No
    # experts: vLLM compiles the kernels of their router for minutes, and they keep nothing of a prompt.
    "kimi": _SHAPE
    | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "head_dim": 192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
    },
    # A window alone, a row for 4 tokens with an indexer, and one for 128 (DeepSeek-V4). Few experts and layers; widths
    # are those of DeepSeek-V4-Flash, as kernels are compiled for them.
    "compressed": _SHAPE
    | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 3,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128],
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 0,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 65536,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "expert_dtype": "fp8",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    },
    # Windows in blocks of 64 tokens, full attention with larger heads in blocks of 32 (Gemma 4).
    "two_sizes": _SHAPE
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 96,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": False,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10000.0} for name in ("full_attention", "sliding_attention")
        },
    },
}

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
    hidden, inner, width = _LLAMA["hidden_size"], _LLAMA["intermediate_size"], _LLAMA["head_dim"]
    queries, keys = _LLAMA["num_attention_heads"] * width, _LLAMA["num_key_value_heads"] * width
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
    hidden = _LLAMA["hidden_size"]
    width = _LLAMA["num_key_value_heads"] * _LLAMA["head_dim"]
    weights = {}
    for layer in range(_LLAMA["num_hidden_layers"]):
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
