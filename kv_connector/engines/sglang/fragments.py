"""Fragments of prefixes that SGLang names, and the hits on them that it was promised.

A promise leases host blocks: SGLang aborts a request whose load fails, so whatever it is told it can load must be there
until it has done so. It does not say when a request gives up before that, so a promise lapses in the end. A request
that has waited that long is looked up anew before it is admitted, as all are.

How far back a request's wait began is remembered for as long as it is looked up: policies of SGLang's that order by
cached prefix look up whoever waits in each round, and the host would belong to them. Who has waited that long is
promised what is left, until the next round begins, in which it is loaded or looked up anew.
"""

from __future__ import annotations

from binascii import unhexlify
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...index import CacheTier, PrefixTree
from ...types import BlockHash

PROMISED_SECONDS = 60.0
_MOST_LOOKED_UP = 1 << 14
"""Requests that were looked up and have not been inserted: others than these have given up."""
_LEAST_REMEMBERED = 1 << 17
"""Pages of which it is known what is in front of them; 15 to 30 MB."""


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


def page_hashes(keys: Iterable[str]) -> list[BlockHash]:
    """The hashes that SGLang's keys of pages are, in hexadecimal digits."""
    hashes: list[Any] = [*map(unhexlify, keys)]  # in no time of Python's, a seventh of one by one
    return hashes


class PageOrder:
    """Which page is in front of which. Lookups show it, and offers do not: SGLang offers a prompt that it computes in
    chunks one by one. The latest pages are remembered, as many as requests that are being computed may have."""

    def __init__(self) -> None:
        self._newer: dict[BlockHash, BlockHash] = {}
        self._older: dict[BlockHash, BlockHash] = {}

    def show(self, hashes: Sequence[BlockHash]) -> None:
        """These pages follow one another."""
        self._newer.update(zip(hashes[1:], hashes, strict=False))
        if len(self._newer) >= _LEAST_REMEMBERED:
            self._newer, self._older = {}, self._newer

    def in_front_of(self, page: BlockHash) -> BlockHash | None:
        """None where that was not shown, or long ago."""
        return self._newer.get(page) or self._older.get(page)


class Inserts:
    """What the device had of a prompt. SGLang looks up the rest alone, and inserts the whole when it is computed: each
    node of the path is offered with those in front of it, as in a, a b, a b c. So when the first page that was looked
    up is offered, what is in front of it has just been, back to where a node comes again. A node that is locked for a
    save is left out from then on, and what is in front of it.

    Inserts of other requests come in between. What is in front of pages that were looked up was there before them, so
    it is not what has just been computed; and what is not locked has been offered twice by then."""

    def __init__(self) -> None:
        self._looked_up: dict[BlockHash, int] = {}  # first pages, and how often they are yet to be offered
        self._offered: list[tuple[list[BlockHash], bool]] = []  # nodes, of this round, that may be in front of others

    def begin_round(self) -> None:
        """What is offered from now on belongs to other inserts."""
        self._offered = []

    def show(self, hashes: Sequence[BlockHash]) -> None:
        """These pages are looked up for a request."""
        self._looked_up[hashes[0]] = self._looked_up.pop(hashes[0], 0) + 1
        if len(self._looked_up) > _MOST_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]

    def offer(self, node: list[BlockHash], is_new: bool, is_locked: bool) -> list[list[BlockHash]]:
        """A node is offered; whether nobody has known it before, and whether SGLang locks it. Returns the nodes that
        the device had in front of it, where it was looked up."""
        num_looked_up = self._looked_up.pop(node[0], 0)
        if num_looked_up > 1:
            self._looked_up[node[0]] = num_looked_up - 1
        if not num_looked_up and not is_new:
            self._offered.append((node, is_locked))
            return []
        offered, self._offered = self._offered, []
        return _end_of(offered) if num_looked_up else []


def _end_of(offered: Sequence[tuple[list[BlockHash], bool]]) -> list[list[BlockHash]]:
    """The nodes of the path that was offered last, and is being offered with what is behind it; none where that is
    another path."""
    times = Counter(node[0] for node, _ in offered)
    path: dict[BlockHash, list[BlockHash]] = {}
    for node, is_locked in reversed(offered):
        if node[0] in path:
            break
        if not is_locked and times[node[0]] == 1:
            return []
        path[node[0]] = node
    return list(path.values())[::-1]


@dataclass(slots=True)
class Promise:
    """Host blocks with the first pages of a fragment, each leased once. `made_at`: when the request was first promised
    them; `asked_at`: when it was looked up last."""

    fragment: Fragment
    host_ids: list[int]
    made_at: float
    asked_at: float


class Promises:
    """By request. All of them are known to one tier: `host`, on the tree that names its blocks."""

    def __init__(self, tree: PrefixTree, host: CacheTier, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._host = host
        self._clock = clock
        self._made: dict[str, Promise] = {}
        self._since = 0.0  # no promise was made before

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
        return self._host.num_resident(promise.host_ids) if promise is not None else 0

    def make(self, fragment: Fragment, num_pages: int) -> None:
        """The first so many pages, which are resident on the host, are promised to the request, in place of what was
        promised before."""
        now, before = self._clock(), self._made.get(fragment.request_id)
        host_ids = self._host.blocks_of(self._tree.match(fragment.block_hashes[:num_pages]))
        self._host.acquire(host_ids)
        self.end(fragment.request_id)
        made_at = now if before is None else before.made_at
        self._made[fragment.request_id] = Promise(fragment, host_ids, made_at, now)

    def keep(self, request_id: str) -> None:
        """The request loads what it was promised, and is not looked up again: its promise is as a new one."""
        promise = self._made[request_id]
        promise.made_at = promise.asked_at = self._clock()

    def end(self, request_id: str) -> Fragment | None:
        """The request has what it was promised, or wants it no more."""
        promise = self._made.pop(request_id, None)
        if promise is None:
            return None
        self._host.release(promise.host_ids)
        return promise.fragment

    def lapse(self) -> list[Fragment]:
        """End the leases of promises that are too old. Returns those that nobody has asked about since."""
        oldest = self._clock() - PROMISED_SECONDS
        if self._since > oldest:  # in nearly all rounds
            return []
        for promise in self._made.values():
            if promise.made_at <= oldest:
                self._host.release(promise.host_ids)
                promise.host_ids = []
        lapsed = [promise.fragment for promise in self._made.values() if promise.asked_at <= oldest]
        for fragment in lapsed:
            self.end(fragment.request_id)
        self._since = min((promise.made_at for promise in self._made.values()), default=self._clock())
        return lapsed

    def clear(self) -> list[Fragment]:
        """End all of them."""
        return [promise.fragment for promise in list(self._made.values()) if self.end(promise.fragment.request_id)]
