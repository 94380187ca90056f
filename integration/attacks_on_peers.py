"""Attacks on the links between engines: strangers, peers that know the secret and mean harm, and a relay in between.

Engines are ranks without an engine around them: the real peer thread over shared memory, or NIXL where it is there.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from integration.attack import Attack, Outcome
from integration.relay import POLICIES, Relay, Said
from kv_connector.peer.base import VERSION, PeerPool, PeerTransport, PoolRegion
from kv_connector.peer.carriers.nixl import NixlTransport
from kv_connector.peer.carriers.nixl_agent import start_agent, why_not
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.nixl import NixlStagedTransport
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from kv_connector.peer.identity import PeerIdentity
from kv_connector.peer.protocol.jobs import PeerJobs
from kv_connector.peer.wire.frames import MAX_FRAME, FrameReader, frame
from kv_connector.peer.wire.messages import (
    Challenge,
    Hello,
    Introduction,
    Nothing,
    Refused,
    RingMapped,
    RingOffered,
    SlotFilled,
    SlotFreed,
    Stop,
    Stopped,
    Want,
    WireMessage,
    Written,
    decode,
    encode,
)
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.peer.wire.session import NONCE_BYTES, Session
from kv_connector.types import PeerAction, PeerJob

SECRET = b"known to the engines of these attacks"
PIECES = (4096, 4096)
NUM_BLOCKS = 64
PROMPT_BLOCKS = 8
TIMEOUT = 5.0
NAMES = [hashlib.sha256(bytes([position])).digest() for position in range(PROMPT_BLOCKS)]
NUMBERS = count(1)


class Reached:
    """A marker that is reached."""

    def query(self) -> bool:
        return True


class Rank:
    """One rank of an engine: its pool, and the peer thread."""

    def __init__(self, engine_id: str, route: str = "shared_memory", deadline: float = 10.0) -> None:
        self.engine_id = engine_id
        self.arrays = [np.zeros((NUM_BLOCKS, piece), dtype=np.uint8) for piece in PIECES]
        regions = tuple(PoolRegion(a.ctypes.data, a.strides[0], a.shape[1]) for a in self.arrays)
        pool = PeerPool(NUM_BLOCKS, regions, keeps=self.arrays)
        self.info = PeerInfo(PeerIdentity("model", "uint8", "NHD", 16, 1, 1, 0, PIECES), engine_id, NUM_BLOCKS)
        endpoint = Endpoint(self.info, "127.0.0.1", 0, SECRET, TIMEOUT)
        self.transport: PeerTransport
        if route == "nixl":
            self.transport = NixlTransport(start_agent(), pool, endpoint)
        elif route == "nixl_staged":
            self.transport = NixlStagedTransport(start_agent(), pool, endpoint, 1 << 20)
        else:
            self.transport = SharedMemoryTransport(pool, endpoint, 1 << 20)
        self.jobs = PeerJobs(self.transport, engine_id, self.info.identity, deadline, TIMEOUT)
        self.jobs.start()
        self.ended: dict[int, bool] = {}

    def offer(self, transfer_id: str) -> int:
        """A prompt is computed, in its first blocks; returns the job."""
        job_id = next(NUMBERS)
        ids = np.arange(PROMPT_BLOCKS)
        self.jobs.begin(PeerJob(job_id, PeerAction.SEND, transfer_id, 0, ids, names=b"".join(NAMES)), Reached())
        self.jobs.ready([job_id], len(PIECES), Reached())
        return job_id

    def ask(self, transfer_id: str, port: int, engine_id: str = "") -> int:
        """Ask who listens at a port for a prompt, into the first blocks; returns the job."""
        job_id, where = next(NUMBERS), {"host": "127.0.0.1", "ports": (port,), "engine_id": engine_id}
        ids = np.arange(PROMPT_BLOCKS)
        job = PeerJob(job_id, PeerAction.RECEIVE, transfer_id, 0, ids, NAMES[-1], request_id="request", **where)  # type: ignore[arg-type]
        self.jobs.begin(job, Reached())
        return job_id

    def wait(self, job_id: int, seconds: float = 30.0) -> bool | None:
        """Whether a job has ended well; None where it does not end."""
        end = time.monotonic() + seconds
        while job_id not in self.ended and time.monotonic() < end:
            self.ended |= {job.job_id: job.ok for job in self.jobs.poll()}
            time.sleep(0.0005)
        return self.ended.get(job_id)

    @property
    def is_dead(self) -> bool:
        """Whether its peer thread has ended."""
        return self.jobs.is_broken

    def close(self) -> None:
        self.jobs.close()


def hand_over(producer: Rank, consumer: Rank, port: int = 0) -> bool:
    """Whether a prompt arrives as it was computed."""
    transfer_id = f"transfer {next(NUMBERS)}"
    for array in producer.arrays:
        array[:PROMPT_BLOCKS] = random.randrange(1, 200)
    producer.offer(transfer_id)
    ok = consumer.wait(consumer.ask(transfer_id, port or producer.jobs.port, producer.engine_id))
    same = all(
        (a[:PROMPT_BLOCKS] == b[:PROMPT_BLOCKS]).all() for a, b in zip(producer.arrays, consumer.arrays, strict=True)
    )
    producer.jobs.withdraw([transfer_id])
    return bool(ok) and same


def resident_mib() -> float:
    """What this process holds of memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Fuzzer:
    """Messages with one thing wrong, from a seed."""

    VALUES = (
        '""', "0", "1", "-1", "0.5", "1e400", "NaN", "-Infinity", "null", "true", "[]", "{}", '"\\ud800"', '"\\u0000"',
        "18446744073709551616", "9" * 4000, "9" * 5000, "[" * 900 + "]" * 900, '"' + "a" * 5000 + '"', '[1,2,"x"]',
        '"../../x"', '["\\udfff"]', '{"a":{"b":[]}}', '"' + "00" * 32 + '"', '"' + "é" * 10 + '"', "[0,1,2,3,4,5,6,7]",
        "[1e3]", '"' + " 0" * 32 + '"', "4294967296", "9007199254740992",
    )  # fmt: skip

    def __init__(self, seed: int, info: PeerInfo) -> None:
        self.rng = random.Random(seed)
        extra = {"transport": "shared_memory", "slot_bytes": 131072, "socket": "nobody"}
        self.info = PeerInfo(info.identity, "fuzzer", NUM_BLOCKS, extra)
        self.messages: tuple[WireMessage, ...] = (
            Want("t", "", 1, 0, PROMPT_BLOCKS, NAMES[-1], tuple(range(PROMPT_BLOCKS))),
            Want("early", "", 2, 0, 2, NAMES[1], (0, 1)),
            Nothing("t", "", NAMES[-1]),
            Nothing("early", "", NAMES[1]),
            Stop(1),
            Stopped(1),
            Refused(1, "no"),
            RingOffered(8, 131072, "00" * 16),
            RingMapped(4096, ""),
            SlotFilled(1, 0, 1, 0, 2, 0),
            SlotFreed(0),
            Written(1, 0, 1, 0, 2),
            Introduction(self.info),
            Hello(VERSION, bytes(NONCE_BYTES)),
        )

    def some(self) -> bytes:
        """Any message, right or wrong."""
        return encode(self.rng.choice(self.messages))

    def wrong(self, message: bytes) -> bytes:
        """A message with one thing wrong."""
        rng = self.rng
        kind = rng.randrange(10)
        if kind == 0:
            return rng.randbytes(rng.randrange(200))
        if kind == 1:
            place = rng.randrange(len(message))
            return message[:place] + rng.randbytes(1) + message[place + 1 :]
        if kind == 2:
            return message[: rng.randrange(len(message))]
        body = json.loads(message)
        places = list(_places(body))
        owner, key = rng.choice(places)
        if kind == 3:
            del owner[key]
            return json.dumps(body).encode()
        owner[key] = "@@"
        return json.dumps(body).replace('"@@"', rng.choice(self.VALUES)).encode("utf-8", "surrogatepass")


def _places(body: Any) -> Any:
    for key in list(body) if isinstance(body, dict) else range(len(body)):
        yield body, key
        if isinstance(body[key], (dict, list)):
            yield from _places(body[key])


class Stranger:
    """A connection that says whatever it likes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(TIMEOUT)
        self.reader = FrameReader()
        self.reader.bound = MAX_FRAME

    def say(self, *payloads: bytes) -> None:
        self.sock.sendall(b"".join(frame(payload) for payload in payloads))

    def hear(self) -> bytes:
        """The next message; raises OSError where none comes."""
        while (payload := self.reader.take()) is None:
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionResetError
            self.reader.feed(data)
        return payload

    def challenge(self, nonce: bytes) -> Session:
        """Begin a handshake; what follows is sealed with this."""
        self.say(encode(Hello(VERSION, nonce)))
        answer = decode(self.hear())
        assert isinstance(answer, Challenge)
        return Session(SECRET, nonce, answer.nonce, is_caller=True)

    def end(self) -> None:
        """Wait until the other side has read everything and closed."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(65536):
                pass
        self.sock.close()


def fuzz(tries: int, seed: int) -> Outcome:
    """Strangers and peers send messages with one thing wrong; hosts that the engine was told to call answer so."""
    victim, deaths, errors, refused = Rank("victim", deadline=2.0), 0, 0, 0
    fuzzer, listener = Fuzzer(seed, victim.info), socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.settimeout(TIMEOUT)
    before, offered = 0.0, 0
    for number in range(tries):
        if number == tries // 10:
            before = resident_mib()
        if offered not in victim.ended:
            victim.ended |= {job.job_id: job.ok for job in victim.jobs.poll()}
        if number == 0 or offered in victim.ended:
            victim.ended.clear()
            offered = victim.offer("t")
        try:
            _fuzz_once(victim, fuzzer, listener)
        except OSError:
            refused += 1
        if victim.is_dead:
            errors += victim.transport.counters.link_faults
            deaths, victim = deaths + 1, Rank("victim", deadline=2.0)
            offered = victim.offer("t")
    errors += victim.transport.counters.link_faults
    grown = resident_mib() - before
    works = _works(victim)
    victim.close()
    listener.close()
    claims = {"thread_deaths": deaths, "errors_that_cost_a_link": errors, "good_transfers_failed": int(not works)}
    return Outcome(claims, {"cut_off": refused, "memory_grown_mib": round(grown, 1)})


def _fuzz_once(victim: Rank, fuzzer: Fuzzer, listener: socket.socket) -> None:
    rng = fuzzer.rng
    stage, nonce = rng.randrange(6), rng.randbytes(NONCE_BYTES)
    if stage == 5:
        _fuzz_as_listener(victim, fuzzer, listener, nonce)
        return
    stranger = Stranger(socket.create_connection(("127.0.0.1", victim.jobs.port)))
    try:
        if stage == 0:
            stranger.say(fuzzer.wrong(encode(Hello(VERSION, nonce))))
            return
        session = stranger.challenge(nonce)
        introduction = encode(Introduction(fuzzer.info))
        if stage == 1:
            stranger.say(fuzzer.wrong(introduction))
        elif stage == 2:  # and something behind it that nobody has been met for
            stranger.say(session.seal(fuzzer.wrong(introduction)), session.seal(fuzzer.some()))
        else:
            stranger.say(session.seal(introduction))
            stranger.hear()
            said = [fuzzer.wrong(fuzzer.some()) if rng.random() < 0.7 else fuzzer.some() for _ in range(4)]
            stranger.say(*(session.seal(payload) for payload in said))
    finally:
        stranger.end()


def _fuzz_as_listener(victim: Rank, fuzzer: Fuzzer, listener: socket.socket, nonce: bytes) -> None:
    victim.ask("elsewhere", listener.getsockname()[1])
    stranger = Stranger(listener.accept()[0])
    try:
        hello = decode(stranger.hear())
        assert isinstance(hello, Hello)
        session = Session(SECRET, hello.nonce, nonce, is_caller=False)
        challenge = encode(Challenge(VERSION, nonce, session.proof))
        if fuzzer.rng.random() < 0.5:
            stranger.say(fuzzer.wrong(challenge))
            return
        stranger.say(challenge)
        stranger.hear()
        stranger.say(session.seal(fuzzer.wrong(encode(Introduction(fuzzer.info)))), session.seal(fuzzer.some()))
    finally:
        stranger.end()


def _works(rank: Rank) -> bool:
    """Whether a good peer is still served."""
    other = Rank("good")
    try:
        return hand_over(rank, other)
    finally:
        other.close()


def junk(tries: int, seed: int) -> Outcome:
    """Connections that say anything, or nothing, and go or stay, while two engines hand prompts over."""
    rng = random.Random(seed)
    producer, consumer = Rank("producer"), Rank("consumer")
    kept: deque[socket.socket] = deque(maxlen=100)
    failed = handed = 0
    for number in range(tries):
        with suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", producer.jobs.port), timeout=TIMEOUT)
            said = (b"", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(rng.randrange(1, 400)), frame(rng.randbytes(50)))
            sock.sendall(rng.choice((*said, struct.pack(">I", 1 << 31), frame(encode(Hello(VERSION, bytes(32)))))))
            if rng.random() < 0.5:
                sock.close()
            else:
                if len(kept) == kept.maxlen:
                    kept.popleft().close()
                kept.append(sock)
        if number % 500 == 0:
            handed += 1
            failed += not hand_over(producer, consumer)
    deaths = producer.is_dead + consumer.is_dead
    for sock in kept:
        sock.close()
    for rank in (producer, consumer):
        rank.close()
    return Outcome({"thread_deaths": deaths, "good_transfers_failed": failed}, {"good_transfers": handed})


_GIVEN_UP_SECONDS = 6.0
"""By then a transfer has ended, or waits for what may still be written over a link that is lost."""


def relay(tries: int, seed: int) -> Outcome:
    """Somebody who does not know the secret passes on what two engines say, with changes. Copies of one into the
    other's pool, where NIXL is there: those land where a want says."""
    rng, is_nixl = random.Random(seed), why_not() is None
    route = "nixl" if is_nixl else "shared_memory"
    producer, consumer = Rank("producer", route, 3.0), Rank("consumer", route, 3.0)
    overwritten = wrong = changed = accepted = received = 0
    earlier: Said = {}
    for number in range(tries):
        for array in consumer.arrays:
            array[:] = 0xEE
        for array in producer.arrays:
            array[:PROMPT_BLOCKS] = rng.randrange(1, 200)
        policy, transfer_id = POLICIES[number % len(POLICIES)], f"relayed {number}"
        between = Relay(producer.jobs.port, policy, rng, earlier)
        producer.offer(transfer_id)
        ok = consumer.wait(consumer.ask(transfer_id, between.port, producer.engine_id), _GIVEN_UP_SECONDS)
        producer.jobs.withdraw([transfer_id])
        between.close()
        changed += between.num_changed
        accepted += between.num_accepted
        earlier = max(earlier, between.said, key=lambda said: sum(map(len, said.values())))
        received += bool(ok)
        pairs = list(zip(producer.arrays, consumer.arrays, strict=True))
        overwritten += int(any((there[PROMPT_BLOCKS:] != 0xEE).any() for _, there in pairs))
        wrong += int(bool(ok) and any((a[:PROMPT_BLOCKS] != b[:PROMPT_BLOCKS]).any() for a, b in pairs))
    works = hand_over(producer, consumer)
    claims = {
        "changed_messages_accepted": accepted,
        "relay_overwrites": overwritten,
        "wrong_bytes": wrong,
        "thread_deaths": producer.is_dead + consumer.is_dead,
        "good_transfers_failed": int(not works),
    }
    for rank in (producer, consumer):
        rank.close()
    return Outcome(claims, {"messages_changed": changed, "received_unchanged": received, "nixl": int(is_nixl)})


PEER_ATTACKS = (Attack("fuzz", 100_000, fuzz), Attack("junk", 50_000, junk), Attack("relay", 100, relay))
