"""Where the tokens of admitted requests came from, counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..base import Request
from ..index import BlockState, ReuseModel
from .shared import Shared


class HitCounter:
    """Counts each request once, and each of its known blocks a hit."""

    def __init__(self, shared: Shared, reuse: ReuseModel) -> None:
        self._reuse = reuse
        self._tree = shared.grouped.tree
        self._host = shared.host
        self._metrics = shared.metrics
        self._block_size = shared.block_size

    def count(
        self,
        request: Request,
        known: Sequence[int],
        num_local_tokens: int,
        num_external_tokens: int,
        num_remote: int,
        num_recomputed: int,
    ) -> None:
        """A request was admitted for the first time. `known` are the nodes it makes use of; of its external tokens
        those of the last `num_remote` blocks come from another engine; `num_recomputed` blocks could have been loaded.
        """
        metrics, size = self._metrics, self._block_size
        nodes = np.array(known, np.intc)
        # Nodes of windows are at depth 0 wherever they are: the host is of use for them where it is for anything.
        depths = np.frombuffer(self._tree.depth, np.intc)[nodes]
        is_of_use = (depths >= num_local_tokens // size) | (depths == 0) & (num_external_tokens > 0)
        self._reuse.asked(nodes, is_of_use, len(request.block_hashes))
        metrics.requests += 1
        metrics.queries_tokens += request.num_tokens
        metrics.device_hit_tokens += num_local_tokens
        metrics.host_hit_tokens += num_external_tokens - num_remote * size
        metrics.peer_hit_tokens += num_remote * size
        metrics.recomputed_tokens += num_recomputed * size
        for node in self._tree.match(request.block_hashes[(num_local_tokens + num_external_tokens) // size :]):
            if self._host.node_state(node) is not BlockState.SWAPPING_TO_HOST:
                break
            metrics.missed_pending_tokens += size
