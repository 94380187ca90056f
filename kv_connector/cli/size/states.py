"""Bytes of a recurrent layer's state on one rank, by family: what vLLM's `MambaSpec` counts, without drafts."""

from __future__ import annotations

from collections.abc import Callable

from .model import BYTES, ModelConfig


def _mamba2(
    model: ModelConfig,
    dtype: str,
    tp_size: int,
    inner: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    conv: int,
) -> int:
    """Rows of the convolution, and a matrix for each head."""
    groups = groups if groups % tp_size == 0 else groups + tp_size - groups
    rows = (conv - 1) * ((inner + 2 * groups * state) // tp_size)
    return rows * BYTES[dtype] + heads // tp_size * head_dim * state * BYTES[_state_dtype(model, dtype)]


def _state_dtype(model: ModelConfig, dtype: str) -> str:
    return str(model.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or dtype)


def _granite(model: ModelConfig, dtype: str, tp_size: int) -> int:
    inner = model.integer("mamba_expand") * model.hidden_size
    names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return _mamba2(model, dtype, tp_size, inner, *map(model.integer, names))


def _nemotron(model: ModelConfig, dtype: str, tp_size: int) -> int:
    """Matrices in single precision, where the file names nothing else."""
    heads, head_dim = model.integer("mamba_num_heads"), model.integer("mamba_head_dim")
    rest = map(model.integer, ("n_groups", "ssm_state_size", "conv_kernel"))
    given = ModelConfig(model.path, {"mamba_ssm_cache_dtype": "float32", **model.values})
    return _mamba2(given, dtype, tp_size, heads * head_dim, heads, head_dim, *rest)


def _plain_mamba2(model: ModelConfig, dtype: str, tp_size: int) -> int:
    inner = model.integer("expand") * model.hidden_size
    names = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    return _mamba2(model, dtype, tp_size, inner, *map(model.integer, names))


def _mamba1(model: ModelConfig, dtype: str, tp_size: int) -> int:
    inner = model.optional("intermediate_size") or model.integer("expand") * model.hidden_size
    conv, state = model.integer("conv_kernel"), model.integer("state_size")
    return _rows_and_states(model, dtype, inner // tp_size, conv, state)


def _jamba(model: ModelConfig, dtype: str, tp_size: int) -> int:
    inner = model.integer("mamba_expand") * model.hidden_size // tp_size
    return _rows_and_states(model, dtype, inner, model.integer("mamba_d_conv"), model.integer("mamba_d_state"))


def _rows_and_states(model: ModelConfig, dtype: str, inner: int, conv: int, state: int) -> int:
    return inner * (conv - 1) * BYTES[dtype] + inner * state * BYTES[_state_dtype(model, dtype)]


def _gated_delta(model: ModelConfig, dtype: str, tp_size: int) -> int:
    keys, values = model.integer("linear_num_key_heads"), model.integer("linear_num_value_heads")
    key_dim, value_dim = model.integer("linear_key_head_dim"), model.integer("linear_value_head_dim")
    rows = (model.integer("linear_conv_kernel_dim") - 1) * ((2 * keys * key_dim + values * value_dim) // tp_size)
    return rows * BYTES[dtype] + values // tp_size * value_dim * key_dim * BYTES[_state_dtype(model, dtype)]


def _kimi_delta(model: ModelConfig, dtype: str, tp_size: int) -> int:
    """Matrices in single precision."""
    given = ModelConfig(model.path, model.get("linear_attn_config"))
    heads, head_dim = given.integer("num_heads"), given.integer("head_dim")
    rows = (given.integer("short_conv_kernel_size") - 1) * (3 * heads * head_dim // tp_size)
    return rows * BYTES[dtype] + heads // tp_size * head_dim * head_dim * BYTES["float32"]


def _short_conv(model: ModelConfig, dtype: str, tp_size: int) -> int:
    width = model.optional("conv_dim") or model.hidden_size
    return (model.integer("conv_L_cache") - 1) * (width // tp_size) * BYTES[dtype]


NOT_COMPARED = frozenset({"bamba", "falcon_mamba", "jamba", "kimi_linear", "mamba", "qwen3_5_moe_text", "qwen3_5_text"})
"""Families that follow vLLM's source here and were not held against what it computes."""
STATE_BYTES: dict[str, Callable[[ModelConfig, str, int], int]] = {
    "bamba": _granite,
    "falcon_mamba": _mamba1,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "kimi_linear": _kimi_delta,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "mamba": _mamba1,
    "mamba2": _plain_mamba2,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
}
"""By model_type."""
