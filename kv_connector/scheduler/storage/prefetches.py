"""What requests that have arrived may find in storage: looked up, and fetched before it is needed.

    a request arrives --LOOK_UP--> every rank says what it has of its prefix; what all have counts (`search.py`)
                      --FETCH----> into host blocks that are matchable once they are filled, like any other hit

Each job is of one block group. Lookups and fetches of full attention are of whole objects (`grouping.py`), but for
the end of a prefix: a fetch names all blocks of an object and brings those that the host lacks. A request whose prefix
is on its way for another one waits for those jobs, too. A job that nobody waits for any more is called off, and is done
all the same where it had begun.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from ...base import Request
from ...config import Prefetch, StorageConfig
from ...events import BlockStored
from ...index import Event, terms_of
from ...types import BlockHash, StorageAction, StorageJob, Tier
from ..control.hints import hints_of
from ..ledger import EndedJob, JobOwner
from ..loads.choice import LoadPlanner
from ..shared import Shared
from .fetches import Fetches
from .followers import Followers
from .grouping import Grouping
from .prefetching import Prefetching
from .reading import LOST_SECONDS, Reading
from .search import Question, Search

_FETCH_BLOCKS = 64
"""In one job: what has come can be loaded while the rest is on its way."""
_MOST_WARMING = 64
"""Prefixes that are brought at a time though no request waits for them."""
_LEFT_SHARE = 4
"""Of the host, as a divisor, that fetches under way leave alone: storage that hangs must not keep all of it."""

logger = logging.getLogger("kv_connector.scheduler")


class PrefetchPlanner:
    """Follows requests from arrival to admission. The caller puts `plan` and `take_cancelled` into every step, and
    hands every ended lookup and fetch to `end`.

    `keys` names blocks in storage by their hashes; `on_fetched` hears of host blocks that were filled, `on_answered` of
    what lookups of a prefix were told; `owner` opens the jobs.
    """

    def __init__(
        self,
        config: StorageConfig,
        shared: Shared,
        grouping: Grouping,
        loads: LoadPlanner,
        owner: JobOwner,
        keys: Callable[[Sequence[BlockHash]], bytes],
        on_fetched: Callable[[Sequence[int]], None],
        on_answered: Callable[[Sequence[BlockHash], Question, int], None],
    ) -> None:
        self._config = config
        self._shared = shared
        self._grouped = shared.grouped
        self._tree = shared.grouped.tree
        self._host = shared.host
        self._grouping = grouping
        self._loads = loads
        self._owner = owner
        self._metrics = shared.metrics
        self._clock = shared.clock
        self._block_size = shared.block_size
        self._keys = keys
        self._on_fetched = on_fetched
        self._on_answered = on_answered
        self._prefetches: dict[str, Prefetching] = {}
        self._warming: list[Prefetching] = []  # that no request waits for
        self._followers = Followers()
        self._fetches = Fetches()
        self._opened: list[StorageJob] = []  # to be planned
        self._reading = Reading()

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        waits = any(prefetch.search.questions for prefetch in self._followed())
        return waits or bool(self._opened) or self._followers.has_untold

    def arrived(self, request: Request, num_hashes: int) -> None:
        """A request of which `num_hashes` hashes may be hit. What the host does not hold is looked up, once."""
        if request.request_id in self._prefetches:
            return
        deadline = self._clock() + self._config.timeout_ms / 1e3
        hints = hints_of(request)
        hashes, terms = request.block_hashes, hints.terms(self._shared.tenants.of(request))
        search = self._search(hashes[:num_hashes])
        prefetch = Prefetching((request.request_id,), hashes, num_hashes, search, deadline, terms, hints.prefetch)
        self._prefetches[request.request_id] = prefetch
        self._coalesce_begun(prefetch)

    @property
    def may_warm(self) -> bool:
        """Whether prefixes may be brought by now that no request waits for."""
        return len(self._warming) < _MOST_WARMING and not self._reading.hangs(self._clock())

    def warm(self, block_hashes: Sequence[BlockHash], tenant: int) -> bool:
        """Bring what storage has of a tenant's prefix to the host, for whoever comes; False where there is nothing to
        be asked, or too many are being brought."""
        search = self._search(block_hashes)
        if not search.questions or not self.may_warm:
            return False
        terms = terms_of(tenant)
        prefetch = Prefetching((), tuple(block_hashes), len(block_hashes), search, 0.0, terms, is_thorough=True)
        self._warming.append(prefetch)
        self._coalesce_begun(prefetch)
        return True

    def is_awaited(self, request_id: str) -> bool:
        """Whether the request should wait for what is on its way from storage."""
        prefetch = self._prefetches.get(request_id)
        how = self._config.prefetch
        if prefetch is None or prefetch.is_done or (how is Prefetch.BEST_EFFORT and not prefetch.is_thorough):
            return False
        now = self._clock()
        if self._reading.hangs(now):
            return False
        return prefetch.is_thorough or how is Prefetch.WAIT_COMPLETE or now < prefetch.deadline

    def admitted(self, request_id: str, first: int, num_hashes: int) -> None:
        """The request was admitted, with a hit on the host of `num_hashes` hashes from `first` on.

        Under `best_effort` what is under way goes on, for those who come later; else the request has waited as long as
        it was to, and computes the rest.
        """
        prefetch = self._prefetches.pop(request_id, None)
        if prefetch is None:
            return
        num_fetched = len(prefetch.fetched.intersection(range(first, first + num_hashes)))
        self._metrics.storage_hit_tokens += num_fetched * self._block_size
        if num_fetched:
            self._metrics.histograms.observe("hit_tokens", "storage", num_fetched * self._block_size)
        if self._config.prefetch is not Prefetch.BEST_EFFORT:
            self._followers.leave(prefetch)

    def withdrawn(self, request_id: str) -> None:
        """The request has ended; if it was not admitted nobody wants what is under way for it alone, unless it was
        there to have it brought."""
        prefetch = self._prefetches.pop(request_id, None)
        if prefetch is None:
            return
        if prefetch.is_thorough and not prefetch.is_done and len(self._warming) < _MOST_WARMING:
            self._warming.append(prefetch)
        else:
            self._followers.leave(prefetch)

    def plan(self) -> list[StorageJob]:
        """Jobs that begin in this step."""
        now = self._clock()
        for job_id in self._reading.lost(now):
            self._abandon(job_id, now)
        jobs = [job for prefetch in self._followed() for job in self._look_up(prefetch)] + self._opened
        self._opened = []
        self._reading.begun(jobs, now)
        return jobs

    def take_cancelled(self) -> tuple[int, ...]:
        """Jobs to be called off in this step, planned in this one or before."""
        return self._followers.take_cancelled()

    def end(self, ended: EndedJob) -> None:
        """A lookup or a fetch was reported by every rank."""
        job, ok = ended.job, ended.ok
        assert isinstance(job, StorageJob)
        followers, was_called_off = self._followers.ended(job.job_id)
        was_cancelled = was_called_off and not ok
        self._reading.ended(job, not was_cancelled, self._clock())
        if job.action is StorageAction.FETCH:
            self._end_fetch(ended, job, was_cancelled)
        for prefetch in followers:
            hashes = prefetch.jobs.pop(job.job_id)
            question = prefetch.look_ups.pop(job.job_id, None)
            if question is not None:
                if ok:
                    self._on_answered(prefetch.search.hashes, question, ended.found)
                self._answered(prefetch, question, ended.found if ok else 0)
            else:
                prefetch.fetched.update(hashes if ok else ())
                prefetch.has_lost |= self._may_have_more(prefetch, ended)
            if prefetch.has_lost and prefetch.is_done and not prefetch.is_repeated:
                prefetch.is_repeated = True
                prefetch.search = self._search(prefetch.block_hashes[: prefetch.stop])
                self._coalesce_begun(prefetch)
        self._forget_warmed()

    def reset(self) -> None:
        """Nothing of what is under way is wanted any more."""
        for prefetch in self._followed():
            self._followers.leave(prefetch)
        self._prefetches.clear()
        self._warming.clear()

    def _followed(self) -> Iterator[Prefetching]:
        return chain(self._prefetches.values(), self._warming)

    def _search(self, hashes: Sequence[BlockHash]) -> Search:
        """What of these is on the host, and what storage is to be asked."""
        search = Search(self._grouped, self._host, self._grouping, hashes)
        if self._reading.hangs(self._clock()):
            search.stop()
        return search

    def _may_have_more(self, prefetch: Prefetching, fetch: EndedJob) -> bool:
        """Whether storage may have more for a request that has not got all of this fetch. It was another's, and perhaps
        it was that one's to call off; or a window or a state lies where nothing is a hit any more, and others do not.
        """
        if fetch.ok and not fetch.missing:
            return False
        return self._grouped.has_windows or (fetch.job.job_id in prefetch.coalesced and not fetch.ok)

    def _coalesce_begun(self, prefetch: Prefetching) -> None:
        """What is on its way to the host is waited for."""
        if not self._fetches.bring_any:
            return
        search = prefetch.search
        for group, blocks in enumerate(self._grouped.needed(0, search.host_end)):
            keys = self._grouped.keys(search.hashes, group)
            if group in search.first:
                self._coalesce(prefetch, group, range(len(keys)), self._tree.match(keys))
            else:
                nodes = self._grouped.find(keys[blocks.start : blocks.stop])
                self._coalesce(prefetch, group, blocks, nodes, range(search.host_end))

    def _look_up(self, prefetch: Prefetching) -> list[StorageJob]:
        """What is to be asked now."""
        jobs = []
        for question in prefetch.search.take():
            keys = self._grouped.keys(prefetch.search.hashes, question.group)
            asked = keys[question.blocks.start : question.blocks.stop]
            singly = self._is_single(question.group)
            job = self._open(prefetch, StorageAction.LOOK_UP, self._keys(asked), (), singly=singly)
            prefetch.look_ups[job.job_id] = question
            self._followers.follow(job.job_id, prefetch, set())
            jobs.append(job)
        return jobs

    def _answered(self, prefetch: Prefetching, question: Question, found: int) -> None:
        if prefetch.search.answer(question, found):
            self._found(prefetch)
        else:
            self._opened += self._look_up(prefetch)

    def _is_single(self, group: int) -> bool:
        return group in self._grouped.windows

    def _open(
        self,
        prefetch: Prefetching,
        action: StorageAction,
        keys: bytes,
        host_ids: Sequence[int],
        skipped: tuple[int, ...] = (),
        singly: bool = False,
    ) -> StorageJob:
        job_id, blocks = self._shared.ledger.next_id(), np.array(host_ids, dtype=np.int64)
        job = StorageJob(job_id, action, keys, blocks, skipped, singly)
        self._shared.ledger.open(job, self._owner, prefetch.request_ids)
        return job

    def _abandon(self, job_id: int, now: float) -> None:
        """Storage has lost the job, by all appearances: its requests are computed, and what it was to bring may be
        saved or fetched anew. Its host blocks stay leased: they may be written to yet."""
        logger.warning(
            "storage has not answered job %d for %.0f s: requests wait for it no longer", job_id, LOST_SECONDS
        )
        self._reading.forget(job_id, now)
        self._followers.abandon(job_id)
        self._host.discard(self._fetches.abandon(job_id))
        self._forget_warmed()

    def _forget_warmed(self) -> None:
        if self._warming:
            self._warming = [prefetch for prefetch in self._warming if not prefetch.is_done]

    def _found(self, prefetch: Prefetching) -> None:
        """Fetch what storage has of the longest hit, but for what is on its way."""
        search, now = prefetch.search, self._clock()
        end = search.fit()
        if end <= search.host_end:
            return
        num_lacking = search.num_lacking(end)
        num_tokens = (end - search.host_end) * self._block_size
        may_skip = num_lacking and not prefetch.is_thorough
        if may_skip and self._reading.is_slower(num_lacking, self._loads.recompute_seconds(num_tokens)):
            self._metrics.recomputed_storage_tokens += num_tokens
            return
        paths = [self._grouped.keys(search.hashes, group)[: search.stop_of(group, end)] for group in search.first]
        capacity = self._host.pool.capacity
        most = capacity - capacity // _LEFT_SHARE - self._fetches.num_blocks
        self._tree.touch(search.held_windows(end), now)
        room = self._host.allocate_behind(max(0, min(num_lacking, most)), paths, now, *prefetch.terms.claim)
        end = search.fit(len(room))  # room may have been made of what windows need
        self._metrics.dropped_fetches_blocks += max(0, num_lacking - search.num_lacking(end))
        self._host.release(self._fetch_all(prefetch, end, room) if end > search.host_end else room)

    def _fetch_all(self, prefetch: Prefetching, end: int, room: list[int]) -> list[int]:
        """Jobs for all that a hit up to `end` lacks, which there is room for; returns what is left of that."""
        search, now = prefetch.search, self._clock()
        inserted = []
        for group, blocks in enumerate(search.needed(end)):
            nodes = self._grouped.insert(search.hashes, group, now, blocks, prefetch.terms)
            inserted += nodes
            self._tree.touch(nodes, now)
            size, singly = self._grouped.groups[group].hashes_per_block, self._is_single(group)
            since = range(search.host_end, end) if singly else None
            needed = nodes[: bisect_left(blocks, search.stop_of(group, end))]
            self._coalesce(prefetch, group, blocks, needed, since)
            for part in self._grouping.parts(self._host.absent(needed), blocks, singly, _FETCH_BLOCKS):
                job = self._fetch(prefetch, nodes, part, room[: len(part)], singly)
                room = room[len(part) :]
                brought = since or (hashes for i in part for hashes in _hashes(blocks[i], size))
                self._followers.follow(job.job_id, prefetch, set(brought))
        self._tree.settle(inserted)
        return room

    def _fetch(
        self, prefetch: Prefetching, nodes: list[int], wanted: list[int], host_ids: list[int], singly: bool
    ) -> StorageJob:
        """Of the nodes those at these places are wanted; none of objects without any. Those of full attention begin
        with an object."""
        self._host.attach(host_ids, [nodes[i] for i in wanted], Event.FETCH)
        places = wanted
        if not singly:
            size = self._grouping.num_blocks
            starts = dict.fromkeys(map(self._grouping.start, wanted))
            places = [i for start in starts for i in range(start, min(start + size, len(nodes)))]
        is_wanted = frozenset(wanted)
        skipped = tuple(key for key, i in enumerate(places) if i not in is_wanted)
        keys = self._keys([self._tree.hash_of(nodes[i]) for i in places])
        job = self._open(prefetch, StorageAction.FETCH, keys, host_ids, skipped, singly)
        self._fetches.begun(job)
        self._opened.append(job)
        return job

    def _end_fetch(self, ended: EndedJob, job: StorageJob, was_cancelled: bool) -> None:
        host_ids = job.host_ids.tolist()
        self._fetches.ended(job)
        if not ended.ok:
            self._metrics.cancelled_fetch_jobs += was_cancelled
            self._metrics.failed_fetch_jobs += not was_cancelled
            self._host.discard(host_ids)
            return
        self._host.discard(sorted(ended.missing))
        host_ids = [block_id for block_id in host_ids if block_id not in ended.missing]
        filled = self._host.fill(host_ids)
        self._on_fetched(host_ids)
        self._metrics.fetched_blocks += len(filled)
        if filled:
            self._shared.events.add(BlockStored(self._host.hashes_of(filled), Tier.HOST))

    def _coalesce(
        self,
        prefetch: Prefetching,
        group: int,
        blocks: Sequence[int],
        nodes: Sequence[int],
        since: range | None = None,
    ) -> None:
        """Follow the fetches of these nodes, which are blocks of the prefix, that are under way already. Each brings
        its own tokens, or those that windows are whole for since others are."""
        if not self._fetches.bring_any:
            return
        size = self._grouped.groups[group].hashes_per_block
        for block, host_id in zip(blocks, self._host.blocks_of(nodes), strict=False):
            job_id = self._fetches.job_of(host_id)
            if job_id is None:
                continue
            if job_id not in prefetch.jobs:
                self._followers.coalesce(job_id, prefetch)
            prefetch.jobs[job_id].update(_hashes(block, size) if since is None else since)


def _hashes(block: int, size: int) -> range:
    """Of a block of so many hashes."""
    return range(block * size, (block + 1) * size)
