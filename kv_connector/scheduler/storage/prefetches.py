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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from ...base import Request
from ...config import Prefetch, StorageConfig
from ...index import terms_of
from ...types import BlockHash, StorageAction, StorageJob
from ..control.hints import hints_of
from ..ledger import EndedJob, JobOwner
from ..loads.choice import LoadPlanner
from ..shared import Shared
from .fetches import FetchPlanner
from .followers import Followers
from .grouping import Grouping
from .prefetching import Prefetching
from .reading import LOST_SECONDS, Reading
from .search import Question, Search

_MOST_WARMING = 64
"""Prefixes that are brought at a time though no request waits for them."""
_NO_BLOCKS = np.empty(0, dtype=np.int64)

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
        self._host = shared.host
        self._grouping = grouping
        self._loads = loads
        self._owner = owner
        self._metrics = shared.metrics
        self._clock = shared.clock
        self._block_size = shared.block_size
        self._keys = keys
        self._on_answered = on_answered
        self._prefetches: dict[str, Prefetching] = {}
        self._warming: list[Prefetching] = []  # that no request waits for
        self._followers = Followers()
        self._fetches = FetchPlanner(shared, grouping, self._followers, owner, keys, on_fetched)
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
        self._fetches.coalesce_begun(prefetch)

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
        self._fetches.coalesce_begun(prefetch)
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
            self._fetches.end(ended, job, was_cancelled)
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
                self._fetches.coalesce_begun(prefetch)
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

    def _look_up(self, prefetch: Prefetching) -> list[StorageJob]:
        """What is to be asked now."""
        jobs = []
        for question in prefetch.search.take():
            keys = self._grouped.keys(prefetch.search.hashes, question.group)
            asked = keys[question.blocks.start : question.blocks.stop]
            singly = question.group in self._grouped.windows
            job_id = self._shared.ledger.next_id()
            job = StorageJob(job_id, StorageAction.LOOK_UP, self._keys(asked), _NO_BLOCKS, singly=singly)
            self._shared.ledger.open(job, self._owner, prefetch.request_ids)
            prefetch.look_ups[job.job_id] = question
            self._followers.follow(job.job_id, prefetch, set())
            jobs.append(job)
        return jobs

    def _answered(self, prefetch: Prefetching, question: Question, found: int) -> None:
        if prefetch.search.answer(question, found):
            self._found(prefetch)
        else:
            self._opened += self._look_up(prefetch)

    def _abandon(self, job_id: int, now: float) -> None:
        """Storage has lost the job, by all appearances: its requests are computed."""
        logger.warning(
            "storage has not answered job %d for %.0f s: requests wait for it no longer", job_id, LOST_SECONDS
        )
        self._reading.forget(job_id, now)
        self._followers.abandon(job_id)
        self._fetches.abandon(job_id)
        self._forget_warmed()

    def _forget_warmed(self) -> None:
        if self._warming:
            self._warming = [prefetch for prefetch in self._warming if not prefetch.is_done]

    def _found(self, prefetch: Prefetching) -> None:
        """Fetch what storage has of the longest hit, unless that is sooner computed."""
        search = prefetch.search
        end = search.fit()
        if end <= search.host_end:
            return
        num_lacking = search.num_lacking(end)
        num_tokens = (end - search.host_end) * self._block_size
        may_skip = num_lacking and not prefetch.is_thorough
        if may_skip and self._reading.is_slower(num_lacking, self._loads.recompute_seconds(num_tokens)):
            self._metrics.recomputed_storage_tokens += num_tokens
            return
        self._opened += self._fetches.open(prefetch, end, num_lacking)
