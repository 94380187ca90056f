"""`TieredKVLinker`: SGLang's calls, translated. Every decision is made in the halves.

    SGLang calls, on each rank                 what follows                                       pages
    ------------------------------------------------------------------------------------------------------------------
    num_completed_offloads   once a round      a step without requests; ranks exchange reports;
                                               hold_computed, a step that saves what was offered  locked by SGLang
    lookup(rid, keys)        before admission  note_asked the first time,                         promised: host leased
                                               get_num_new_matched_tokens
    load(rid, keys, slots)   admission         queued                                             promised
    start_layer_wise_loading batch complete    update_state_after_alloc, build_connector_meta,    leased for the load
                                               start_load_kv
    counter.wait_until(layer) forward pass     wait_for_layer_load: the stream waits
    finish_layer_wise_loading forward launched wait_for_save and the step's report                the request's
    offload(keys, slots)     insert into tree  an offer, until it is known which pages these are  locked by SGLang
    pop_completed_offload    the save ended                                                       unlocked

SGLang tells of pages and never of a request's whole prefix: see `index/fragments.py`. What is in front of pages that it
offers is known from lookups (`PageOrder`). What it offers is never called stored for good: it offers pages anew
whenever a request uses them. So each use counts, and what the host has let go of meanwhile is saved again. What a
request misses counts when it is looked up: once it has computed it, its pages are like any others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from ...base import SchedulerOutput
from ...types import BlockHash
from ..settings import needs_identity
from .fragments import Fragment, Promises, page_hashes
from .identity import read_backend, read_identity
from .launch import read_settings, refuse_unsupported
from .offers import Offers
from .pools import DevicePages, PageIds
from .ranks import Ranks
from .replica import Replica

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger("kv_connector.sglang")
# SGLang sets up the root logger of each of its processes at the level that it was given.

_QUIET_ROUNDS = 64
"""Rounds of SGLang's scheduler from one step to the next where nothing is under way."""
_NAP_SECONDS = 5e-4


class LayerWaits:
    """`layer_done_counter`: pools call it in front of each read of a layer. The stream waits, the host does not."""

    def __init__(self, replica: Replica, layer_names: Sequence[str]) -> None:
        self.num_layers = len(layer_names)
        self.consumer_index = -1
        """The load that the batch being run waits for; -1 for none."""
        self._layer_names = layer_names
        self._replica = replica

    def set_consumer(self, index: int) -> None:
        """A batch is about to run that waits for this load."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Make the current stream wait for the layer's share of the load, if the batch being run has one."""
        if self._replica.is_loading:  # most have none, and ask twice a layer
            self._replica.worker.wait_for_layer_load(self._layer_names[layer])


class TieredKVLinker(UnifiedCacheLinker):
    """Keeps the KV cache on pinned host memory and brings it back. See docs/sglang.md for its settings."""

    def __init__(
        self,
        server_args: ServerArgs,
        params: CacheInitParams,
        *,
        components: Collection[ComponentType],
        extra_config: Mapping[str, Any],
        forward_stream: Any = None,
    ) -> None:
        """Raises ConfigError for settings or a model that are not supported, before any memory is taken."""
        settings = read_settings(extra_config)
        refuse_unsupported(params, components)
        config, self._keep_on_flush = settings.config, settings.keep_on_flush
        self.forward_stream = forward_stream
        self._pages = pages = DevicePages(params.token_to_kv_pool_allocator.get_kvcache(), params.page_size)
        ranks = Ranks(params.attn_tp_cache_group or params.tp_cache_group)
        dtype = next(iter(pages.tensors.values()))[0].dtype
        identity = read_identity(params.page_size, ranks.count, str(dtype)) if needs_identity(config) else None
        self._replica = Replica(config, pages, ranks, identity, read_backend(), params.enable_metrics)
        self._half = self._replica.scheduler
        self._promises = Promises(self._half.tree, self._half.host, self._replica.clock)
        self._offers = Offers(self._replica, pages, self._behind_forward)
        self._queued: dict[str, tuple[Fragment, PageIds]] = {}  # promised, and the pages that it goes to, by request
        self._loading: list[Fragment] = []  # of the step that has begun
        self._has_lost = False  # one of them, before it began
        self._num_loads = 0
        self._num_rounds = 0
        self._is_behind_load = False  # one was launched, and no round has begun since
        self._has_left_reports = False  # the last round has
        self.layer_done_counter = LayerWaits(self._replica, list(pages.tensors))
        self.pools = {PoolName.KV: pages}
        self._replica.advance()
        logger.info("kv_connector: rank %d: %s", ranks.rank, self._replica.worker.describe())

    # Before and at admission.

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """How many leading pages can be loaded; they are leased for the request. SGLang needs the same number on all
        ranks, which the replicas give by themselves."""
        self._hear_reports()
        fragment = self._fragment(rid, page_hashes(transfers[0].keys))
        while (found := self._half.get_num_new_matched_tokens(fragment, 0)[0]) is None:
            time.sleep(_NAP_SECONDS)
            self._replica.advance()
        num_pages = found // fragment.page_size
        self._promises.make(fragment, num_pages)
        return [num_pages] if num_pages else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue the load of the promised pages into these slots. False, on all ranks alike, if the promise has
        lapsed."""
        self._hear_reports()
        slots, hashes = transfers[0].device_indices, page_hashes(transfers[0].keys)
        fragment = self._promises.fragment(rid)
        if fragment is None or slots is None or fragment.block_hashes[: len(hashes)] != hashes or rid in self._queued:
            return False
        if slots.numel() != len(hashes) * fragment.page_size or self._promises.num_kept(rid) < len(hashes):
            return False
        self._promises.keep(rid)
        self._queued[rid] = fragment, self._pages.ids_of(slots)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """The request has ended: drop its load, if that has not begun."""
        fragment, _ = self._queued.pop(rid, (None, ()))
        if fragment is None:
            return False
        self._promises.end(rid)
        self._replica.finish([fragment])
        return True

    # Around the forward pass.

    def start_layer_wise_loading(self) -> int:
        """Submit the queued loads, after the running forward pass, which may still write to pages that SGLang has
        freed. Returns the number of the load, or -1 for none."""
        if not self._queued:
            return -1
        queued, self._queued = list(self._queued.values()), {}
        num_kept = sum(self._plan_load(fragment, self._pages.read(pages)) for fragment, pages in queued)
        self._has_lost = num_kept < len(queued)
        # As far as it is known here: what others of the batch compute, who load nothing, is not.
        num_computed = sum(fragment.num_tokens - pages.num_tokens for fragment, pages in queued)
        with self._behind_forward():
            self._replica.begin(SchedulerOutput(num_untold_tokens=num_computed))
        self._num_loads += 1
        return self._num_loads

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Called after the launch of the forward pass: whether all loads that it waits for have succeeded, or will for
        certain."""
        if not self._replica.is_loading:
            return True
        with self._behind_forward():  # whose layers have waited for theirs: nobody else is to
            has_come = self._replica.end()
        self._end_loading()
        self._is_behind_load = True
        return has_come and not self._has_lost

    # After the forward pass.

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Offer these pages for saving. True if SGLang is to lock them until they are saved, as the host lacks some.
        The same on all ranks."""
        return self._offers.add(transfers[0].keys, transfers[0].device_indices)

    def num_completed_offloads(self) -> int:
        """Called once in each round of SGLang's scheduler: exchange reports with the other ranks, and plan saves of the
        offered pages. Returns how many offers have completed.

        The first tokens of requests that have loaded wait for the round behind their launch to end: it leaves reports
        to the next one, or to the first look-up or load in front of that."""
        self._num_rounds += 1
        self._offers.begin_round()
        self._give_up(self._promises.lapse())  # first: what is taken may need their room
        is_quiet = not self._num_rounds % _QUIET_ROUNDS
        if is_quiet:
            self._replica.learn()  # what nobody has computed
        is_due = is_quiet or len(self._offers) > 0
        self._has_left_reports = self._is_behind_load and not (is_due or self._has_left_reports)
        self._is_behind_load = False
        if is_due or (not self._has_left_reports and self._half.has_pending_push_work()):
            self._offers.advance()
        return self._offers.num_saved

    def pop_completed_offload(self) -> bool:
        """Unlock the pages of one offer. Returns False, so that SGLang offers them again when they are used, as the
        host may evict them."""
        self._offers.unlock()
        return False

    # The engine as a whole.

    def reset(self) -> None:
        """Block until no copy is in flight and drop the cache, unless `keep_on_flush`."""
        if self._replica.is_loading:
            self._replica.end()
        self._end_loading()
        self._queued.clear()
        self._offers.clear()
        self._replica.finish(self._promises.clear())
        self._replica.worker.drain()
        self._replica.learn()
        self._replica.advance()
        self._offers.unlock_all()
        if not self._keep_on_flush:
            self._half.reset_cache()

    def close(self) -> None:
        """Block until copies have ended and free host memory. Idempotent."""
        self._replica.worker.shutdown()
        self._half.shutdown()
        logger.info("kv_connector: %s", self.stats())

    def stats(self) -> dict[str, float]:
        """Counters and gauges since the start, by name; the unit is in the name."""
        return dict(self._half.get_kv_connector_stats())

    def _fragment(self, rid: str, hashes: list[BlockHash]) -> Fragment:
        """The one that the request was asked about for before, if it is the same: what storage has of it is on its
        way."""
        known = self._promises.fragment(rid)
        if known is not None and known.block_hashes == hashes:
            return known
        fragment = Fragment(rid, hashes, self._pages.page_size)
        self._offers.show_order(hashes)
        if known is not None:
            self._replica.finish([known])
        # If it ends as before, it is the same one, and the device has others of its pages by now: it has waited as long
        # as it has.
        if known is None or known.block_hashes[-1] != hashes[-1]:
            self._promises.end(rid)
            self._replica.note_asked(hashes)
            self._offers.show_asked(hashes)
        return fragment

    def _hear_reports(self) -> None:
        """Those that the round has left, in front of whatever goes by them: nobody else is promised, or given, what has
        failed to load."""
        if self._has_left_reports:
            self._has_left_reports = False
            self._replica.advance()

    def _behind_forward(self) -> AbstractContextManager[object]:
        """Copies come behind the forward pass that is under way, on a stream of its own or on this one: it may be
        writing what saves read, and to pages that loads are given."""
        if self.forward_stream is None or self._pages.device.type != "cuda":
            return nullcontext()
        self.forward_stream.wait_stream(torch.cuda.current_stream(self._pages.device))
        return torch.cuda.stream(self.forward_stream)

    def _give_up(self, fragments: Sequence[Fragment]) -> None:
        """These have loaded nothing: they are computed by now, or were aborted."""
        for fragment in fragments:
            self._half.update_state_after_alloc(fragment, [[]], 0, 0)
        self._replica.finish(fragments)

    def _plan_load(self, fragment: Fragment, pages: list[int] | None) -> bool:
        """For the next step. False where the host's copies are not trusted any more, as another load of them has failed
        since the request was told that they are loaded: it gets none."""
        is_kept = pages is not None and self._promises.num_kept(fragment.request_id) >= len(pages)
        pages = pages or []
        num_tokens = len(pages) * fragment.page_size if is_kept else 0
        self._half.update_state_after_alloc(fragment, [pages], 0, num_tokens)
        self._promises.end(fragment.request_id)
        self._loading.append(fragment)
        return is_kept

    def _end_loading(self) -> None:
        self._replica.finish(self._loading)
        self._loading = []
