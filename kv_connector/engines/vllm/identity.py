"""What decides the bytes of vLLM's KV cache, read once at start from its configuration and the files of the weights.

vLLM's own `ModelConfig.compute_hash` covers what decides the computation (versions 0.20 to 0.32: every field but those
of the front end, and the model's configuration after `hf_overrides` was applied to it); it knows weights by their path
alone, so their fingerprint is added, and what else it leaves out.
"""

from __future__ import annotations

import json
import logging
import secrets
from functools import cache
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core import kv_cache_utils

from ...errors import ConfigError
from ...index import CacheIdentity
from ..weights import local_changes, local_fingerprint
from .groups import has_draft, layer_specs

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("kv_connector.vllm")

_FROM_FILES = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf"),
    *("bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded"),
}
"""Load formats under which weights are read from the model's own folder, unless that is an URL."""
_SAFETENSORS_FIRST = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "bitsandbytes", "runai_streamer"}
"""Those that read the same files of a folder."""
_BY_RANK = {"bitsandbytes", "sharded_state", "runai_streamer_sharded"}
"""Those of them whose values depend on how ranks divide them: each rank quantises its own, or has files of its own."""
_NEVER_READ = ["original/**/*"]
"""vLLM's own `LoadConfig.ignore_patterns`."""
_MULTIMODAL = (
    *("mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_attn_dtype"),
    *("mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method"),
)
"""Fields of `MultiModalConfig`, where a version has them, that decide what the model makes of an image: vLLM's hash of
an image is of the image as it was sent, and `ModelConfig.compute_hash` leaves them out."""
_hashed = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: [request.lora_request.lora_name])
"""What vLLM hashes of a request's adapter: its name, and in newer versions its path."""
_MAMBA = (
    *("backend", "ssu_algorithm"),
    *("enable_stochastic_rounding", "stochastic_rounding_philox_rounds"),
)
"""Fields of `MambaConfig`, where a version has them, that decide how states are computed and rounded."""


def read_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> CacheIdentity:
    """The identity of what this engine caches: the same in every process of it. Raises ConfigError for what cannot be
    named."""
    kv_cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if getattr(kv_cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales=True is not supported with storage or peer: every start finds other scales, and its "
            "blocks mean nothing to others; leave it out, and take the scales of the checkpoint"
        )
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None) if has_draft(vllm_config) else None
    load, states = vllm_config.load_config, _states(kv_cache_config)
    draft_load = getattr(speculative, "draft_load_config", None) or load
    return CacheIdentity(
        model=f"{model.model_weights or model.model}@{model.revision or ''}",
        cache_dtype=f"{kv_cache.cache_dtype}/{model.dtype}{states}",
        layout=str(getattr(kv_cache_config, "kv_cache_layout", None) or ""),
        block_size=block_size,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        engine=f"vllm {vllm.__version__}",
        config="/".join(_hash(config) for config in (model, draft) if config is not None),
        settings=_settings(vllm_config, has_states=bool(states)),
        weights=_weights(model, load, parallel.tensor_parallel_size),
        draft_weights=_weights(draft, draft_load, parallel.tensor_parallel_size) if draft else "",
    )


def _states(kv_cache_config: KVCacheConfig) -> str:
    """Element types and shapes of recurrent states, which settings of their own decide; empty without any."""
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec))
    found = {f"/{spec.dtypes} {spec.shapes}" for spec in specs if hasattr(spec, "dtypes")}
    return "".join(sorted(found))


def read_backend(vllm_config: VllmConfig) -> str:
    """The classes that compute attention on this rank, whose model is loaded."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    return ", ".join(sorted(f"{backend.__module__}.{backend.__qualname__}" for backend in found))


class Adapters:
    """Fingerprints of LoRA adapters by request, as `Roots` needs them. Called from the scheduler's thread.

    An adapter's files are read when its first request comes: vLLM has read them by then, or is about to. They are read
    again when they have changed by a later one: vLLM reads them anew, and does not tell, where other adapters have
    taken its place meanwhile (`--max-cpu-loras`). Blocks of adapters that cannot be read, or whose weights changed
    under the same name, are found by this process alone: vLLM's own cache distinguishes adapters by name (and path, in
    newer versions), so blocks computed after a hit there may depend on either.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, str], str] = {}  # by what vLLM reads an adapter anew for
        self._changes: dict[tuple[str, int, str], object] = {}  # of the files, when they were looked at
        self._first: dict[str, str] = {}  # by name
        self._unsure: set[str] = set()  # names
        self._nonce = secrets.token_hex(16)

    def __call__(self, request: Request) -> str:
        """ "" where the request has no adapter. Files are read where an adapter is new, has changed, or is read in
        place."""
        lora = request.lora_request
        if lora is None:
            return ""
        key = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        changes = local_changes(lora.lora_path)  # of files that are gone vLLM may have read others before
        if key not in self._found or lora.load_inplace or changes != self._changes[key]:
            self._changes[key] = changes
            self._found[key] = self._look(lora.lora_name, lora.lora_path)
        found = self._found[key]
        if self._first.setdefault(lora.lora_name, found) != found:
            self._unsure.add(lora.lora_name)
        return f"{found} {self._nonce}" if lora.lora_name in self._unsure else found

    def _look(self, name: str, path: str) -> str:
        found = local_fingerprint(path)
        if found is None:
            self._unsure.add(name)
            logger.warning(
                "the weights of adapter %s at %s cannot be identified: only this engine, until it ends, finds in "
                "storage what it computes",
                name,
                path,
            )
        return found or ""


class ReplacedAdapters:
    """LoRA adapters whose files have changed or gone since their first request came, or have another path, until a
    reset: of the blocks that this engine keeps under vLLM's hashes of them, nobody knows which weights they are of.
    Called from the scheduler's thread."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], tuple[str, object]] = {}  # path and changes of files, by what is hashed
        self._replaced: set[tuple[object, ...]] = set()

    def has(self, request: Request) -> bool:
        """Whether the request's adapter is one of them."""
        lora = request.lora_request
        if lora is None:
            return False
        key = tuple(_hashed(request))
        found = lora.lora_path, local_changes(lora.lora_path)  # of files that are gone vLLM may have read others before
        if self._first.setdefault(key, found) != found and key not in self._replaced:
            self._replaced.add(key)
            logger.warning(
                "the files of adapter %s at %s have changed or are gone, or it had another path: its requests hit "
                "nothing but in vLLM's own cache until both are reset (POST /reset_prefix_cache?reset_external=true) "
                "after vLLM has read the files, and while no request runs",
                lora.lora_name,
                lora.lora_path,
            )
        return key in self._replaced

    def reset(self) -> None:
        """Nothing is kept of before."""
        self._first.clear()
        self._replaced.clear()


def _hash(model: ModelConfig) -> str:
    try:
        return str(model.compute_hash())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the configuration of {model.model!r} cannot be hashed: {error}; its blocks could be taken for those of "
            "another: leave storage and peer out"
        ) from error


def _settings(vllm_config: VllmConfig, has_states: bool) -> str:
    """Of what is in the hash the part that a user sets and may want to read; and what decides images, states, which
    layers a stage of a pipeline has and which tokens of a block a rank has, which is not."""
    model = vllm_config.model_config
    overrides = model.hf_overrides
    mamba = getattr(vllm_config, "mamba_config", None) if has_states else None
    multimodal = {name: getattr(model.multimodal_config, name, None) for name in _MULTIMODAL}
    shown = {
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "hf_overrides": f"{overrides.__module__}.{overrides.__qualname__}" if callable(overrides) else overrides,
        **multimodal,
        **{f"mamba_{name}": getattr(mamba, name, None) for name in _MAMBA},
        "stages": _stages(model, vllm_config.parallel_config.pipeline_parallel_size),
        "context_parallel": _context_parallel(vllm_config.parallel_config),
    }
    return json.dumps({name: value for name, value in shown.items() if value}, sort_keys=True, default=str)


def _stages(model: ModelConfig, pp_size: int) -> list[tuple[int, int]]:
    """The first layer of each stage of a pipeline, and the first behind it: two ways to split a model may give stages
    blocks of one size."""
    num_layers = model.get_total_num_hidden_layers()
    return [get_pp_indices(num_layers, stage, pp_size) for stage in range(pp_size)] if pp_size > 1 else []


def _context_parallel(parallel: ParallelConfig) -> dict[str, int]:
    """What decides which of a block's tokens lie on which rank; empty where all of them lie on each."""
    decode, prefill = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    if decode == prefill == 1:
        return {}
    older = parallel.dcp_kv_cache_interleave_size  # which goes first, but not in every process by now
    return {
        "decode": decode,
        "prefill": prefill,
        "tensor": parallel.tensor_parallel_size,
        "interleave": older if older > 1 else parallel.cp_kv_cache_interleave_size,
    }


def _weights(model: ModelConfig, load: Any, tp_size: int) -> str:
    """Their fingerprint; where there is none, what is known of where they come from, and a line in the log. With the TP
    size where they may depend on it: each rank draws dummy weights of its own, and what other loaders do is theirs."""
    load_format = str(load.load_format)
    ranks = "" if load_format in _FROM_FILES - _BY_RANK else f", of TP size {tp_size}"
    if load_format == "dummy":
        return f"dummy, seed {model.seed}{ranks}"
    found = None
    if load_format in _FROM_FILES and not model.model_weights:
        found = local_fingerprint(model.model, model.revision, load.download_dir)
    if found is not None:
        return f"{found}{_choice(load)}{ranks}"
    source = f"{load_format} {model.model_weights or model.model}@{model.revision or ''}"
    _say_unnamed(source)
    return f"{source} {json.dumps(load.model_loader_extra_config, sort_keys=True, default=str)}{ranks}"


def _choice(load: Any) -> str:
    """Which of a folder's files are read and how, where that is not the usual."""
    choice = {
        "load_format": "" if str(load.load_format) in _SAFETENSORS_FIRST else str(load.load_format),
        "ignore_patterns": load.ignore_patterns if load.ignore_patterns != _NEVER_READ else None,
        "model_loader_extra_config": load.model_loader_extra_config,
    }
    chosen = {name: value for name, value in choice.items() if value}
    return f" {json.dumps(chosen, sort_keys=True, default=str)}" if chosen else ""


@cache
def _say_unnamed(source: str) -> None:
    """Once a process."""
    logger.warning(
        "the weights (%s) are identified by this and the model's configuration alone: when they are replaced at the "
        "same place, clear the storage (`kv-connector storage rm --all PATH`)",
        source,
    )
