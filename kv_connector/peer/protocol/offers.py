"""The producer's part of KV transfers: blocks that are offered, who wants them, and what has been pushed.

    Want       positions of a prompt, and the asker's blocks for them
    Nothing    nothing of it is wanted
    Stop       answered by Stopped
    Refused    the answer to a want that will not be served

A want may come before anything is offered; then blocks are pushed as they are computed, some layers at a time. Who
asks, or wants nothing, must name the last block: names are chained hashes, so that one stands for everything in front
of it, and who guesses the id of a KV transfer ends nothing.

Each block group of a model is offered and wanted by itself, under the id of the KV transfer; all of them begin in one
step, and are withdrawn together. Who asks for what was withdrawn, or had asked before it was offered, is refused; while
the request of a KV transfer is preempted whoever asks waits, as before its beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from ...types import PeerJob
from ..base import Ids, PeerError, PeerTransport, Push, Pushed, check_ids
from ..wire.messages import HASH_BYTES, Nothing, Refused, Stop, Stopped, Want, WireMessage

MOST_EARLY_WANTS = 1024
MOST_EARLY_BLOCKS = 1 << 20
"""Of all early wants together: 8 MiB."""
MOST_EARLY_NONES = 1024
MOST_WITHDRAWN = 1024
"""KV transfers that are remembered."""


_NOT_HELD = "the blocks are not held any more"
_Key = tuple[str, int]
"""A KV transfer, and a block group of it."""


@dataclass(slots=True)
class _Want:
    link: int
    grant: int
    first: int
    stop: int
    name: bytes
    block_ids: Ids


@dataclass(slots=True)
class _EarlyNone:
    """Of a KV transfer that nobody has begun: this link wants nothing of it, if its last block has this name. Forgotten
    at the deadline."""

    link: int
    deadline: float


@dataclass(slots=True)
class _Sending:
    """A job, and how far it is: leading regions that are ready, and that were pushed."""

    job: PeerJob
    ready: int = 0
    pushed: int = 0
    pushes: set[int] = field(default_factory=set)  # under way
    is_ending: bool = False

    @property
    def stop(self) -> int:
        return self.job.first + self.job.num_blocks


@dataclass(slots=True)
class _Offer:
    """A block group of a KV transfer. `names` are those of all its blocks, from position `first` on; `num_left` of them
    are still to be dealt with."""

    key: _Key
    first: int
    names: list[bytes]
    num_left: int
    want: _Want | None = None
    is_unwanted: bool = False  # what is still to be computed of it is let go at once
    sendings: dict[int, _Sending] = field(default_factory=dict)


@dataclass(slots=True)
class _Stop:
    """A grant that is to be filled no more: the peer is told once these pushes have ended."""

    link: int
    grant: int
    pushes: set[int]


class Offers:
    """Matches wants with offers. `ended` collects (job id, ok) for the owner to take. What is not wanted before it is
    offered, and what was withdrawn, is remembered for `deadline_seconds`."""

    def __init__(
        self,
        transport: PeerTransport,
        engine_id: str,
        num_regions: int,
        deadline_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.ended: list[tuple[int, bool]] = []
        self._transport = transport
        self._engine_id = engine_id
        self._num_regions = num_regions
        self._seconds = deadline_seconds
        self._clock = clock
        self._offers: dict[_Key, _Offer] = {}
        self._by_job: dict[int, _Offer] = {}
        self._by_push: dict[int, tuple[_Offer, _Sending, _Want]] = {}
        self._early: dict[_Key, _Want] = {}
        self._early_nones: dict[tuple[str, bytes], _EarlyNone] = {}  # by KV transfer and name, the oldest first
        self._withdrawn: dict[str, float] = {}  # by KV transfer, the oldest first: until when it is remembered
        self._stops: list[_Stop] = []
        self._peers: dict[int, int] = {}  # by link: blocks of the peer's pool
        self._numbers = count(1)

    # What this side's engine says.

    def offer(self, job: PeerJob) -> None:
        """Blocks that are computed by the step that runs now, or what will be offered of a group in later ones."""
        self.forget_overdue()
        key = job.transfer_id, job.group
        offer = self._offers.get(key)
        if offer is None:
            names = [job.names[i : i + HASH_BYTES] for i in range(0, len(job.names), HASH_BYTES)]
            if not names:  # its first part was withdrawn
                self.ended.append((job.job_id, False))
                return
            offer = self._offers[key] = _Offer(key, job.first, names, len(names))
            self._withdrawn.pop(job.transfer_id, None)
            early = self._early.pop(key, None)
            if early is not None:
                self._accept(offer, early)
            offer.is_unwanted = self._early_nones.pop((job.transfer_id, names[-1]), None) is not None
        if not job.num_blocks:
            self.ended.append((job.job_id, True))
            return
        offer.sendings[job.job_id] = _Sending(job)
        self._by_job[job.job_id] = offer
        self._advance(offer)

    def ready(self, job_id: int, regions: int) -> None:
        """The leading `regions` of the job's blocks hold what they should."""
        offer = self._by_job.get(job_id)
        if offer is not None:
            sending = offer.sendings[job_id]
            sending.ready = max(sending.ready, regions)
            self._advance(offer)

    def fail(self, job_id: int) -> None:
        """The job's blocks do not hold what they should; they will be offered anew."""
        offer = self._by_job.get(job_id)
        if offer is None:
            return
        if offer.sendings[job_id].pushed:
            self.suspend(offer.key[0])  # some of it is gone already: nobody may use it
        else:
            self._end(offer, offer.sendings[job_id], ok=False)

    def suspend(self, transfer_id: str) -> None:
        """Offer nothing of it any more, of no block group, until it is offered anew."""
        for key in [key for key in self._offers if key[0] == transfer_id]:
            offer = self._offers.pop(key)
            if offer.want is not None:
                self._refuse(offer.want, _NOT_HELD)
                offer.want = None
            self._let_go(offer)

    def withdraw(self, transfer_id: str) -> None:
        """Offer nothing of it any more, of no block group, and let nobody wait for it."""
        self.suspend(transfer_id)
        for key in [key for key in self._early if key[0] == transfer_id]:
            self._refuse(self._early.pop(key), _NOT_HELD)
        self._withdrawn.pop(transfer_id, None)
        while len(self._withdrawn) >= MOST_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]
        self._withdrawn[transfer_id] = self._clock() + self._seconds

    # What peers say.

    def connected(self, link: int, num_blocks: int) -> None:
        """A peer with a pool of so many blocks."""
        self._peers[link] = num_blocks

    def lost(self, link: int) -> None:
        """A peer is gone: what it wanted early is forgotten. What it was promised is let go by the push that fails."""
        self._peers.pop(link, None)
        self._early = {name: want for name, want in self._early.items() if want.link != link}
        self._early_nones = {name: none for name, none in self._early_nones.items() if none.link != link}

    def hear(self, link: int, message: WireMessage) -> bool:
        """Take a message if it is for producers; raises PeerError for one that a peer may not send."""
        if isinstance(message, Want):
            self._hear_want(link, message)
        elif isinstance(message, Nothing):
            self._hear_nothing(link, message)
        elif isinstance(message, Stop):
            self._hear_stop(link, message.grant)
        else:
            return False
        return True

    def pushed(self, event: Pushed) -> None:
        """A push has ended."""
        offer, sending, _ = self._by_push.pop(event.number)
        sending.pushes.discard(event.number)
        if not event.ok and offer.want is not None:
            self._refuse(offer.want, "a push failed")
            self._unwanted(offer)
        for stop in self._stops:
            stop.pushes.discard(event.number)
        self._tell_stopped()
        if sending.is_ending:
            self._end(offer, sending, ok=offer.is_unwanted)
        else:
            self._advance(offer)

    def forget_overdue(self) -> None:
        """Forget what was withdrawn, and what was not wanted of KV transfers that nobody has begun in time: their ids
        may come again."""
        now = self._clock()
        while self._early_nones and next(iter(self._early_nones.values())).deadline <= now:
            del self._early_nones[next(iter(self._early_nones))]
        while self._withdrawn and next(iter(self._withdrawn.values())) <= now:
            del self._withdrawn[next(iter(self._withdrawn))]

    @property
    def num_open(self) -> int:
        """Jobs that have not ended."""
        return len(self._by_job)

    def close(self) -> None:
        """Nothing is offered any more, and nothing of it is on its way."""
        self.ended += [(job_id, False) for job_id in self._by_job]
        self._by_job.clear()
        self._by_push.clear()
        self._offers.clear()

    def _hear_want(self, link: int, message: Want) -> None:
        block_ids = check_ids(message.blocks, self._peers[link])
        want = _Want(link, message.grant, message.first, message.stop, message.name, block_ids)
        engine_id, key = message.engine, (message.transfer, message.group)
        num_early = sum(len(early.block_ids) for early in self._early.values())
        offer = self._offers.get(key)
        if engine_id not in ("", self._engine_id):
            self._refuse(want, "the engine has been started anew since")
        elif offer is not None:
            self._accept(offer, want)
            self._advance(offer)
        elif engine_id or message.transfer in self._withdrawn:
            self._refuse(want, _NOT_HELD)
        elif len(self._early) >= MOST_EARLY_WANTS or num_early + len(block_ids) > MOST_EARLY_BLOCKS:
            self._refuse(want, "too many blocks are asked for of KV transfers that nobody has begun")
        elif key in self._early:
            self._refuse(want, "the KV transfer is asked for twice, and nobody has begun it")
        elif (message.transfer, want.name) in self._early_nones:
            self._refuse(want, "the blocks were not wanted before")
        else:
            self._early[key] = want

    def _hear_nothing(self, link: int, message: Nothing) -> None:
        wanted, key = (message.transfer, message.group), (message.transfer, message.name)
        offer = self._offers.get(wanted)
        if message.engine not in ("", self._engine_id):
            return
        if offer is not None:
            if offer.want is None and offer.names[-1] == message.name:
                self._unwanted(offer)
        elif not message.engine and wanted not in self._early:
            self._early_nones.pop(key, None)
            while len(self._early_nones) >= MOST_EARLY_NONES:
                del self._early_nones[next(iter(self._early_nones))]
            self._early_nones[key] = _EarlyNone(link, self._clock() + self._seconds)

    def _accept(self, offer: _Offer, want: _Want) -> None:
        if offer.want is not None or offer.is_unwanted:
            self._refuse(want, "the blocks were asked for before")
        elif not offer.first <= want.first < want.stop <= offer.first + len(offer.names):
            self._refuse(want, f"positions {want.first} to {want.stop} of group {offer.key[1]} are not offered")
        elif offer.names[want.stop - 1 - offer.first] != want.name:
            self._refuse(want, "the prompts are not the same")
        else:
            offer.want = want

    def _hear_stop(self, link: int, grant: int) -> None:
        self._early = {k: w for k, w in self._early.items() if (w.link, w.grant) != (link, grant)}
        # Also those of an offer that is not held any more, or not wanted: they still write to the grant's blocks.
        under_way = [
            number for number, (_, _, want) in self._by_push.items() if (want.link, want.grant) == (link, grant)
        ]
        self._stops.append(_Stop(link, grant, set(under_way)))
        for offer in list(self._offers.values()):
            if offer.want is not None and (offer.want.link, offer.want.grant) == (link, grant):
                self._unwanted(offer)
        self._tell_stopped()

    def _tell_stopped(self) -> None:
        for stop in [stop for stop in self._stops if not stop.pushes]:
            self._stops.remove(stop)
            self._say(stop.link, Stopped(stop.grant))

    # How it goes on.

    def _advance(self, offer: _Offer) -> None:
        """Push what is wanted and ready, and end what is done."""
        if offer.is_unwanted:
            self._let_go(offer)
        for sending in list(offer.sendings.values()):
            want = offer.want
            if want is not None:
                self._push(offer, want, sending)

    def _push(self, offer: _Offer, want: _Want, sending: _Sending) -> None:
        first, stop = max(want.first, sending.job.first), min(want.stop, sending.stop)
        if sending.is_ending:
            return
        if first >= stop:
            self._end(offer, sending, ok=True)
        elif sending.ready > sending.pushed:
            number, regions = next(self._numbers), range(sending.pushed, sending.ready)
            sending.pushed = sending.ready
            sending.pushes.add(number)
            self._by_push[number] = offer, sending, want
            source_ids = sending.job.device_ids[first - sending.job.first : stop - sending.job.first]
            target_ids = want.block_ids[first - want.first : stop - want.first]
            self._transport.push(
                want.link, Push(number, want.grant, first - want.first, source_ids, target_ids, regions)
            )
        elif sending.pushed == self._num_regions and not sending.pushes:
            self._end(offer, sending, ok=True)

    def _unwanted(self, offer: _Offer) -> None:
        offer.want, offer.is_unwanted = None, True
        self._let_go(offer)

    def _let_go(self, offer: _Offer) -> None:
        """What nobody wants is as good as sent."""
        for sending in list(offer.sendings.values()):
            self._end(offer, sending, ok=offer.is_unwanted)

    def _end(self, offer: _Offer, sending: _Sending, ok: bool) -> None:
        """The job ends, once nothing of it is on its way."""
        if sending.pushes:
            if not sending.is_ending:
                sending.is_ending = True
                for number in list(sending.pushes):
                    self._transport.cancel(number)
            return
        job_id = sending.job.job_id
        del offer.sendings[job_id], self._by_job[job_id]
        self.ended.append((job_id, ok))
        if ok or offer.is_unwanted:
            offer.num_left -= sending.job.num_blocks
        if offer.num_left <= 0 and self._offers.get(offer.key) is offer:
            del self._offers[offer.key]

    def _refuse(self, want: _Want, reason: str) -> None:
        self._say(want.link, Refused(want.grant, reason))

    def _say(self, link: int, message: WireMessage) -> None:
        try:
            self._transport.send(link, message)
        except PeerError as error:
            self._transport.drop(link, str(error))
