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
the request of a KV transfer is preempted whoever asks waits, as before its beginning. Where the KV heads of this rank
are divided over several ranks of the consumer, each of them asks for its own, and blocks are held until all of them
have theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from ...types import PeerJob
from ..base import Connected, PeerError, PeerTransport, Push, Pushed
from ..identity import PeerIdentity
from ..wire.fields import check_ids
from ..wire.messages import HASH_BYTES, Nothing, Refused, Stop, Want, WireMessage
from .early import NOT_HELD, Asker, Early, Key, Wanted
from .stops import Stops


@dataclass(slots=True)
class _Sending:
    """A job, and how far it is: leading regions that are ready, and that were pushed to each asker, by place."""

    job: PeerJob
    ready: int = 0
    pushed: dict[int, int] = field(default_factory=dict)
    pushes: set[int] = field(default_factory=set)  # under way
    is_ending: bool = False

    @property
    def stop(self) -> int:
        return self.job.first + self.job.num_blocks


@dataclass(slots=True)
class _Offer:
    """A block group of a KV transfer. `names` are those of all its blocks, from position `first` on; `num_left` of them
    are still to be dealt with. Of `num_askers` ranks, 0 before the first has asked, each is in `wants` or `unwanted`
    once it has, by place."""

    key: Key
    first: int
    names: list[bytes]
    num_left: int
    num_askers: int = 0
    wants: dict[int, Wanted] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)  # what is still to be computed is not for them
    sendings: dict[int, _Sending] = field(default_factory=dict)

    @property
    def is_unwanted(self) -> bool:
        """By all; what is still to be computed of it is let go at once."""
        return len(self.unwanted) == self.num_askers > 0

    def has_heard(self, asker: Asker) -> bool:
        """Whether an asker has had its say, or another engine has whose heads are divided otherwise."""
        is_other = self.num_askers not in (0, asker.count)
        return is_other or asker.place in self.wants or asker.place in self.unwanted


class Offers:
    """The producer's side: matches wants with offers. `ended` collects (job id, ok) for the owner to take. Transfers
    that are declined before they are offered, or were withdrawn, are remembered for `deadline_seconds`."""

    def __init__(
        self,
        transport: PeerTransport,
        engine_id: str,
        identity: PeerIdentity,
        deadline_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.ended: list[tuple[int, bool]] = []
        self._transport = transport
        self._engine_id = engine_id
        self._shard = identity.shard
        self._num_regions = len(identity.pieces)
        self._offers: dict[Key, _Offer] = {}
        self._by_job: dict[int, _Offer] = {}
        self._by_push: dict[int, tuple[_Offer, _Sending, Wanted]] = {}
        self._early = Early(deadline_seconds, clock)
        self._stops = Stops(self._say)
        self._peers: dict[int, Connected] = {}  # by link
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
            wants, nones = self._early.take(key, names)
            for want in wants:
                self._accept(offer, want)
            for asker in nones:
                self._want_nothing(offer, asker)
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
            for want in offer.wants.values():
                self._refuse(want, NOT_HELD)
            offer.wants.clear()
            self._let_go(offer)

    def withdraw(self, transfer_id: str) -> None:
        """Offer nothing of it any more, of no block group, and let nobody wait for it."""
        self.suspend(transfer_id)
        for want in self._early.withdraw(transfer_id):
            self._refuse(want, NOT_HELD)

    # What peers say.

    def connected(self, peer: Connected) -> None:
        """A link is open."""
        self._peers[peer.link] = peer

    def lost(self, link: int) -> None:
        """A peer is gone: what it wanted early is forgotten. What it was promised is let go by the push that fails."""
        self._peers.pop(link, None)
        self._early.lost(link)

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
        offer, sending, want = self._by_push.pop(event.number)
        sending.pushes.discard(event.number)
        if not event.ok and offer.wants.get(want.asker.place) is want:
            self._refuse(want, "a push failed")
            self._unwanted(offer, want.asker.place)
        self._stops.ended(event.number)
        if sending.is_ending:
            self._end(offer, sending, ok=offer.is_unwanted)
        else:
            self._advance(offer)

    def forget_overdue(self) -> None:
        """Forget what was withdrawn, and what was not wanted of KV transfers that nobody has begun in time: their ids
        may come again."""
        self._early.forget_overdue()

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

    def _asker(self, link: int) -> Asker:
        shard = self._peers[link].shard
        partners = self._shard.partners(shard.tp_size)
        return Asker(link, partners.index(shard.rank), len(partners))

    def _hear_want(self, link: int, message: Want) -> None:
        block_ids = check_ids(message.blocks, self._peers[link].num_blocks)
        want = Wanted(self._asker(link), message.grant, message.first, message.stop, message.name, block_ids)
        engine_id, key = message.engine, (message.transfer, message.group)
        offer = self._offers.get(key)
        if engine_id not in ("", self._engine_id):
            self._refuse(want, "the engine has been started anew since")
        elif offer is not None:
            self._accept(offer, want)
            self._advance(offer)
        elif engine_id:
            self._refuse(want, NOT_HELD)
        elif reason := self._early.want(key, want):
            self._refuse(want, reason)

    def _hear_nothing(self, link: int, message: Nothing) -> None:
        key, asker = (message.transfer, message.group), self._asker(link)
        offer = self._offers.get(key)
        if message.engine not in ("", self._engine_id):
            return
        if offer is not None:
            if message.name in offer.names:
                self._want_nothing(offer, asker)
                self._advance(offer)
        elif not message.engine:
            self._early.want_nothing(key, message.name, asker)

    def _accept(self, offer: _Offer, want: Wanted) -> None:
        if offer.has_heard(want.asker):
            self._refuse(want, "the blocks were asked for before")
        elif not offer.first <= want.first < want.stop <= offer.first + len(offer.names):
            self._refuse(want, f"positions {want.first} to {want.stop} of group {offer.key[1]} are not offered")
        elif offer.names[want.stop - 1 - offer.first] != want.name:
            self._refuse(want, "the prompts are not the same")
        else:
            offer.num_askers = want.asker.count
            offer.wants[want.asker.place] = want

    def _want_nothing(self, offer: _Offer, asker: Asker) -> None:
        if not offer.has_heard(asker):
            offer.num_askers = asker.count
            offer.unwanted.add(asker.place)

    def _hear_stop(self, link: int, grant: int) -> None:
        self._early.stop(link, grant)
        # Also those of an offer that is not held any more, or not wanted: they still write to the grant's blocks.
        under_way = [n for n, (_, _, want) in self._by_push.items() if (want.asker.link, want.grant) == (link, grant)]
        self._stops.begin(link, grant, under_way)
        for offer in list(self._offers.values()):
            for want in list(offer.wants.values()):
                if (want.asker.link, want.grant) == (link, grant):
                    self._unwanted(offer, want.asker.place)
        self._stops.tell()

    # Progress of offers.

    def _advance(self, offer: _Offer) -> None:
        """Push what is wanted and ready, and end what is done: each asker has what it wants of it."""
        for sending in list(offer.sendings.values()):
            if sending.is_ending:
                continue
            num_done = len(offer.unwanted)
            for want in list(offer.wants.values()):
                num_done += self._push(offer, want, sending)
            if num_done == offer.num_askers > 0 and not sending.pushes:
                self._end(offer, sending, ok=True)

    def _push(self, offer: _Offer, want: Wanted, sending: _Sending) -> bool:
        """Push what is ready; whether all that is wanted was pushed before."""
        first, stop = max(want.first, sending.job.first), min(want.stop, sending.stop)
        place = want.asker.place
        pushed = sending.pushed.get(place, 0)
        if first >= stop or pushed == self._num_regions:
            return True
        if sending.ready > pushed:
            number, regions = next(self._numbers), range(pushed, sending.ready)
            sending.pushed[place] = sending.ready
            sending.pushes.add(number)
            self._by_push[number] = offer, sending, want
            source_ids = sending.job.device_ids[first - sending.job.first : stop - sending.job.first]
            target_ids = want.block_ids[first - want.first : stop - want.first]
            push = Push(number, want.grant, first - want.first, source_ids, target_ids, regions)
            self._transport.push(want.asker.link, push)
        return False

    def _unwanted(self, offer: _Offer, place: int) -> None:
        """An asker wants no more of it."""
        del offer.wants[place]
        offer.unwanted.add(place)
        for number, (other, _, want) in list(self._by_push.items()):
            if other is offer and want.asker.place == place:
                self._transport.cancel(number)
        self._advance(offer)

    def _let_go(self, offer: _Offer) -> None:
        """It is not held any more. What nobody wants is as good as sent."""
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

    def _refuse(self, want: Wanted, reason: str) -> None:
        self._say(want.asker.link, Refused(want.grant, reason))

    def _say(self, link: int, message: WireMessage) -> None:
        try:
            self._transport.send(link, message)
        except PeerError as error:
            self._transport.drop(link, str(error))
