"""vLLM's KV cache groups as block groups: which of them are cached, and which of their blocks a hit needs.

How the blocks of a group come and go is its manager's doing (vLLM's `single_type_kv_cache_manager`), so a group is
known by that class, and specs that are derived from others are what their manager makes of them.

Under decode context parallel a block spans as many times its tokens as there are ranks that share out a context: each
keeps a part of every block, under the same block id. So the block stays the unit, and a rank's part of it the piece
that is copied, kept and sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.sched.output import SchedulerOutput

from ...errors import ConfigError
from ...index import BlockGroup
from ..heads import HEADS_ALIKE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

TELLS_STATES = "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
"""Whether this vLLM says which device block holds which recurrent state: block tables do not."""

_FULL = ("FullAttentionManager", "SinkFullAttentionManager")
_WINDOW = "SlidingWindowManager"
_CHUNK = "ChunkedLocalAttentionManager"
_STATE = "MambaManager"
_OF_ALL_HEADS = {"MLAAttentionSpec", "SlidingWindowMLASpec"}
"""Specs of what every rank computes as a whole; those derived from them may be of anything."""
_WITHOUT_LAYERS = {"ngram", "ngram_gpu", "suffix"}
"""Methods of speculation that look for drafts in tokens."""
_OF_OWN_HEADS = {"FullAttentionSpec", "SlidingWindowSpec"}
_REFUSED = {
    "RSWAManager": "it drops blocks from the middle of a request",
    "CrossAttentionManager": "its blocks belong to the encoder's input, which block hashes do not name",
}
"""What is known of some others."""


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """A KV cache group of vLLM's that is cached here: vLLM's number of it, our block group, and its kind in this vLLM's
    events."""

    group_id: int
    group: BlockGroup
    event_kind: Mapping[str, Any]


def read_groups(kv_cache_config: Any, vllm_config: Any) -> tuple[int, list[ServedGroup]]:
    """Tokens that a block hash covers, and the groups that are cached: full attention first, whose prefixes are the
    longest. Groups without prefix caching in vLLM are left out: vLLM does not need them after a hit either. Raises
    ConfigError, with the reason, for a model with a group that is not supported.
    """
    groups, parallel = list(enumerate(kv_cache_config.kv_cache_groups)), vllm_config.parallel_config
    kept = [(index, group) for index, group in groups if not _is_left_out(group)]
    if not kept:
        raise ConfigError("vLLM caches no prefixes of this model: start it without --kv-transfer-config")
    hash_block_size = getattr(kv_cache_config, "hash_block_size", None)
    if hash_block_size is None:
        hash_block_size = _only_size(kept, vllm_config)
    served = []
    for index, group in kept:
        block_size = tokens_per_block(group.kv_cache_spec, parallel)
        served.append(
            ServedGroup(index, to_block_group(group, block_size, hash_block_size), _event_kind(group.kv_cache_spec))
        )
    hit_tokens = hash_block_size * math.lcm(*(entry.group.hashes_per_block for entry in served))
    _check_hits_end_alike(kv_cache_config, parallel, hit_tokens)
    served.sort(key=lambda entry: not entry.group.is_full)
    return hash_block_size, served


def tokens_per_block(spec: Any, parallel: Any) -> int:
    """Tokens that a block of a group spans over all ranks, of which each may keep a part. Decode context parallel ranks
    divide them, except in layers that vLLM replicates on each of them. Prefill context parallel ranks have copies; in
    versions without replicated layers they divide them, too.
    """
    if hasattr(kv_cache_utils, "resolve_dcp_kv_block_size"):
        return int(kv_cache_utils.resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size))
    return int(spec.block_size * parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size)


def to_block_group(group: Any, block_size: int, hash_block_size: int) -> BlockGroup:
    """Our `BlockGroup` for a vLLM group whose blocks span `block_size` tokens. Raises ConfigError, with the reason, for
    one that is not supported."""
    specs = list(layer_specs(group.kv_cache_spec))
    layer = group.layer_names[0] if group.layer_names else "?"
    for spec in specs:
        reason = _refusal(group, spec)
        if reason:
            raise ConfigError(f"layer {layer!r}: {type(spec).__name__} is not supported: {reason}")
    if block_size % hash_block_size:
        raise ConfigError(
            f"layer {layer!r}: blocks of {block_size} tokens are not supported where vLLM hashes {hash_block_size}: "
            "make --block-size a multiple"
        )
    hashes_per_block = block_size // hash_block_size
    manager = _manager(specs[0])
    if manager == _STATE:
        return BlockGroup(1, hashes_per_block, states_are_told=True)
    if manager == _WINDOW:
        kept = max(spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0) for spec in specs)
        return BlockGroup(-(-kept // block_size), hashes_per_block)
    if manager == _CHUNK:
        return BlockGroup(None, hashes_per_block, chunk_blocks=_chunk_blocks(specs[0], block_size, layer))
    return BlockGroup(None, hashes_per_block)


def _chunk_blocks(spec: Any, block_size: int, layer: str) -> int:
    """Blocks of a chunk of local attention, each of which lies in one chunk."""
    chunk = int(spec.attention_chunk_size)
    if chunk % block_size:
        raise ConfigError(
            f"layer {layer!r}: chunks of {chunk} tokens are not supported with blocks of {block_size}: "
            "make --block-size a divisor"
        )
    return chunk // block_size


def layer_specs(spec: Any) -> Iterable[Any]:
    """The layers' own specs: a group of one type with different sizes wraps one for each layer."""
    wrapped = getattr(spec, "kv_cache_specs", None)
    return wrapped.values() if wrapped is not None else (spec,)


def read_kv_heads(kv_cache_config: Any) -> dict[str, int]:
    """By layer the KV heads that this rank holds, where this vLLM lays layers out as blocks, heads, tokens and content
    of a head (0.32 and newer) and one head is one slot of such a tensor."""
    if not hasattr(kv_cache_interface, "compute_layer_kv_cache_shape_bytes"):
        return {}
    found = {}
    for group in kv_cache_config.kv_cache_groups:
        wrapped = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec = wrapped.get(name, group.kv_cache_spec)
            if isinstance(spec, kv_cache_interface.AttentionSpec) and spec.num_head_slots is None:
                found[name] = spec.num_kv_heads
    return found


def has_draft(vllm_config: VllmConfig) -> bool:
    """Whether drafts come from layers; for n-gram and suffix drafts vLLM names the target model as the draft model."""
    speculative = vllm_config.speculative_config
    return speculative is not None and getattr(speculative, "method", None) not in _WITHOUT_LAYERS


def num_replicas(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> int:
    """How many consecutive ranks hold the same bytes. With multi-head latent attention all ranks of a pipeline stage,
    which do not split the cache. With fewer KV heads than a stage has ranks, those that have the same head: only for
    models known to have equally many in each layer, as specs give only one rank's heads.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = int(parallel.tensor_parallel_size)
    if parallel.decode_context_parallel_size > 1:
        return 1
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= _OF_ALL_HEADS:
        return ranks
    has_one_head = kinds <= _OF_OWN_HEADS and all(spec.num_kv_heads == 1 for spec in specs)
    is_known = not has_draft(vllm_config) and set(model.architectures) <= HEADS_ALIKE
    return max(1, ranks // model.get_total_num_kv_heads()) if has_one_head and is_known else 1


def _only_size(groups: Iterable[tuple[int, Any]], vllm_config: Any) -> int:
    """Of versions that do not tell what they hash, and name larger blocks in ways of their own."""
    sizes = {tokens_per_block(group.kv_cache_spec, vllm_config.parallel_config) for _, group in groups}
    finer = getattr(vllm_config.cache_config, "hash_block_size", None)
    if finer is not None:
        sizes.add(finer)
    if len(sizes) > 1:
        raise ConfigError(
            f"blocks or hashes of {sorted(sizes)} tokens in one model are supported with vLLM 0.32 and newer; use "
            "that, or --disable-hybrid-kv-cache-manager where the model allows it"
        )
    return int(sizes.pop())


def _is_left_out(group: Any) -> bool:
    """Whether vLLM does without the group behind its own hits, and so behind ours: rings of what is being compressed,
    which are empty where a hit ends."""
    in_device_pool = not getattr(group, "host_resident", False) and getattr(group, "enable_kv_transfer", True)
    return in_device_pool and not getattr(group.kv_cache_spec, "prefix_cacheable", True)


def _check_hits_end_alike(kv_cache_config: Any, parallel: Any, hit_tokens: int) -> None:
    """Groups that are left out count for where vLLM lets a hit end: at a multiple of every group's blocks."""
    for group in kv_cache_config.kv_cache_groups:
        size = tokens_per_block(group.kv_cache_spec, parallel)
        if hit_tokens % size:
            layer = group.layer_names[0] if group.layer_names else "?"  # of another stage
            raise ConfigError(
                f"layer {layer!r}: blocks of {size} tokens that vLLM caches no prefixes of are not "
                f"supported beside hits that end at multiples of {hit_tokens}: start this model without "
                "--kv-transfer-config"
            )


def _refusal(group: Any, spec: Any) -> str:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "its blocks are not in the device's pool"
    if not getattr(spec, "prefix_cacheable", True):
        return "vLLM caches no prefixes of it, but of others in its group"
    if getattr(spec, "prefix_replay_tokens", 0):
        return "it computes the end of every hit again"
    if isinstance(spec, getattr(kv_cache_interface, "HiddenStateCacheSpec", ())):
        return "it holds hidden states, which are another connector's to take"
    manager = _manager(spec)
    if manager == _STATE:
        return _state_refusal(spec)
    if manager in _FULL or manager in (_WINDOW, _CHUNK):
        return ""
    return _REFUSED.get(manager, "only full and chunked attention, MLA, sliding windows and recurrent states are")


def _state_refusal(spec: Any) -> str:
    if not TELLS_STATES:
        return "this vLLM does not say which block holds which state; vLLM 0.32 and newer do"
    if spec.mamba_cache_mode != "align":
        return (
            f"with mamba_cache_mode={spec.mamba_cache_mode} vLLM itself caches no prefixes of it; use "
            "--enable-prefix-caching --mamba-cache-mode align"
        )
    return ""


def _manager(spec: Any) -> str:
    """Name of the class that keeps the blocks of a group of this spec."""
    if hasattr(managers, "spec_manager_map"):
        manager = managers.spec_manager_map.get(type(spec))
    else:
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        manager = KVCacheSpecRegistry.get_manager_class(spec)
    return manager.__name__ if manager is not None else ""


def _event_kind(spec: Any) -> Mapping[str, Any]:
    """Fields of vLLM's `BlockStored` by which routers tell groups apart, where this version has them."""
    if not hasattr(kv_cache_interface, "get_kv_cache_spec_kind"):
        return {}
    return {
        "kv_cache_spec_kind": kv_cache_interface.get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": kv_cache_interface.get_kv_cache_spec_sliding_window(spec),
    }
