"""What a waiting request is told: how much of it can be loaded, and how."""

from __future__ import annotations

from ...base import Request
from ...index import Lookup
from ..companions import Companions
from ..requests import RequestTable, num_blocks_of
from ..shared import Shared
from .choice import LoadPlanner
from .rates import HitLoad, LoadMode


class Answers:
    """Asks the index, the companions and the rates. Changes nothing but what `LoadPlanner` notes of its choice."""

    def __init__(
        self, shared: Shared, lookup: Lookup, loads: LoadPlanner, requests: RequestTable, companions: Companions
    ) -> None:
        self._shared = shared
        self._grouped = shared.grouped
        self._lookup = lookup
        self._loads = loads
        self._requests = requests
        self._companions = companions

    def matched(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As `KVConnectorScheduler.get_num_new_matched_tokens`, of a request that waits for nothing."""
        size = self._shared.block_size
        num_blocks = self.num_loadable(request, num_computed_tokens)
        num_brought = self._num_brought(request, num_computed_tokens, num_blocks)
        if num_brought or not num_blocks:
            self._loads.withdraw(request.request_id)
            return (num_blocks + num_brought) * size, num_brought > 0
        mode = self._choose(request, num_computed_tokens, num_blocks)
        if mode is LoadMode.COALESCED:
            return None, False
        return (0 if mode is LoadMode.RECOMPUTE else num_blocks * size), mode is LoadMode.ASYNC

    def num_loadable(self, request: Request, num_computed_tokens: int) -> int:
        """Block hashes that can be loaded right behind the computed tokens; at least one token is left to compute."""
        first, within = divmod(num_computed_tokens, self._shared.block_size)
        if within:
            return 0
        return self._lookup.find(request.block_hashes, first, self._shared.num_useful(request.num_tokens))

    def _num_brought(self, request: Request, num_computed_tokens: int, num_loadable: int) -> int:
        """Block hashes behind those that can be loaded whose blocks a companion brings."""
        size = self._shared.block_size
        num_brought = self._companions.num_hashes(request) - num_computed_tokens // size - num_loadable
        if num_brought <= 0 or num_computed_tokens % (size * self._grouped.hashes_per_hit):
            return 0
        return num_brought if self._has_room_to_wait(request) else 0

    def _choose(self, request: Request, num_computed_tokens: int, num_blocks: int) -> LoadMode:
        size, first = self._shared.block_size, num_computed_tokens // self._shared.block_size
        first_blocks: list[int] = []
        if self._loads.any_in_background:
            hit = self._lookup.hit(request.block_hashes, first, min(num_blocks, self._grouped.hashes_per_hit))
            first_blocks = self._shared.host.blocks_of(hit.nodes[0])
        load = HitLoad(
            num_blocks=self._lookup.num_copies(first, num_blocks),
            num_hit_tokens=num_blocks * size,
            num_new_tokens=request.num_tokens - num_computed_tokens - num_blocks * size,
            num_others=len(self._requests) - (request.request_id in self._requests),
            num_beginning=self._requests.num_beginning,
        )
        may_wait = not self._shared.ledger.has_failed(request.request_id) and self._has_room_to_wait(request)
        return self._loads.choose(request.request_id, load, first_blocks, may_wait)

    def _has_room_to_wait(self, request: Request) -> bool:
        """Whether all that wait for loads, and this one, could begin anew at once.

        A request whose load has failed begins anew, and vLLM lets nobody behind it run until it has its blocks: those
        hold theirs. vLLM keeps them free for it, but for those that windows had left behind.
        """
        if not self._grouped.has_windows:
            return True
        groups, size = self._grouped.groups, self._shared.block_size
        num_needed = sum(num_blocks_of(request, groups, size)) + self._requests.num_missing(groups, size)
        return num_needed <= self._shared.pool.num_available
