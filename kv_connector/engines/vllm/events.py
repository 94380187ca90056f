"""Our events as vLLM publishes them to routers.

A router names a block by its tokens, its parent and what else went into vLLM's hash, so it needs all of them to know
what an event is about. Our halves know hashes only; what they stand for is noted here while their requests live.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from ...events import BlockRemoved, BlockStored, CacheEvent
from ...index import split_key
from ...types import Tier
from .specs import EngineShape

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ...types import BlockHash

_MEDIA = {Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
"""vLLM's names (`kv_events.MEDIUM_CPU`, `MEDIUM_STORAGE`, where a version has them)."""
_to_event_extra_keys = getattr(kv_cache_utils, "to_event_extra_keys", list)  # older versions publish them as they are


@dataclass(frozen=True, slots=True)
class _Content:
    """What a block's hash stands for."""

    parent: BlockHash | None
    tokens: array[int]
    adapter: tuple[int, str] | None
    extra_keys: tuple[Any, ...] | None


class EventFeed:
    """Translates events, and keeps the tokens of blocks of live requests, of the device as far as vLLM may still have
    them, and of the host: 340 bytes for a block of 16 tokens, 420 if it is on both. Any other block is published by its
    hash alone.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._sizes = sorted(set(shape.block_sizes))
        self._most = 2 * shape.num_blocks * len(self._sizes)
        # By hash and tokens of a block, least recently noted first.
        self._contents: OrderedDict[tuple[BlockHash, int], _Content] = OrderedDict()
        self._on_host: dict[tuple[BlockHash, int], _Content] = {}  # by hash and group
        # By request and tokens of a block: blocks, and multimodal items that ended in them.
        self._noted: dict[str, dict[int, tuple[int, int]]] = {}

    def note(self, request: Request) -> None:
        """Take note of the request's blocks that are new since the last call."""
        noted = self._noted.setdefault(request.request_id, {})
        for size in self._sizes:
            noted[size] = self._note(request, size, *noted.get(size, (0, 0)))
        while len(self._contents) > self._most:
            self._contents.popitem(last=False)

    def _note(self, request: Request, size: int, index: int, item: int) -> tuple[int, int]:
        """Note blocks of `size` tokens from the block `index` on; returns what `_noted` has of them."""
        per_block = size // self._shape.block_size
        stop = len(request.block_hashes) // per_block
        if index >= stop:
            return index, item
        ends = request.block_hashes[(index + 1) * per_block - 1 : stop * per_block : per_block]
        parent = request.block_hashes[index * per_block - 1] if index else None
        lora = request.lora_request
        adapter = (lora.adapter_id, lora.name) if lora else None
        for i, block_hash in enumerate(ends, index):
            start = i * size
            keys, item = generate_block_hash_extra_keys(request, start, start + size, item)
            tokens = array("i", request.all_token_ids[start : start + size])
            self._contents[block_hash, size] = _Content(parent, tokens, adapter, keys)
            self._contents.move_to_end((block_hash, size))
            parent = block_hash
        return stop, item

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._noted.pop(request_id, None)

    def to_vllm(self, events: Iterable[CacheEvent]) -> Iterator[kv_events.KVCacheEvent]:
        """`BlockStored` and `BlockRemoved` with medium CPU or STORAGE. vLLM has no event that clears one medium: after
        an overflow, tens of thousands of events between two steps, `AllBlocksCleared` clears all media."""
        for event in events:
            if isinstance(event, BlockStored):
                for group, hashes in _by_group(event.block_hashes):
                    if event.tier is Tier.HOST:
                        self._keep(group, hashes)
                    yield from (self._stored(group, run, event.tier) for run in self._runs(group, hashes))
            elif isinstance(event, BlockRemoved):
                for group, hashes in _by_group(event.block_hashes):
                    if event.tier is Tier.HOST:
                        self._let_go(group, hashes)
                    yield kv_events.BlockRemoved(
                        block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
                        medium=_MEDIA[event.tier],
                        group_idx=self._shape.group_ids[group],
                    )
            else:
                self._on_host.clear()
                yield kv_events.AllBlocksCleared()

    def _content(self, group: int, block_hash: BlockHash) -> _Content | None:
        noted = self._contents.get((block_hash, self._shape.block_sizes[group]))
        return noted or self._on_host.get((block_hash, group))

    def _keep(self, group: int, hashes: Iterable[BlockHash]) -> None:
        """Storage may be told to write them long after their request."""
        contents = ((block_hash, self._content(group, block_hash)) for block_hash in hashes)
        self._on_host.update({(block_hash, group): content for block_hash, content in contents if content is not None})

    def _let_go(self, group: int, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._on_host.pop((block_hash, group), None)

    def _runs(self, group: int, hashes: Iterable[BlockHash]) -> Iterator[list[BlockHash]]:
        """Cut into chains: one event names the parent of its first block only. Blocks nobody knows are a chain."""
        run: list[BlockHash] = []
        for block_hash in hashes:
            content = self._content(group, block_hash)
            last = self._content(group, run[-1]) if run else None
            continues = content.parent == run[-1] and content.adapter == last.adapter if content and last else False
            if run and not continues and (content is not None or last is not None):
                yield run
                run = []
            run.append(block_hash)
        if run:
            yield run

    def _stored(self, group: int, hashes: Sequence[BlockHash], tier: Tier) -> kv_events.BlockStored:
        found = [self._content(group, block_hash) for block_hash in hashes]
        known = [content for content in found if content is not None]
        first = known[0] if known else None
        parent, adapter = (first.parent, first.adapter) if first is not None else (None, None)
        return kv_events.BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
            parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
            token_ids=[token for content in known for token in content.tokens],
            block_size=self._shape.block_sizes[group],
            lora_id=adapter[0] if adapter else None,
            medium=_MEDIA[tier],
            lora_name=adapter[1] if adapter else None,
            extra_keys=_to_event_extra_keys([content.extra_keys for content in known]) or None,
            group_idx=self._shape.group_ids[group],
            **self._shape.group_kinds[group],
        )


def _by_group(keys: Iterable[BlockHash]) -> list[tuple[int, list[BlockHash]]]:
    groups: dict[int, list[BlockHash]] = {}
    for key in keys:
        block_hash, group = split_key(key)
        groups.setdefault(group, []).append(block_hash)
    return sorted(groups.items())
