"""Where the tokens of admitted requests came from, counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..index import BlockState, ReuseModel
from .requests import RequestState
from .shared import Shared


class HitCounter:
    """Counts each request once, and each of its known blocks a hit. `learns`: what is asked for is learned from
    admissions; else `note_asked` is told of it."""

    def __init__(self, shared: Shared, reuse: ReuseModel, learns: bool) -> None:
        self._reuse = reuse
        self._learns = learns
        self._tenants = shared.tenants
        self._grouped = shared.grouped
        self._host = shared.host
        self._metrics = shared.metrics
        self._block_size = shared.block_size

    def count(
        self,
        state: RequestState,
        known: Sequence[Sequence[int]],
        num_local_tokens: int,
        num_external_tokens: int,
        num_remote: int,
        num_recomputed: int,
    ) -> None:
        """A request was admitted for the first time. `known` are the nodes it makes use of, by group; of its external
        tokens those of the last `num_remote` blocks come from another engine; `num_recomputed` blocks could have been
        loaded.
        """
        request, metrics, size = state.request, self._metrics, self._block_size
        if self._learns:
            self._learn(known, len(request.block_hashes), num_local_tokens, num_external_tokens)
        metrics.requests += 1
        metrics.queries_tokens += request.num_tokens
        metrics.device_hit_tokens += num_local_tokens
        num_host_tokens = num_external_tokens - num_remote * size
        metrics.host_hit_tokens += num_host_tokens
        self._tenants.count(state.terms.tenant, request.num_tokens, num_local_tokens, num_host_tokens)
        metrics.peer_hit_tokens += num_remote * size
        metrics.recomputed_tokens += num_recomputed * size
        sources = ("device", num_local_tokens), ("host", num_external_tokens - num_remote * size)
        for tier, num_tokens in (*sources, ("peer", num_remote * size)):
            if num_tokens:
                metrics.histograms.observe("hit_tokens", tier, num_tokens)
        size *= self._grouped.groups[0].hashes_per_block
        keys = self._grouped.keys(request.block_hashes, 0)
        for node in self._grouped.tree.match(keys[(num_local_tokens + num_external_tokens) // size :]):
            if self._host.node_state(node) is not BlockState.SWAPPING_TO_HOST:
                break
            metrics.missed_pending_tokens += size

    def note_asked(self, known: Sequence[int], num_blocks: int, num_on_device: int) -> None:
        """A request asks for so many blocks, of which the device holds the first; `known` are the nodes of those that
        are known."""
        self._learn([known], num_blocks, num_on_device * self._block_size, 0)

    def note_used(self, known: Sequence[Sequence[int]]) -> None:
        """Blocks are used that the device holds, by a request that is not told of."""
        if nodes := list(chain.from_iterable(known)):
            self._reuse.used(np.array(nodes, np.intc))

    def _learn(
        self, known: Sequence[Sequence[int]], num_blocks: int, num_local_tokens: int, num_external_tokens: int
    ) -> None:
        if nodes := list(chain.from_iterable(known)):
            is_of_use = self._is_of_use(known, num_local_tokens, num_external_tokens)
            for distance in self._reuse.distances(known[0]):
                self._metrics.histograms.observe("reuse_distance_blocks", "all", distance)
            self._reuse.visited(np.array(nodes, np.intc), is_of_use)
        self._reuse.asked(num_blocks)

    def _is_of_use(
        self, known: Sequence[Sequence[int]], num_local_tokens: int, num_external_tokens: int
    ) -> NDArray[np.bool_]:
        """For each node whether the host is of use for it: behind what the device holds, and for windows wherever it is
        for anything."""
        is_of_use = []
        for group, nodes in zip(self._grouped.groups, known, strict=True):
            if group.is_full:
                first = num_local_tokens // (self._block_size * group.hashes_per_block)
                is_of_use.append(np.arange(len(nodes)) >= first)
            else:
                is_of_use.append(np.full(len(nodes), num_external_tokens > 0))
        return np.concatenate(is_of_use)
