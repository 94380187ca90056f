"""What vLLM's configuration means for the halves, and what of it cannot be served, said at start-up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from ...config import Config, PeerRole
from ...errors import ConfigError
from ...index import BlockGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SERVED = ("FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec", "SlidingWindowSpec")
"""Specs by their exact class: one derived from these may keep its blocks in another way."""
_REFUSED = {
    "MambaSpec": "the state of a recurrent layer exists at one token only, and a prefix of it cannot be cut to blocks",
    "RSWASpec": "it drops blocks from the middle of a request",
    "HiddenStateCacheSpec": "it holds hidden states, which are another connector's to take",
}
"""What is known of some others."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the halves need to know of the engine.

    `layer_names` are those of the cache's tensors, one for each, as cross-layer tensors have them.
    `group_ids[g]` is vLLM's number of our block group g; ours begin with full attention, whose prefix is the longest.
    `recomputes_ahead`: it plans a step before it knows how the last one ended, and is to compute what was not loaded.
    `group_kinds[g]` is what this vLLM's events say of the group beside its number. `publishes_events`: to anybody.
    """

    block_size: int
    num_blocks: int
    layer_names: tuple[str, ...]
    world_size: int
    rank: int
    groups: tuple[BlockGroup, ...]
    group_ids: tuple[int, ...]
    group_kinds: tuple[Mapping[str, Any], ...]
    publishes_events: bool
    recomputes_ahead: bool
    drop_last_block: bool
    unpins_when_idle: bool
    engine_id: str


def read_config(vllm_config: VllmConfig) -> Config:
    """Our settings, from `kv_connector_extra_config`."""
    assert vllm_config.kv_transfer_config is not None
    config = Config.from_mapping(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if not config.host_memory and config.peer is None:
        raise ConfigError(
            "host_memory=0: there is nothing to cache in; give kv_connector_extra_config a size such as "
            '{"host_memory": "64GiB"} (all ranks together)'
        )
    for name, part in (("storage", config.storage), ("peer", config.peer)):
        if part is not None and not _has_stable_hashes(vllm_config):
            raise ConfigError(
                f"{name}: this engine's block hashes change with every start; set PYTHONHASHSEED to the same value "
                "for all engines that share blocks, such as PYTHONHASHSEED=0"
            )
    return _with_role(config, str(vllm_config.kv_transfer_config.kv_role))


def _with_role(config: Config, kv_role: str) -> Config:
    """vLLM's `kv_role` says what the engine does for others, unless our own setting does. Without `peer`, nothing."""
    roles = {"kv_producer": PeerRole.PRODUCER, "kv_consumer": PeerRole.CONSUMER}
    if config.peer is None or kv_role not in roles or config.peer.role is not PeerRole.BOTH:
        return config
    return replace(config, peer=replace(config.peer, role=roles[kv_role]))


def read_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineShape:
    """The engine's shape. Raises ConfigError, naming the reason and what would help, for what is not served."""
    parallel = vllm_config.parallel_config
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError(
            "this engine has no KV cache (it may be the encoder of a multimodal model): there is nothing to keep; "
            "start it without --kv-transfer-config"
        )
    refuse_unsupported(vllm_config)
    groups = [(index, to_block_group(group)) for index, group in enumerate(kv_cache_config.kv_cache_groups)]
    block_size = _block_size(kv_cache_config)
    groups.sort(key=lambda entry: entry[1].window_blocks is not None)
    speculative = vllm_config.speculative_config
    return EngineShape(
        block_size=block_size,
        num_blocks=kv_cache_config.num_blocks,
        layer_names=tuple(t.shared_by[0] for t in kv_cache_config.kv_cache_tensors if getattr(t, "shared_by", ())),
        world_size=parallel.world_size,
        rank=parallel.rank,
        groups=tuple(group for _, group in groups),
        group_ids=tuple(index for index, _ in groups),
        group_kinds=tuple(_event_kind(kv_cache_config.kv_cache_groups[index].kv_cache_spec) for index, _ in groups),
        publishes_events=bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False)),
        recomputes_ahead=bool(vllm_config.scheduler_config.async_scheduling)
        and getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "") == "recompute",
        drop_last_block=speculative is not None and _drops_last_block(speculative),
        # Freshly allocated blocks are zeroed before a connector can order anything in front of that.
        unpins_when_idle=not getattr(kv_cache_config, "needs_kv_cache_zeroing", False),
        engine_id=str(getattr(vllm_config.kv_transfer_config, "engine_id", None) or ""),
    )


def _has_stable_hashes(vllm_config: VllmConfig) -> bool:
    """Whether another engine gives a block the same name. Newer versions do so by themselves with SHA-256."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return True
    is_new = hasattr(kv_cache_utils, "resolve_none_hash_seed")
    return is_new and "sha256" in str(vllm_config.cache_config.prefix_caching_hash_algo)


def layer_specs(spec: Any) -> Iterable[Any]:
    """The layers' own specs: a group of one type with different sizes wraps one for each layer."""
    wrapped = getattr(spec, "kv_cache_specs", None)
    return wrapped.values() if wrapped is not None else (spec,)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ConfigError, with the reason and the fix, for what no engine may be started with."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching=False: blocks have no names without it; leave prefix caching on")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name}={size} is not supported: a block then holds a part of its tokens; set it to 1")
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported: loads and saves of several "
            "stages have not been shown to agree; set it to 1 and use tensor_parallel_size"
        )


def _block_size(kv_cache_config: KVCacheConfig) -> int:
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"block sizes {sizes} in one model are not supported: layers with states of different sizes get them; "
            "use --disable-hybrid-kv-cache-manager where the model allows it"
        )
    finer = getattr(kv_cache_config, "hash_block_size", None)
    if finer is not None and finer != sizes[0]:
        raise ConfigError(f"hash_block_size={finer} is not supported with block_size={sizes[0]}: make them equal")
    return int(sizes[0])


def to_block_group(group: Any) -> BlockGroup:
    """Our words for a group of vLLM's. Raises ConfigError, with the reason, for one that is not served."""
    specs = list(layer_specs(group.kv_cache_spec))
    layer = group.layer_names[0] if group.layer_names else "?"
    for spec in specs:
        reason = _refusal(group, spec)
        if reason:
            raise ConfigError(f"layer {layer!r}: {type(spec).__name__} is not supported: {reason}")
    if isinstance(specs[0], kv_cache_interface.SlidingWindowSpec):
        kept = max(spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0) for spec in specs)
        return BlockGroup(window_blocks=-(-kept // specs[0].block_size))
    return BlockGroup()


def _refusal(group: Any, spec: Any) -> str:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "its blocks are not in the device's pool"
    if not getattr(spec, "prefix_cacheable", True):
        return "vLLM itself does not cache prefixes of it"
    if getattr(spec, "prefix_replay_tokens", 0):
        return "it computes the end of every hit again"
    if not any(type(spec) is getattr(kv_cache_interface, name, None) for name in _SERVED):
        return _REFUSED.get(type(spec).__name__, "only full attention, MLA and sliding windows of plain attention are")
    return ""


def _event_kind(spec: Any) -> Mapping[str, Any]:
    """Fields of vLLM's `BlockStored` by which routers tell groups apart, where this version has them."""
    if not hasattr(kv_cache_interface, "get_kv_cache_spec_kind"):
        return {}
    return {
        "kv_cache_spec_kind": kv_cache_interface.get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": kv_cache_interface.get_kv_cache_spec_sliding_window(spec),
    }


def _drops_last_block(speculative: Any) -> bool:
    """Whether the last block of a hit is computed again, because a draft layer's last row depends on the next token."""
    if hasattr(speculative, "use_eagle_block_drop"):
        return bool(speculative.use_eagle_block_drop())
    return bool(speculative.use_eagle())
