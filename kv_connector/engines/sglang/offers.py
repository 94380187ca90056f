"""Pages that SGLang offers to keep, from the offer to the end of their save.

It offers a node of its tree with those in front of it, each time that a request inserts it, and locks pages that the
host lacks until they are saved. What the host has all of is used, and needs no save.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from ...base import ScheduledRequest, SchedulerOutput
from ...types import NO_BLOCK, BlockHash
from .fragments import Fragment, Inserts, PageOrder, page_hashes
from .pools import DevicePages, PageIds
from .replica import Replica


class _Offer(NamedTuple):
    """Pages that SGLang has computed or used, and locks as long as `pages` is to be read; None where the host has all
    of them."""

    fragment: Fragment
    pages: PageIds | None

    def can_be_taken(self) -> bool:
        return self.pages is None or self.pages.have_come()


class Offers:
    """Those that wait to be taken, in order, and the saves of those that were. The same on all ranks.

    `behind_forward` makes copies come behind the forward pass that is under way.
    """

    def __init__(
        self,
        replica: Replica,
        pages: DevicePages,
        behind_forward: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._replica = replica
        self._half = replica.scheduler
        self._pages = pages
        self._behind_forward = behind_forward
        self._order = PageOrder()
        self._inserts = Inserts()
        self._num_offers = 0
        self._waiting: deque[_Offer] = deque()  # to be taken, in order
        self._used: dict[tuple[str, int], list[BlockHash]] = {}  # of this round, which the host has
        self._saving: deque[list[int]] = deque()  # jobs of the step that took each offer that is locked, in order

    def __len__(self) -> int:
        return len(self._waiting)

    def begin_round(self) -> None:
        """A round of SGLang's scheduler: what is offered from now on belongs to other inserts."""
        self._inserts.begin_round()
        self._used.clear()

    def show_order(self, hashes: Sequence[BlockHash]) -> None:
        """A lookup: these pages follow one another."""
        self._order.show(hashes)

    def show_asked(self, hashes: Sequence[BlockHash]) -> None:
        """A request has asked for these pages, which the device lacks."""
        self._inserts.show(hashes)

    def add(self, keys: Sequence[str], slots: Any) -> bool:
        """The pages in these slots are offered. True where SGLang is to lock them, as the host lacks some."""
        # An insert offers a node again with each node behind it: one use. A page's key says what is in front of it.
        node = keys[-1], len(keys)
        if (used := self._used.get(node)) is not None:
            self._insert(used, is_new=False, is_locked=False)
            return False
        hashes = page_hashes(keys)
        has_all = self._has_all(hashes)
        self._insert(hashes, self._half.tree.get(hashes[-1]) is None, not has_all)
        offer = Fragment(f"offer {self._num_offers}", hashes, self._pages.page_size)
        self._num_offers += 1
        if has_all:
            self._used[node] = hashes
            self._waiting.append(_Offer(offer, None))
            return False
        if slots is None or slots.numel() != len(hashes) * offer.page_size:
            return False
        self._waiting.append(_Offer(offer, self._pages.ids_of(slots)))
        return True

    def advance(self) -> None:
        """Exchange reports with the other ranks, and plan saves of the offers that all can take."""
        num_ready = sum(1 for _ in itertools.takewhile(_Offer.can_be_taken, self._waiting))
        num_taken = self._replica.advance(len(self._waiting), num_ready)
        self._take([self._waiting.popleft() for _ in range(num_taken)])

    @property
    def num_open(self) -> int:
        """That wait to be taken, or are locked until they are saved."""
        return len(self._waiting) + len(self._saving)

    @property
    def num_saved(self) -> int:
        """Locked offers whose saves have ended, from the oldest on."""
        return sum(1 for _ in itertools.takewhile(self._has_saved, self._saving))

    def unlock(self) -> None:
        """SGLang unlocks the oldest of them."""
        self._saving.popleft()

    def unlock_all(self) -> None:
        """SGLang has unlocked all; no save is under way."""
        self._saving.clear()

    def clear(self) -> None:
        """What was offered and not taken is not saved any more."""
        self._waiting.clear()
        self._used.clear()

    def _insert(self, hashes: list[BlockHash], is_new: bool, is_locked: bool) -> None:
        """A node is offered. What the device served of the request that computed it counts as asked for."""
        if front := self._inserts.offer(hashes, is_new, is_locked):
            self._replica.note_asked(list(itertools.chain.from_iterable(front)), on_device=True)

    def _take(self, offers: Sequence[_Offer]) -> None:
        """In one step, what the write policy wants of them is saved, behind the forward pass under way."""
        locked = [(fragment, pages) for fragment, pages in offers if pages is not None]
        # Of the others the use counts, before the step's saves make room where these are; they need no step.
        used = [
            self._hold(fragment, [NO_BLOCK] * len(fragment.block_hashes)) for fragment, pages in offers if pages is None
        ]
        read = [self._pages.read(pages) for _, pages in locked]
        held = [self._hold(fragment, ids) for (fragment, _), ids in zip(locked, read, strict=True) if ids is not None]
        job_ids: list[int] = []
        if held:
            with self._behind_forward():
                scheduled = [ScheduledRequest(each.request_id, each.num_tokens - 1, 0) for each in held]
                job_ids = [job.job_id for job in self._replica.step(SchedulerOutput(scheduled)).saves]
        self._replica.finish([*used, *held])
        self._saving.extend([job_ids] * len(locked))

    def _hold(self, fragment: Fragment, pages: list[int]) -> Fragment:
        """These pages hold what the fragment says. Returns it, with the page in front of it if that is known."""
        front = self._known_in_front_of(fragment.block_hashes[0])
        if front:  # it is not to be evicted before these
            fragment = replace(fragment, block_hashes=[*front, *fragment.block_hashes])
            pages = [NO_BLOCK, *pages]
        self._half.hold_computed(fragment, [pages], len(front))
        return fragment

    def _known_in_front_of(self, page: BlockHash) -> list[BlockHash]:
        """The page that is in front of this one, if the tree knows it; else none."""
        front = self._order.in_front_of(page)
        return [front] if front is not None and self._half.tree.get(front) is not None else []

    def _has_all(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether the host has, or will have, every one of these pages."""
        nodes = self._half.tree.match(hashes)
        return len(nodes) == len(hashes) and not self._half.host.absent(nodes)

    def _has_saved(self, job_ids: Sequence[int]) -> bool:
        return all(map(self._replica.has_saved, job_ids))
