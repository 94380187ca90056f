"""`TieredKVConnector`: a role switch and translation. Every decision is made in the halves.

One instance lives in the scheduler's process and one in each worker. Calls that only newer versions of vLLM make are
defined for all: an older one leaves them out, and the others are enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.platforms import current_platform

from ...config import Config, HostFormName, PeerRoute
from ...errors import ConfigError, KVConnectorError
from .identity import read_backend, read_identity
from .specs import read_config, read_shape, refuse_peers_beyond_full_attention, warn_of_uneven_states
from .stats import PromMetrics, TieredStats

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .scheduler import SchedulerRole
    from .steps import PlanMetadata, ReportMetadata
    from .worker import WorkerRole

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # older versions do not tell sources apart
    CacheHitSource = None

KNOWS_BLOCK_MAJOR = find_spec("vllm.v1.kv_cache_layout") is not None
"""Whether this vLLM names layouts by the order of their dimensions."""

# vLLM sets up only its own logger: ours speaks through it, in its format and at its level.
logging.getLogger("kv_connector").parent = logging.getLogger("vllm")


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache on pinned host memory and brings it back. See docs/vllm.md for its settings."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError for settings or a model that are not supported, before any memory is taken."""
        super().__init__(vllm_config, role, kv_cache_config)
        config, shape = read_config(vllm_config), read_shape(vllm_config, kv_cache_config)
        refuse_peers_beyond_full_attention(config, shape)
        is_shared = config.storage is not None or config.peer is not None
        identity = read_identity(vllm_config, kv_cache_config, shape.block_size) if is_shared else None
        self._scheduler_role: SchedulerRole | None = None
        self._worker_role: WorkerRole | None = None
        if role is KVConnectorRole.SCHEDULER:
            # vLLM 0.32 and newer say where their own hits may end: here, inside of blocks, at any hash.
            hit_tokens = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
            ends_within = hit_tokens == shape.block_size < max(shape.block_sizes)
            if ends_within and (is_shared or shape.drop_last_block):
                warn_of_uneven_states(shape)
            self._scheduler_role = _scheduler_role(vllm_config, config, shape, identity, ends_within)
        else:
            from .worker import WorkerRole

            if config.host_form is HostFormName.AUTO and identity is None:
                with suppress(ConfigError):  # of what has no name nothing is remembered
                    identity = read_identity(vllm_config, kv_cache_config, shape.block_size)
            self._worker_role = WorkerRole(config, shape, identity, read_backend(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: a full graph is replayed behind its load. With such graphs, the default on GPUs, vLLM asks before it
        starts anything, so what is wrong in the settings is told here, and not minutes later in front of a model that
        was loaded in vain. Raises ConfigError."""
        Config.from_mapping(extra_config or {})
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Asked by vLLM 0.33 and newer. After a sleep the cache is at the same addresses, which is all that copies use,
        but in other physical memory, which a NIC's registration does not follow."""
        peer = Config.from_mapping(kv_transfer_config.kv_connector_extra_config or {}).peer
        return peer is None or peer.kind != "nixl" or peer.route is PeerRoute.STAGED

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A preference: vLLM ignores it, with a warning, where an attention backend does not offer it. Beside recurrent
        states some backends split attention's blocks for their kernels, and vLLM does not start with a block's layers
        contiguous then."""
        if not KNOWS_BLOCK_MAJOR or current_platform.is_cpu() or vllm_config.model_config.is_hybrid:
            return None
        return "BLNHC" if read_config(vllm_config).block_major else None

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """The same question in older versions."""
        return read_config(self._vllm_config).block_major

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may drop blocks."""
        return False

    @property
    def _scheduler(self) -> SchedulerRole:
        if self._scheduler_role is None:
            raise KVConnectorError("a scheduler-side call on the worker's connector")
        return self._scheduler_role

    @property
    def _worker(self) -> WorkerRole:
        if self._worker_role is None:
            raise KVConnectorError("a worker-side call on the scheduler's connector")
        return self._worker_role

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._scheduler.set_xfer_handshake_metadata(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by stage of a pipeline and rank in it, as vLLM 0.25 and newer call it."""
        self._scheduler.set_xfer_handshake_metadata(metadata.values())

    def on_new_request(self, request: Request) -> None:
        self._scheduler.half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """By `CacheHitSource`; called right behind `update_state_after_alloc`, by versions that have it."""
        sources = self._scheduler.hit_sources(num_external_tokens)
        return {CacheHitSource(source): count for source, count in sources.items()}

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: a load fills whole blocks, so none needs zeroing before it."""
        return self._scheduler.shape.group_ids

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.half.has_pending_block_frees()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        return self._scheduler.reset_cache()

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        """Older versions, where the layers of a block are contiguous: one tensor for all of them."""
        self._worker.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def handle_preemptions(self, kv_connector_metadata: PlanMetadata) -> None:
        self._worker.half.handle_preemptions(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: PlanMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.half.bind_connector_metadata(connector_metadata.plan)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.half.clear_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_load_kv(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.half.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the last layer; computed layers may be sent to other engines already."""
        self._worker.half.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.half.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, _ = self._worker.get_finished()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, with the failed ones; called by versions that know of them."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        received, failed = self._worker.get_finished()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> ReportMetadata:
        return self._worker.build_connector_worker_meta()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None after a sleep, and under MultiConnector: it hands every child what the first one has, and others need
        theirs."""
        return self._worker.get_handshake_metadata() if get_kv_transfer_group() is self else None

    # Both sides.

    def get_kv_connector_stats(self) -> TieredStats | None:
        if self._scheduler_role is not None:
            return self._scheduler_role.take_stats()
        return self._worker.take_stats()

    def shutdown(self) -> None:
        if self._scheduler_role is not None:
            self._scheduler_role.shutdown()
        if self._worker_role is not None:
            self._worker_role.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredStats:
        return TieredStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _scheduler_role(vllm_config: VllmConfig, config: Config, *args: Any) -> SchedulerRole:
    """With the admin endpoint beside it, where one is asked for."""
    if config.admin is None:
        from .scheduler import SchedulerRole

        return SchedulerRole(config, *args)
    from .admin import SteeredRole

    return SteeredRole(config.admin, vllm_config, config, *args)
