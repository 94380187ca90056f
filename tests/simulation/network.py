"""A network in virtual time: processes, the links between them, and faults that are switched.

A link is TCP as `SideChannel` uses it: what is said arrives once and in order, after a while, or the link is lost, as
each end learns on its own. What was said and not polled out yet goes with a link that is dropped. Links do not wait for
one another. Whatever arrives waits until the process takes a turn: one that was frozen has all of it at once.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_connector.peer.base import Lost, Message, PeerCounters, PeerEvent
from kv_connector.peer.wire.messages import Introduction, WireMessage, decode, encode
from kv_connector.peer.wire.peer_info import PeerInfo

from .clock import Event, VirtualTime

_KEEPALIVE_SECONDS = 10.0


class Network:
    """Who can reach whom, and how fast. Faults are switched at any virtual time, and off by their opposite:

    `slow`             factor on every delay, and `slow_writes` on those of one-sided writes: a device that is busy
    `cut, mend`        nothing of one process reaches another; later all of it does, or the link is lost meanwhile
                       One-sided writes land when they land, however long ago the consumer has lost the link, but not
                       later than the carrier's longest transfer behind their post, and not longer than GONE_SECONDS
                       behind the end of their process.
    Processes are frozen, thawed and killed by themselves (`Process`).
    """

    def __init__(self, time: VirtualTime, name: str = "network") -> None:
        self.time = time
        self.rng = time.stream(name)
        self.seconds = (20e-6, 2e-3)
        """A message, or a part of a write, is on its way between so many."""
        self.slow = 1.0
        self.slow_writes = 1.0
        self.num_writes_behind_a_link = 0
        """Parts of writes that landed when the consumer had lost the link."""
        self.channels: dict[int, SimulatedChannel] = {}
        self.processes: list[Process] = []
        self._cuts: dict[tuple[Process, Process], int] = {}  # with the number of the cut
        self._num_cuts = 0
        self._next_port = 20000
        self._pairs: list[_Pair] = []

    # Faults.

    def cut(self, source: Process, target: Process) -> None:
        """Nothing of `source` reaches `target` from now on. Links notice after a while."""
        self._num_cuts += 1
        number = self._cuts[source, target] = self._num_cuts
        for pair in self._pairs:
            if {end.channel.process for end in pair.ends} == {source, target}:
                pair.times_out(lambda: self._cuts.get((source, target)) == number)

    def mend(self, source: Process, target: Process) -> None:
        if self._cuts.pop((source, target), None) is not None:
            for pair in self._pairs:
                for end in pair.ends:
                    end.go_on()

    def mend_all(self) -> None:
        for source, target in list(self._cuts):
            self.mend(source, target)

    def is_cut(self, source: Process, target: Process) -> bool:
        return (source, target) in self._cuts

    # For links and carriers.

    def delay(self) -> float:
        return self.slow * self.rng.uniform(*self.seconds)

    def write_delay(self) -> float:
        return self.slow_writes * self.rng.uniform(*self.seconds)

    def add(self, channel: SimulatedChannel, port: int) -> int:
        while not port or port in self.channels:
            self._next_port += 1
            port = self._next_port
        self.channels[port] = channel
        return port

    def pair(self, caller: End, listener: End) -> None:
        pair = _Pair(self, caller, listener)
        self._pairs.append(pair)
        processes = caller.channel.process, listener.channel.process
        for source, target in (processes, processes[::-1]):
            if self.is_cut(source, target):
                number = self._cuts[source, target]
                pair.times_out(lambda s=source, t=target, n=number: self._cuts.get((s, t)) == n)  # type: ignore[misc]

    def forget(self, pair: _Pair) -> None:
        if pair in self._pairs:
            self._pairs.remove(pair)

    def check_at_rest(self) -> None:
        """Nothing is cut, nothing is on its way, and every process is at rest."""
        assert not self._cuts, "a cut was not mended"
        for pair in self._pairs:
            for end in pair.ends:
                assert not end.on_its_way and not end.inbox, f"on its way: {[*end.on_its_way, *end.inbox]}"
        for process in self.processes:
            process.check_at_rest()


class Process:
    """A process of an engine's rank on the network. `turn` is called soon after anything has arrived for it."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.is_alive = False
        self.is_frozen = False
        self._is_due = False
        self._timer: Event | None = None
        network.processes.append(self)

    def turn(self) -> None:
        """Takes one turn of whatever runs here."""

    def check_at_rest(self) -> None:
        """Whatever runs here has nothing open."""

    def wake(self, seconds: float | None = None) -> None:
        """Let it take a turn, soon or by then."""
        time = self.network.time
        if seconds is not None:
            if self._timer is None or not self._timer.is_pending or self._timer.time > time.now() + seconds:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = time.call_after(seconds, self.wake, f"{self.name} is due")
        elif not self._is_due and self.is_alive and not self.is_frozen:
            self._is_due = True
            time.call_after(self.network.rng.uniform(1e-6, 2e-4), self._run, f"{self.name}'s turn")

    def freeze(self) -> None:
        """It gets no processor. What it has handed to devices and networks goes on."""
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        self.wake()

    def _run(self) -> None:
        self._is_due = False
        if self.is_alive and not self.is_frozen:
            self.turn()


@dataclass(frozen=True)
class _Hello:
    secret: bytes
    info: PeerInfo


@dataclass(frozen=True)
class _Welcome:
    info: PeerInfo


@dataclass(frozen=True)
class _Gone:
    """The link is lost."""

    reason: str


_Said = _Hello | _Welcome | _Gone | WireMessage


class End:
    """One end of a link: what is on its way to it, and what has arrived and is not taken."""

    def __init__(self, channel: SimulatedChannel, link: int, is_caller: bool) -> None:
        self.channel = channel
        self.link = link
        self.is_caller = is_caller
        self.is_open = False
        self.deadline: float | None = None
        self.pair: _Pair | None = None
        self.unsent: list[_Said] = []
        self.on_its_way: deque[_Said] = deque()
        self.inbox: deque[_Said] = deque()
        self._is_moving = False

    @property
    def other(self) -> End:
        assert self.pair is not None
        return self.pair.ends[self.pair.ends[0] is self]

    @property
    def is_there(self) -> bool:
        return self.channel.ends.get(self.link) is self

    def flush(self) -> None:
        """Hand what was said to the network."""
        if self.pair is not None:
            unsent, self.unsent = self.unsent, []
            if self.other.is_there:
                self.other.on_its_way.extend(unsent)
                self.other.go_on()

    def go_on(self) -> None:
        """Bring the next thing that is on its way, and then those behind it."""
        network = self.channel.network
        if self.on_its_way and not self._is_moving and not self._is_cut():
            self._is_moving = True
            network.time.call_after(network.delay(), self._arrive, f"to {self.channel.process.name}")

    def _arrive(self) -> None:
        self._is_moving = False
        if self._is_cut():
            return  # until it is mended
        count = self.channel.network.rng.randint(1, 3)  # what follows closely comes with it
        while self.on_its_way and count:
            self.inbox.append(self.on_its_way.popleft())
            count -= 1
        self.channel.process.wake()
        self.go_on()

    def _is_cut(self) -> bool:
        return self.channel.network.is_cut(self.other.channel.process, self.channel.process)


class _Pair:
    """Both ends of a link, the caller's first."""

    def __init__(self, network: Network, caller: End, listener: End) -> None:
        self.ends = (caller, listener)
        caller.pair = listener.pair = self
        self._network = network

    def times_out(self, is_still_cut: Callable[[], bool]) -> None:
        """Each end's kernel gives up after a while, if the cut lasts."""
        for end in self.ends:
            seconds = 2 * end.channel.seconds * self._network.rng.uniform(0.9, 1.0)
            seconds += self._network.rng.uniform(0, _KEEPALIVE_SECONDS)

            def expire(end: End = end) -> None:
                if is_still_cut() and end.is_there:
                    end.inbox.append(_Gone("timed out"))
                    end.channel.process.wake()

            self._network.time.call_after(seconds, expire, "a link times out")

    def closed(self, end: End) -> None:
        """One end is gone, and so is what was on its way to it. The other learns of it behind what was sent."""
        other = end.other
        if end.inbox or end.on_its_way:  # it has not read everything: what the other has not read may go, too
            keep = self._network.rng.randint(0, len(other.inbox))
            while len(other.inbox) > keep:
                other.inbox.pop()
        end.inbox.clear()
        end.on_its_way.clear()
        if other.is_there:
            other.on_its_way.append(_Gone("it closed the connection"))
            other.go_on()
        else:
            other.on_its_way.clear()
            self._network.forget(self)


class SimulatedChannel:
    """See `over_channel.Channel`; a handshake is two trips, and compares peer infos as the real one does."""

    def __init__(
        self,
        process: Process,
        bind: str,
        port: int,
        secret: bytes,
        info: PeerInfo,
        seconds: float,
        counters: PeerCounters,
    ) -> None:
        self.process = process
        self.network = process.network
        self.seconds = seconds
        self.ends: dict[int, End] = {}
        self.port = self.network.add(self, port)
        self._info = info
        self._secret = secret
        self._counters = counters
        self._peers: dict[int, PeerInfo] = {}
        self._events: list[PeerEvent] = []
        self._next_link = 0
        self._is_closed = False

    def info_of(self, link: int) -> PeerInfo | None:
        """See `Channel.info_of`."""
        return self._peers.get(link)

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`. Nobody listens where an engine has died: its machine says so."""
        end = self._new_end(is_caller=True)
        listener = self.network.channels.get(port)
        if listener is None or listener.process is self.process:
            end.inbox.append(_Gone("cannot be reached: connection refused"))
            self.process.wake(self.network.delay())
        else:
            self.network.pair(end, listener._new_end(is_caller=False))
            end.unsent.append(_Hello(self._secret, self._over_the_wire()))
        return end.link

    def send(self, link: int, message: WireMessage) -> None:
        """See `PeerTransport.send`."""
        end = self.ends.get(link)
        if end is not None and end.is_open:
            end.unsent.append(decode(encode(message)))
            self.process.wake()

    def watch(self, sock: socket.socket, serve: Callable[[], None]) -> None:
        """See `Channel.watch`."""

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`. What was said since the last `poll` is not sent any more."""
        end = self.ends.get(link)
        if end is not None:
            self._lose(end, reason)

    def poll(self, timeout: float) -> list[PeerEvent]:
        """See `Channel.poll`; never waits."""
        ends = list(self.ends.values())
        self.network.rng.shuffle(ends)  # links are served in no order
        for end in ends:
            end.flush()
            while end.inbox and end.is_there:
                self._take(end, end.inbox.popleft())
            if end.deadline is not None and end.is_there and self.network.time.now() >= end.deadline:
                self._lose(end, f"no handshake within {self.seconds:g} s")
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """See `PeerTransport.wake`."""
        self.process.wake()

    def close(self) -> None:
        """See `Channel.close`; also what becomes of the links of a process that has died."""
        if not self._is_closed:
            self._is_closed = True
            self.network.channels.pop(self.port, None)
            for end in list(self.ends.values()):
                del self.ends[end.link]
                if end.pair is not None:
                    end.pair.closed(end)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be sent or taken, and no handshake is under way."""
        return all(end.is_open and not end.inbox and not end.unsent for end in self.ends.values())

    def _new_end(self, is_caller: bool) -> End:
        self._next_link += 1
        end = self.ends[self._next_link] = End(self, self._next_link, is_caller)
        end.deadline = self.network.time.now() + self.seconds
        self.process.wake()
        self.process.wake(self.seconds)
        return end

    def _take(self, end: End, said: _Said) -> None:
        if isinstance(said, _Gone):
            self._lose(end, said.reason)
        elif isinstance(said, _Hello):
            reason = "it does not know the secret" if said.secret != self._secret else ""
            reason = reason or "; ".join(self._info.differences(said.info))
            if reason:
                end.unsent.append(_Gone(f"it refused: {reason}"))
                end.flush()
                self._lose(end, reason)
            else:
                end.unsent.append(_Welcome(self._over_the_wire()))
                end.flush()
                self._opened(end, said.info)
        elif isinstance(said, _Welcome):
            self._opened(end, said.info)
        else:
            self._events.append(Message(end.link, said))

    def _over_the_wire(self) -> PeerInfo:
        """This side's info as it comes out on the other side."""
        heard = decode(encode(Introduction(self._info)))
        assert isinstance(heard, Introduction)
        return heard.info

    def _opened(self, end: End, info: PeerInfo) -> None:
        end.is_open, end.deadline = True, None
        self._peers[end.link] = info
        self._events.append(info.connected(end.link))

    def _lose(self, end: End, reason: str) -> None:
        del self.ends[end.link]
        self._peers.pop(end.link, None)
        if end.is_open:
            self._counters.lost_links += 1
        else:
            self._counters.refused_links += 1
        self._events.append(Lost(end.link, reason))
        self.process.wake()
        if end.pair is not None:
            end.pair.closed(end)
