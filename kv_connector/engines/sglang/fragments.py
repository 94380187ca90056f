"""What SGLang shows of prefixes, and what of them it was promised.

A promise leases host blocks: SGLang aborts a request whose load fails, so whatever it is told it can load must be there
until it has done so. It does not say when a request gives up before that, so a promise lapses in the end. A request
that has waited that long is looked up anew before it is admitted, as all are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...index import CacheTier, PrefixTree
from ...types import BlockHash

PROMISED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Fragment:
    """Pages that follow one another, as a request of their own: see `base.Request`. A token is left to compute behind
    them, so that all may be hits."""

    request_id: str
    block_hashes: Sequence[BlockHash]
    page_size: int
    kv_transfer_params: Any = None

    @property
    def num_tokens(self) -> int:
        """Those of the pages, and one."""
        return len(self.block_hashes) * self.page_size + 1


@dataclass(slots=True)
class Promise:
    """Host blocks with the first pages of a fragment, each leased once."""

    fragment: Fragment
    host_ids: list[int]
    made_at: float


class Promises:
    """By request. All of them are known to one tier: `host`, on the tree that names its blocks."""

    def __init__(self, tree: PrefixTree, host: CacheTier, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._host = host
        self._clock = clock
        self._made: dict[str, Promise] = {}

    def __len__(self) -> int:
        return len(self._made)

    def fragment(self, request_id: str) -> Fragment | None:
        """What the request was last asked about for."""
        promise = self._made.get(request_id)
        return promise.fragment if promise is not None else None

    def num_kept(self, request_id: str) -> int:
        """How many of the pages that the request was promised are good yet, from the first on: a load of them that has
        failed for another request makes the host forget them. 0 where the promise has lapsed."""
        promise = self._made.get(request_id)
        if promise is None:
            return 0
        host_ids = promise.host_ids
        lost = self._host.first_not_resident(host_ids)
        return len(host_ids) if lost is None else host_ids.index(lost)

    def make(self, fragment: Fragment, num_pages: int) -> None:
        """The first so many pages, which are resident on the host, are promised to the request, in place of what was
        promised before."""
        host_ids = self._host.blocks_of(self._tree.match(fragment.block_hashes[:num_pages]))
        self._host.acquire(host_ids)
        self.end(fragment.request_id)
        self._made[fragment.request_id] = Promise(fragment, host_ids, self._clock())

    def end(self, request_id: str) -> Fragment | None:
        """The request has what it was promised, or wants it no more."""
        promise = self._made.pop(request_id, None)
        if promise is None:
            return None
        self._host.release(promise.host_ids)
        return promise.fragment

    def lapse(self) -> list[Fragment]:
        """End promises that are too old; they are kept in the order in which they were made."""
        oldest = self._clock() - PROMISED_SECONDS
        lapsed = []
        for request_id, promise in list(self._made.items()):
            if promise.made_at > oldest:
                break
            lapsed.append(promise.fragment)
            self.end(request_id)
        return lapsed

    def clear(self) -> list[Fragment]:
        """End all of them."""
        return [promise.fragment for promise in list(self._made.values()) if self.end(promise.fragment.request_id)]
