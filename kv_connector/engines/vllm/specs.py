"""What vLLM's configuration means for the halves; refuses at start-up what is not supported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.core import kv_cache_utils

from ...config import Config, PeerRole
from ...errors import ConfigError
from ...index import BlockGroup, may_truncate
from .groups import num_replicas, read_groups, read_kv_heads
from .steps import TELLS_FAILED_REQUESTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kv_connector.vllm")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the halves need to know of the engine.

    `block_size`: tokens of a block hash; a block of group g has `groups[g].hashes_per_block` of them, over all ranks.
    `layer_names` are those of the cache's tensors, one for each, as cross-layer tensors have them.
    `group_ids[g]` is vLLM's number of our block group g; ours begin with full attention, whose prefix is the longest.
    `takes_nothing_back`: it plans a step of a request before it knows how the last one ended, or the next chunk of its
    prompt, as pipelines do; or its runner counts a request's tokens itself, and is not told that some were not computed
    after all (Model Runner V2, vLLM's issue 49250). `recomputes`: it is to compute what was not loaded.
    The caches of `num_replicas` ranks, from a multiple of that on, hold the same bytes.
    `group_kinds[g]` is what this vLLM's events say of the group beside its number. `publishes_events`: to anybody.
    `kv_heads` are this rank's, by layer, where it is known how they lie: see `read_kv_heads`.
    """

    block_size: int
    num_blocks: int
    layer_names: tuple[str, ...]
    world_size: int
    rank: int
    num_replicas: int
    groups: tuple[BlockGroup, ...]
    group_ids: tuple[int, ...]
    group_kinds: tuple[Mapping[str, Any], ...]
    publishes_events: bool
    takes_nothing_back: bool
    recomputes: bool
    drop_last_block: bool
    kv_heads: Mapping[str, int]
    unpins_when_idle: bool
    engine_id: str

    @property
    def has_states(self) -> bool:
        """Whether any layer is recurrent."""
        return any(group.states_are_told for group in self.groups)

    @property
    def recomputes_wrongly(self) -> bool:
        """Whether it is to compute what a step has not loaded, and goes on behind it instead."""
        return self.recomputes and self.takes_nothing_back

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by our groups."""
        return tuple(self.block_size * group.hashes_per_block for group in self.groups)


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
    config = _with_role(config, str(vllm_config.kv_transfer_config.kv_role))
    return _of_replica(config, vllm_config)


def _with_role(config: Config, kv_role: str) -> Config:
    """vLLM's `kv_role` says what the engine does for others, unless our own setting does. Without `peer`, nothing."""
    roles = {"kv_producer": PeerRole.PRODUCER, "kv_consumer": PeerRole.CONSUMER}
    if config.peer is None or kv_role not in roles or config.peer.role is not PeerRole.BOTH:
        return config
    return replace(config, peer=replace(config.peer, role=roles[kv_role]))


def _of_replica(config: Config, vllm_config: VllmConfig) -> Config:
    """Data-parallel engines are started with one configuration: their ranks listen at ports that follow each other."""
    if config.peer is None or not config.peer.port:
        return config
    parallel = vllm_config.parallel_config
    port = config.peer.port + parallel.data_parallel_index * parallel.world_size
    return replace(config, peer=replace(config.peer, port=port))


def read_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineShape:
    """The engine's shape. Raises ConfigError, naming the reason and what would help, for what is not supported."""
    parallel = vllm_config.parallel_config
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError(
            "this engine has no KV cache (it may be the encoder of a multimodal model): there is nothing to keep; "
            "start it without --kv-transfer-config"
        )
    refuse_unsupported(vllm_config)
    block_size, served = read_groups(kv_cache_config, vllm_config)
    speculative = vllm_config.speculative_config
    return EngineShape(
        block_size=block_size,
        num_blocks=kv_cache_config.num_blocks,
        layer_names=tuple(t.shared_by[0] for t in kv_cache_config.kv_cache_tensors if getattr(t, "shared_by", ())),
        world_size=parallel.world_size,
        rank=parallel.rank,
        num_replicas=num_replicas(kv_cache_config, vllm_config),
        groups=tuple(entry.group for entry in served),
        group_ids=tuple(entry.group_id for entry in served),
        group_kinds=tuple(entry.event_kind for entry in served),
        publishes_events=bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False)),
        takes_nothing_back=bool(vllm_config.scheduler_config.async_scheduling)
        or parallel.pipeline_parallel_size > 1
        or runs_model_runner_v2(vllm_config),
        recomputes=getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "") == "recompute",
        drop_last_block=speculative is not None and _drops_last_block(speculative),
        kv_heads=read_kv_heads(kv_cache_config),
        # Freshly allocated blocks are zeroed before a connector can order anything in front of that.
        unpins_when_idle=not getattr(kv_cache_config, "needs_kv_cache_zeroing", False),
        engine_id=str(getattr(vllm_config.kv_transfer_config, "engine_id", None) or ""),
    )


def runs_model_runner_v2(vllm_config: VllmConfig) -> bool:
    """Whether workers run vLLM's Model Runner V2: newer versions choose it themselves on GPUs, older ones do as the
    environment says."""
    asked_for = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False)
    return bool(getattr(vllm_config, "use_v2_model_runner", asked_for))


def _has_stable_hashes(vllm_config: VllmConfig) -> bool:
    """Whether another engine gives a block the same name. Newer versions do so by themselves with SHA-256."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return True
    is_new = hasattr(kv_cache_utils, "resolve_none_hash_seed")
    return is_new and "sha256" in str(vllm_config.cache_config.prefix_caching_hash_algo)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ConfigError, with the reason and the fix, for what the connector does not support in an engine."""
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching=False: vLLM does not hash blocks without it; leave prefix caching on")


def refuse_peers_beyond_full_attention(config: Config, shape: EngineShape) -> None:
    """Raise ConfigError for `peer` with block groups whose KV transfers this vLLM does not survive where one fails."""
    if config.peer is None or TELLS_FAILED_REQUESTS or may_truncate(shape.groups):
        return
    if len(shape.groups) > 1:
        raise ConfigError(
            f"peer with {len(shape.groups)} block groups needs vLLM 0.32 or newer, since older ones crash where a "
            "KV transfer fails: use that, leave peer out, or try --disable-hybrid-kv-cache-manager"
        )
    raise ConfigError(
        "peer with sliding windows in all layers needs vLLM 0.32 or newer, since older ones crash, or give wrong "
        "tokens, where a KV transfer fails: use that, or leave peer out"
    )


def warn_of_uneven_states(shape: EngineShape) -> None:
    """Where hits end inside of blocks and only those that end with blocks of every layer are of use: vLLM keeps a state
    where a prompt's hit ends, and of blocks of several sizes some end in front of that, where the others keep none.
    """
    groups = zip(shape.groups, shape.block_sizes, strict=True)
    sizes = sorted({size for group, size in groups if group.states_are_told})
    if len(sizes) > 1:
        logger.warning(
            "recurrent states in blocks of %s tokens, as vLLM makes them where a pipeline's stage has no attention: "
            "what is cached ends inside of blocks, which storage, other engines and drafts do not take, so they may "
            "find nothing; with --block-size %d all blocks are alike",
            " and ".join(map(str, sizes)),
            sizes[-1],
        )


def _drops_last_block(speculative: Any) -> bool:
    """Whether the last block of a hit is computed again, because a draft layer's last row depends on the next token."""
    if hasattr(speculative, "use_eagle_block_drop"):
        return bool(speculative.use_eagle_block_drop())
    return bool(speculative.use_eagle())
