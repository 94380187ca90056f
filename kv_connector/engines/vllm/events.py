"""Our events as vLLM publishes them to routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ...events import BlockRemoved, BlockStored, CacheEvent
from ...index import split_key
from .specs import EngineShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...types import BlockHash

MEDIUM_HOST = "CPU"
"""vLLM's name for host memory (`kv_events.MEDIUM_CPU`, where a version has it)."""


def to_vllm(events: Iterable[CacheEvent], shape: EngineShape) -> Iterator[kv_events.KVCacheEvent]:
    """`BlockStored` and `BlockRemoved` with medium CPU; a cleared tier is `AllBlocksCleared`.

    A stored block is named by its hash, which vLLM has published with tokens and parent when it was computed.
    """
    for event in events:
        if isinstance(event, BlockStored):
            for group, hashes in _by_group(event.block_hashes):
                yield kv_events.BlockStored(
                    block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=shape.block_size,
                    lora_id=None,
                    medium=MEDIUM_HOST,
                    lora_name=None,
                    group_idx=shape.group_ids[group],
                )
        elif isinstance(event, BlockRemoved):
            for group, hashes in _by_group(event.block_hashes):
                yield kv_events.BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
                    medium=MEDIUM_HOST,
                    group_idx=shape.group_ids[group],
                )
        else:
            yield kv_events.AllBlocksCleared()


def _by_group(keys: Iterable[BlockHash]) -> list[tuple[int, list[BlockHash]]]:
    groups: dict[int, list[BlockHash]] = {}
    for key in keys:
        block_hash, group = split_key(key)
        groups.setdefault(group, []).append(block_hash)
    return sorted(groups.items())
