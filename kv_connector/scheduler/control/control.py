"""What requests say of their own blocks, and operators of everybody's, put into effect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from ...base import Request
from ...config import Config
from ...index import Terms
from ...types import BlockHash
from ..companions import Companions
from ..requests import RequestState, RequestTable
from ..shared import Shared
from .expiry import Expiries
from .hints import hints_of
from .keeping import PinKeeper
from .pins import PinnedPrefixes
from .returning import ReturningPins

logger = logging.getLogger("kv_connector.scheduler")

PIN_SECONDS = 3600.0
"""How long a request's pin lasts that says nothing of it."""
_SECONDS_BETWEEN_LINES = 60.0


class Control:
    """Told of requests as they are admitted and end, and of each step; an operator's calls end here, too.

    A request's hints are read once, when it is admitted for the first time, and its `RequestState.terms` and `is_saved`
    say what planners need of them.
    """

    def __init__(
        self,
        config: Config,
        shared: Shared,
        companions: Companions,
        asked: Callable[[Iterable[int], Terms], None],
    ) -> None:
        """`asked` is told of nodes that a request makes use of, and on which terms."""
        self.tenants = shared.tenants
        self.pins = PinnedPrefixes(shared, config.pinned_share)
        self._returning = ReturningPins(self.pins, shared, companions)
        self._shared = shared
        self._asked = asked
        self._expiries = Expiries(shared)
        self._told_at = -_SECONDS_BETWEEN_LINES  # that hints were ignored

    def admitted(self, state: RequestState, known: Sequence[Sequence[int]]) -> None:
        """A request was admitted for the first time; `known` are the nodes that it makes use of, by group."""
        request = state.request
        state.hints = hints = hints_of(request, self._ignored)
        state.terms = hints.terms(self.tenants.of(request))
        state.is_saved = not hints.do_not_cache
        if state.is_saved:
            self._asked(chain.from_iterable(known), state.terms)
        if hints.pin:
            self._pin(request, state)
        elif hints.pin is False:
            self._returning.drop(request.block_hashes)
            self.pins.unpin_for_request(request.block_hashes)

    def finished(self, state: RequestState) -> None:
        """A request has ended that was admitted, and its blocks were used now."""
        if state.terms.is_transient and state.hints.ttl_s is not None and state.is_saved:
            self._expiries.add(state.request.block_hashes, self._shared.clock(), state.hints.ttl_s)

    def keep_pins(self, keeper: PinKeeper) -> None:
        """See `SchedulerHalf.keep_pins`."""
        kept = keeper.take()
        self.pins.keeper = keeper
        self._returning.add(kept)

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next step."""
        return self._returning.is_busy

    def shutdown(self) -> None:
        """No pin changes any more."""
        self.pins.keeper.close()

    def step(self, now: float) -> None:
        """A step is planned: what is due ends."""
        self.pins.expire(now)
        self._returning.step(now)
        self._expiries.expire(now)

    def clear_tenant(self, name: str, requests: RequestTable) -> int:
        """See `SchedulerHalf.clear_tenant`."""
        tenant = self.tenants.named(name)
        self._returning.drop_tenant(tenant)
        self.pins.unpin_tenant(tenant)
        for state in requests:
            if state.terms.tenant == tenant:
                requests.spoil(state)
        host, tree = self._shared.host, self._shared.grouped.tree
        tree.terms.bar_tenant(tenant)
        copies = host.copies()
        owners = map(tree.terms.tenant.__getitem__, host.nodes_of(copies))
        own = [block_id for block_id, owner in zip(copies, owners, strict=True) if owner == tenant]
        host.discard(own)
        return len(own)

    def stats(self) -> dict[str, float]:
        """Gauges, under names that `DOCUMENTATION` has."""
        return {"pinned_blocks": self.pins.num_blocks}

    def tenant_stats(self) -> dict[str, dict[str, float]]:
        """By tenant."""
        stats = self.tenants.stats(self._shared.host)
        for name, of_tenant in stats.items():
            of_tenant["pinned_blocks"] = self.pins.num_blocks_of(self.tenants.named(name))
        return stats

    def _pin(self, request: Request, state: RequestState) -> None:
        ttl_s = PIN_SECONDS if state.hints.ttl_s is None else state.hints.ttl_s
        prompt: Sequence[BlockHash] = request.block_hashes[:]
        if prompt and not self.pins.pin_for_request(prompt, state.terms, ttl_s):
            self._shared.metrics.refused_pins += 1

    def _ignored(self, reason: str) -> None:
        self._shared.metrics.ignored_hints += 1
        now = self._shared.clock()
        if now - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._told_at = now
            logger.warning("a hint of a request is ignored: %s (at most one such line a minute)", reason)
