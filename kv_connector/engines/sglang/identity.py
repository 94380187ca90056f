"""What decides the bytes of SGLang's KV cache, read once at start from its settings and the files of the weights.

SGLang's page hashes cover tokens, adapter and salt. All settings of the namespaces that say what is computed are named,
but for those below that do not decide a byte: a setting that is new is named as well.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sglang
from sglang.srt.runtime_context import get_device, get_exec, get_lora, get_mm, get_model, get_parallel

from ...index import CacheIdentity
from ..weights import local_fingerprint, named_weights

_NAMESPACES = {
    "model": get_model,
    "exec": get_exec,
    "lora": get_lora,
    "mm": get_mm,
    "device": get_device,
}
_DECIDES_NOTHING = {
    *("random_seed", "base_gpu_id", "gpu_id_step", "download_dir", "engine_info_bootstrap_port"),
    *("weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads"),
    *("weight_loader_drop_cache_after_load", "weight_cache_socket", "weight_cache_timeout", "lora_paths"),
    *("remote_instance_weight_loader_send_weights_group_ports", "cuda_graph_config"),
}
_SIZES = ("tp_size", "dp_size", "attn_dp_size", "ep_size", "moe_dp_size", "dcp_size", "enable_dp_attention")


def read_identity(page_size: int, num_ranks: int, cache_dtype: str) -> CacheIdentity:
    """The identity of what this engine caches: the same on every rank of it."""
    model, settings = get_model(), read_settings()
    text = json.dumps(settings, sort_keys=True, default=repr)
    return CacheIdentity(
        model=f"{model.model_path}@{model.revision or ''}",
        cache_dtype=f"{cache_dtype}/{model.dtype}",
        layout="",
        block_size=page_size,
        tp_size=num_ranks,
        engine=f"sglang {sglang.__version__}",
        config=hashlib.sha256(text.encode()).hexdigest()[:32],
        settings=json.dumps(_shown(settings), sort_keys=True, default=repr),
        weights=_weights(),
    )


def read_settings() -> dict[str, dict[str, Any]]:
    """What decides the bytes, by namespace."""
    found = {name: _leaves(get()) for name, get in _NAMESPACES.items()}
    parallel = get_parallel()
    found["parallel"] = {name: getattr(parallel, name) for name in _SIZES}
    found["adapters"] = _adapters()
    return found


def read_backend() -> str:
    """What computes attention."""
    attention = _leaves(get_exec())
    names = {name: value for name, value in attention.items() if name.endswith("attention_backend") and value}
    return json.dumps(names, sort_keys=True, default=repr)


def _leaves(bag: Any, prefix: str = "") -> dict[str, Any]:
    """A namespace's settings by name, those of namespaces within it behind a dot."""
    found = {f"{prefix}{name}": value for name, value in bag._fields.items() if name not in _DECIDES_NOTHING}
    for name, sub in bag._subs.items():
        found |= _leaves(sub, f"{prefix}{name}.")
    return found


def _adapters() -> dict[str, str]:
    """Adapters of the launch line have the same id in every start, whatever their files are by then: these are named.
    One that is loaded later has an id that never comes again."""
    paths = getattr(get_lora(), "lora_paths", None) or ()
    found = {str(adapter.lora_name): str(adapter.lora_path) for adapter in paths}
    return {name: f"{path} {local_fingerprint(path) or 'unknown'}" for name, path in found.items()}


def _shown(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a user may want to read of them."""
    model = settings["model"]
    names = ("quantization", "kv_cache_dtype", "context_length", "json_model_override_args", "load_format")
    return {name: model[name] for name in names if model.get(name)}


def _weights() -> str:
    """Dummy ones are drawn from a seed, whatever the name is."""
    model = get_model()
    if model.load_format == "dummy":
        return f"dummy, seed {get_device().random_seed}"
    return named_weights(model.model_path, model.load_format, model.revision, model.download_dir)
