"""Peer jobs of one rank: begun with a step's plan, found to have ended when the step is reported.

Threading model: one thread of its own, begun by `start`, drives the transport and both parts of the protocol by taking
one `turn` after the other; the model-runner thread leaves words in a queue, wakes it, and never waits for it
but in `close`. Who does not call `start` takes the turns itself. A turn reads the channel, takes in what the
engine offers, then what peers have said, and only then pushes what is ready: who was told to stop begins nothing.

What a peer says can cost it its link, and nobody anything else. Where the thread breaks all the same, every job fails,
and `is_broken` says that none will ever succeed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from operator import attrgetter

from ...types import PeerAction, PeerJob
from ..base import (
    Arrived,
    Connected,
    Lost,
    Marker,
    Message,
    PeerCounters,
    PeerError,
    PeerEvent,
    PeerTransport,
    Pushed,
)
from ..clock import CLOCK, Clock
from ..identity import PeerIdentity
from .offers import Offers
from .receives import Receives

logger = logging.getLogger("kv_connector.peer")

_IDLE_SECONDS = 0.25
_MARKER_SECONDS = 0.0005
_CLOSE_SECONDS = 60.0
_STOP_SECONDS = 2.0
_REST_SECONDS = 0.003
_COUNTERS = tuple(counter.name for counter in fields(PeerCounters))
_COUNTS = attrgetter(*_COUNTERS)


@dataclass(frozen=True, slots=True)
class EndedPeerJob:
    """`ok`: of a RECEIVE, its blocks have arrived; of a SEND, nobody wants more of them."""

    job_id: int
    ok: bool


class PeerJobs:
    """Sends and receives blocks beside the model. Called from the model-runner thread."""

    def __init__(
        self,
        transport: PeerTransport,
        engine_id: str,
        identity: PeerIdentity,
        deadline_seconds: float,
        timeout_seconds: float,
        clock: Clock = CLOCK,
        prepare_thread: Callable[[], None] | None = None,
    ) -> None:
        """Owns the transport from now on. `identity`: what peers are told of this rank; `deadline_seconds`: how long a
        receive may go without data, and how long unmatched messages are kept; `timeout_seconds`: for a peer to answer;
        `prepare_thread`: see `PeerPool`."""
        self._transport = transport
        self._offers = Offers(transport, engine_id, identity, deadline_seconds, clock.monotonic)
        self._receives = Receives(transport, identity, deadline_seconds, timeout_seconds, clock.monotonic)
        self._words: deque[tuple[Marker | None, Callable[[], None]]] = deque()
        self._gated: list[tuple[Marker, Callable[[], None]]] = []
        self._ended: deque[EndedPeerJob] = deque()
        self._has_ended = threading.Event()
        self._open: set[int] = set()
        self._waiting: set[int] = set()  # receives that have not begun
        self._called_off: set[int] = set()  # and those of them that will not
        self._open_links: set[int] = set()
        self._prepare_thread = prepare_thread
        self._is_closing = False
        self._is_broken = False
        self._is_over = False  # and nothing is written any more for what was under way
        self._clock = clock
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the peer thread, which runs until `close`."""
        self._thread = threading.Thread(target=self._run, name="kv-peer", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether the peer thread has ended: no blocks are exchanged any more."""
        return self._is_broken

    @property
    def port(self) -> int:
        """Where peers reach this rank."""
        return self._transport.port

    def begin(self, job: PeerJob, behind: Marker) -> None:
        """Offer the job's blocks, or ask for them once the work in front of `behind` is done: it may use them."""
        self._open.add(job.job_id)
        if self._is_broken:
            self._ended.append(EndedPeerJob(job.job_id, False))
        if job.action is PeerAction.SEND:
            self._say(None, lambda: self._offers.offer(job))
        else:
            self._waiting.add(job.job_id)
            self._say(behind, lambda: self._receive(job))

    def ready(self, job_ids: Iterable[int], regions: int, behind: Marker) -> None:
        """The leading `regions` of these SEND jobs are computed once the work in front of `behind` is done."""
        for job_id in job_ids:
            self._say(behind, lambda job_id=job_id: self._offers.ready(job_id, regions))  # type: ignore[misc]

    def fail(self, job_ids: Iterable[int]) -> None:
        """The blocks of these SEND jobs were not computed."""
        for job_id in job_ids:
            self._say(None, lambda job_id=job_id: self._offers.fail(job_id))  # type: ignore[misc]

    def withdraw(self, transfer_ids: Iterable[str]) -> None:
        """Withdraw these KV transfers: their jobs end, and wants for them are refused."""
        for transfer_id in transfer_ids:
            self._say(None, lambda name=transfer_id: self._offers.withdraw(name))  # type: ignore[misc]

    def suspend(self, transfer_ids: Iterable[str]) -> None:
        """Suspend these KV transfers until a later SEND; their jobs end."""
        for transfer_id in transfer_ids:
            self._say(None, lambda name=transfer_id: self._offers.suspend(name))  # type: ignore[misc]

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Cancel these RECEIVE jobs."""
        for job_id in job_ids:
            self._say(None, lambda job_id=job_id: self._cancel(job_id))  # type: ignore[misc]

    def rest(self) -> None:
        """Wait up to a few milliseconds for a job to end, if any is in flight."""
        if self._open and self._thread is not None:
            self._has_ended.wait(_REST_SECONDS)

    def poll(self) -> list[EndedPeerJob]:
        """Jobs that have ended since the last call."""
        self._has_ended.clear()
        is_over, ended = self._is_over, []  # looked at first: nothing is reported behind it
        while self._ended:
            job = self._ended.popleft()
            self._open.discard(job.job_id)
            ended.append(job)
        if is_over:
            ended += [EndedPeerJob(job_id, False) for job_id in sorted(self._open)]
            self._open.clear()
        return ended

    def counters(self) -> tuple[tuple[str, float], ...]:
        """The transport's counters by name. Called once a step: `dataclasses.asdict` takes five times as long."""
        return tuple(zip(_COUNTERS, _COUNTS(self._transport.counters), strict=True))

    def close(self) -> None:
        """End every job and close the transport; waits for copies that are on their way, and no longer than
        `_CLOSE_SECONDS` for the thread. Idempotent."""
        was_closing, self._is_closing = self._is_closing, True
        if self._thread is not None:
            self._transport.wake()
            self._thread.join(_CLOSE_SECONDS)
        elif not was_closing:
            self._stop_receives()
            self._close()

    def turn(self, timeout: float = _IDLE_SECONDS) -> None:
        """Handle calls, messages and transfers once, waiting up to `timeout` seconds while there are none. Called by
        the peer thread, or by the caller if it was not started. Raises what the transport does; then call `close`."""
        events = self._transport.poll(min(timeout, _MARKER_SECONDS) if self._gated else timeout)
        self._take_words()  # before what was heard: who asks may have been told of what is offered here
        for event in events:
            self._take(event)
        self._pass_markers()
        self._receives.give_up_overdue()
        self._offers.forget_overdue()
        self._report()

    def _say(self, behind: Marker | None, word: Callable[[], None]) -> None:
        if not self._is_broken:
            self._words.append((behind, word))
            self._transport.wake()

    # On the thread.

    def _receive(self, job: PeerJob) -> None:
        self._waiting.discard(job.job_id)
        if job.job_id in self._called_off:
            self._called_off.discard(job.job_id)
            self._receives.ended.append((job.job_id, False))
        else:
            self._receives.receive(job)

    def _cancel(self, job_id: int) -> None:
        """It may have ended, or not have begun yet: what it fills was still in use."""
        if job_id in self._receives:
            self._receives.cancel(job_id)
        elif job_id in self._waiting:
            self._called_off.add(job_id)

    def _run(self) -> None:
        # The engine's main thread may be tied to a core, where it never rests; this one is not to share it.
        with suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        try:
            if self._prepare_thread is not None:
                self._prepare_thread()
            while not self._is_closing:
                self.turn()
            self._stop_receives()
        except Exception:  # a thread's top: whatever went wrong, jobs fail and the engine goes on without peers.
            logger.exception("the peer thread has ended: no blocks are exchanged any more")
        finally:
            self._close()

    def _stop_receives(self) -> None:
        """Tell producers to stop; who says that it has needs no fence."""
        self._receives.cancel_all()
        end = self._clock.monotonic() + _STOP_SECONDS
        while self._receives.num_open and self._clock.monotonic() < end:
            for event in self._transport.poll(0.0):
                self._take(event)
            self._receives.give_up_overdue()
            self._clock.sleep(_MARKER_SECONDS)

    def _close(self) -> None:
        self._is_broken = True
        try:
            self._transport.close()
            self._offers.close()
            self._report()
            # What peers may still write goes to blocks that are ours. The fence ends, however late this thread looks.
            while seconds := self._receives.quiet_in:
                self._clock.sleep(min(max(seconds, _MARKER_SECONDS), _IDLE_SECONDS))
        finally:
            self._offers.close()
            self._receives.close()
            self._report()
            self._is_over = True

    def _take_words(self) -> None:
        """Nothing is pushed here: what is ready waits behind a marker, reached or not."""
        while self._words:
            behind, word = self._words.popleft()
            if behind is None:
                word()
            else:
                self._gated.append((behind, word))

    def _pass_markers(self) -> None:
        waiting, self._gated = self._gated, []
        for marker, word in waiting:
            # In order: what is behind a marker that is not reached waits, and so does all behind it.
            if self._gated or not marker.query():
                self._gated.append((marker, word))
            else:
                word()

    def _take(self, event: PeerEvent) -> None:
        if isinstance(event, Connected):
            self._open_links.add(event.link)
            self._offers.connected(event)
            self._receives.connected(event)
        elif isinstance(event, Lost):
            self._open_links.discard(event.link)
            self._offers.lost(event.link)
            self._receives.lost(event.link)
        elif isinstance(event, Pushed):
            self._offers.pushed(event)
        elif isinstance(event, Arrived):
            self._receives.arrived(event)
        elif event.link in self._open_links:
            self._hear(event)

    def _hear(self, event: Message) -> None:
        link, message = event.link, event.message
        try:
            if not self._offers.hear(link, message) and not self._receives.hear(link, message):
                raise PeerError(f"it said {type(message).__name__}, which nobody expects")
        except PeerError as error:
            self._drop(link, str(error))
        except Exception:  # what a peer has found that nobody thought of
            logger.exception("an internal error costs a link to another engine")
            self._transport.counters.link_faults += 1
            self._drop(link, "an error of this side")

    def _drop(self, link: int, reason: str) -> None:
        self._open_links.discard(link)  # what else it has said is nobody's
        self._transport.drop(link, reason)

    def _report(self) -> None:
        for part in (self._offers, self._receives):
            ended, part.ended = part.ended, []
            self._ended.extend(EndedPeerJob(job_id, ok) for job_id, ok in ended)
            if ended:
                self._has_ended.set()
