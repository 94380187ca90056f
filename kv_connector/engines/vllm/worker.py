"""The worker half behind vLLM's calls."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from ...build import build_worker
from ...config import Config
from ...index import CacheIdentity
from .specs import EngineShape
from .stats import TieredStats
from .steps import TELLS_FAILED_REQUESTS, ReadyMetadata, ReportMetadata

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend

logger = logging.getLogger("kv_connector.vllm")

NEEDS_WORKER_STATS = not hasattr(base.KVConnectorBase_V1, "on_new_request")
"""Whether this vLLM asks the scheduler side for statistics only where a worker had some (0.20)."""


_HEAD_DIM = 1


class WorkerRole:
    """Translates; `half` moves the bytes."""

    def __init__(self, config: Config, shape: EngineShape, identity: CacheIdentity | None, backend: str) -> None:
        self._shape = shape
        # A failed load in front of a step is what vLLM takes worst: it may kill the engine under async scheduling.
        self.half = build_worker(
            config,
            shape.rank,
            shape.world_size,
            identity=identity,
            backend=backend,
            groups=shape.groups,
            engine_id=shape.engine_id,
            num_replicas=shape.num_replicas,
            exchange=partial(_exchange, shape.num_replicas),
            exchange_all=_exchange_all,
            fails_by_request=TELLS_FAILED_REQUESTS,
            retries_loads=True,
        )
        self._is_empty_step = False
        self._has_told_ready = False

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        ordered = dict(sorted(kv_caches.items(), key=lambda item: _forward_order(item[0])))
        dims = {name: _block_dim(entry, self._shape.num_blocks) for name, entry in ordered.items()}
        kv_heads = self._shape.kv_heads
        heads = {name: _HEAD_DIM for name, entry in ordered.items() if _has_heads(entry, kv_heads.get(name))}
        self.half.register_kv_caches(ordered, self._shape.num_blocks, dims, heads)
        logger.info("kv_connector: rank %d: %s", self._shape.rank, self.half.describe())

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        """`kv_cache` has the dimensions of one layer's cache and one for layers, in the order they lie in memory."""
        try:
            order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        except (AttributeError, NotImplementedError):
            order = tuple(range(kv_cache.ndim))
        logical = kv_cache.permute(*(order.index(dim) for dim in range(kv_cache.ndim)))
        self.register_kv_caches(dict(zip(self._shape.layer_names, logical, strict=True)))

    def start_load_kv(self, forward_context: ForwardContext, kwargs: Mapping[str, Any]) -> None:
        """Hooks do not run where a full CUDA graph is replayed, nor where there is no forward pass."""
        self._is_empty_step = forward_context.attn_metadata is None and "attn_metadata" not in kwargs
        mode = getattr(forward_context, "cudagraph_runtime_mode", None)
        self.half.start_load_kv(forward_context.attn_metadata is None or mode is CUDAGraphMode.FULL)

    def get_finished(self) -> tuple[set[str], set[str]]:
        if self._is_empty_step:
            self.half.wait_for_save()  # older versions do not call it where there is no forward pass
        return self.half.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.half.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> ReportMetadata:
        return ReportMetadata((self.half.build_connector_worker_meta(),))

    def get_handshake_metadata(self) -> ReadyMetadata | None:
        """Called between `register_kv_caches` and the first step; None where vLLM 0.33 asks again after a sleep: a
        report says once that a job has ended, and of those given here vLLM hears one where several ranks have one key.
        """
        if self._has_told_ready:
            return None
        self._has_told_ready = True
        return ReadyMetadata(self.half.build_connector_worker_meta())

    def take_stats(self) -> TieredStats | None:
        return TieredStats() if NEEDS_WORKER_STATS else None

    def shutdown(self) -> None:
        self.half.shutdown()
        logger.info("kv_connector: rank %d: host memory released", self._shape.rank)


def _exchange(num_replicas: int, value: object) -> list[object]:
    """What this rank and those that cache the same tell each other, as all ranks of a stage register their caches at
    the same time."""
    group = get_tp_group()
    values = _told(group, value)
    first = group.rank_in_group - group.rank_in_group % num_replicas
    return values[first : first + num_replicas]


def _exchange_all(value: object) -> list[object]:
    """What all ranks tell each other as they register their caches, in the order of ranks: those of each stage first.
    Where ranks share out a context, too, these are not all."""
    stages: list[Any] = _told(get_pp_group(), _told(get_tp_group(), value))
    return [told for stage in stages for told in stage]


def _told(group: Any, value: object) -> list[Any]:
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _forward_order(layer_name: str) -> tuple[int, ...]:
    """Layers run in the order of their numbers; draft layers are numbered behind the model's."""
    return tuple(int(number) for number in re.findall(r"\d+", layer_name))


def _has_heads(entry: torch.Tensor | Sequence[torch.Tensor], num_heads: int | None) -> bool:
    """Whether it is of blocks, so many heads, tokens and content."""
    shape = tuple(entry.shape) if hasattr(entry, "shape") else ()
    return len(shape) == 4 and shape[_HEAD_DIM] == num_heads


def _block_dim(entry: torch.Tensor | Sequence[torch.Tensor], num_blocks: int) -> int:
    """Blocks come first, but for the (2, blocks, ...) of keys and values apart in older versions."""
    shape = tuple(entry.shape) if hasattr(entry, "shape") else ()
    apart = len(shape) == 5 and shape[0] == 2 and shape[1] % num_blocks == 0
    return 1 if apart else 0
