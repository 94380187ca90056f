"""Writes that come late: producers over NIXL that are cut off, stopped, or killed while they write into a consumer.

A producer is a process of its own. The consumer's receive fails, its blocks are given to somebody else, and whatever
is written to them from then on is counted. With the agents' own writes that takes a fence of half a minute, so many
pairs are attacked beside each other.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from integration.attack import Attack, Outcome
from integration.attacks_on_peers import NAMES, NUMBERS, PIECES, PROMPT_BLOCKS, Rank, Reached
from integration.relay import Between
from kv_connector.peer.carriers.nixl_agent import why_not
from kv_connector.types import PeerAction, PeerJob

_AT_ONCE = 8
_OURS = "producer: "
_OTHERS = 0xEE
"""What the next owner of the blocks writes into them."""
_SILENCE_SECONDS = 2.0
"""Without anything arriving, until the consumer gives up."""
_WATCH_SECONDS = 10.0
"""How long blocks are watched behind the last thing that was done to their producer."""


class Producer:
    """Another process, which sends a first layer group at once and the second when it is told to."""

    def __init__(self, route: str) -> None:
        command = [sys.executable, "-m", "integration.attacks_on_writes", route]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._line())

    def send_the_rest(self) -> None:
        """Returns when the producer knows of it."""
        self._write("rest")
        self._line()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _write(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        """The next that is for us: NIXL writes to standard output, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_OURS):
                return line.removeprefix(_OURS)
        raise RuntimeError("the producer has ended")


class Middlebox(Between):
    """Carries the side channel until it is cut: then the consumer's side is closed and the producer's is not."""

    def __init__(self, port: int) -> None:
        self._is_cut = False
        super().__init__(port)

    def cut(self) -> None:
        self._is_cut = True
        self._listener.close()
        with suppress(OSError):
            self._ends[0].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_cut = True
        for sock in (self._listener, *self._ends):
            sock.close()

    def _pump(self, source: socket.socket, target: socket.socket, is_consumers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self._is_cut:
                    target.sendall(data)


class Pair:
    """One producer and one consumer in the middle of a transfer, and what is done to them."""

    def __init__(self, route: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.producer = Producer(route)
        self.between = Middlebox(self.producer.port)
        self.consumer = Rank("consumer", route, _SILENCE_SECONDS)
        self.late = self.seconds = 0.0
        self.is_failed = self.has_begun = False

    def cut(self) -> None:
        """The consumer's side of the channel is closed; the producer hears nothing and goes on."""
        self.between.cut()
        self._give_blocks_away(at_random=self.producer.send_the_rest)

    def freeze(self) -> None:
        """The producer stands still with a write to be posted, and goes on when everybody has given it up."""
        self.producer.send_the_rest()
        self.producer.signal(signal.SIGSTOP)
        self._give_blocks_away(at_random=lambda: self.producer.signal(signal.SIGCONT))

    def kill(self) -> None:
        """The producer's process ends with a write to be posted."""
        self.producer.send_the_rest()
        self.producer.signal(signal.SIGKILL)
        self._give_blocks_away(at_random=lambda: None)

    def attack(self, number: int) -> None:
        """Run one of these."""
        try:
            self._begin()
            self.has_begun = True
            (self.cut, self.freeze, self.kill)[number % 3]()
        finally:
            self.producer.close()
            self.between.close()
            self.consumer.close()

    def _begin(self) -> None:
        self.job_id = self.consumer.ask("attacked", self.between.port, "producer")
        end = time.monotonic() + 60
        while not (self.consumer.arrays[0][:PROMPT_BLOCKS] == 0x11).all():
            assert time.monotonic() < end, "the first layers never came"
            time.sleep(0.002)

    def _give_blocks_away(self, at_random: Callable[[], None]) -> None:
        """Somebody else has the blocks once the job has failed. What is to happen to the producer at some time does,
        mostly around the end of the fence."""
        start = time.monotonic()
        delay = self.rng.choice((self.rng.uniform(0, 4), self.rng.uniform(20, 45)))
        timer = threading.Timer(delay, at_random)
        timer.start()
        ok = self.consumer.wait(self.job_id, 120)
        self.seconds = time.monotonic() - start
        self.is_failed = ok is not True
        if self.is_failed:
            for array in self.consumer.arrays:
                array[:PROMPT_BLOCKS] = _OTHERS
            end = max(start + delay, time.monotonic()) + _WATCH_SECONDS
            while time.monotonic() < end:
                time.sleep(0.01)
            self.late = sum(int((array[:PROMPT_BLOCKS] != _OTHERS).sum()) for array in self.consumer.arrays)
        timer.join()


def _attack(route: str, tries: int, seed: int) -> Outcome:
    if why_not() is not None:
        return Outcome({"late_writes_landed": 0}, {"nixl": 0}, not_tried=tries)
    late = failed = begun = 0
    longest = 0.0
    for start in range(0, tries, _AT_ONCE):
        pairs = [Pair(route, seed + number) for number in range(start, min(start + _AT_ONCE, tries))]
        threads = [
            threading.Thread(target=pair.attack, args=(number,)) for number, pair in enumerate(pairs, start=start)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late += sum(pair.late > 0 for pair in pairs)
        failed += sum(pair.is_failed for pair in pairs)
        begun += sum(pair.has_begun for pair in pairs)
        longest = max(longest, *(pair.seconds for pair in pairs))
    return Outcome({"late_writes_landed": late}, {"failed": failed, "longest_s": longest}, not_tried=tries - begun)


def direct(tries: int, seed: int) -> Outcome:
    """The producer's agent writes into the consumer's pool."""
    return _attack("nixl", tries, seed)


def staged(tries: int, seed: int) -> Outcome:
    """The producer's agent writes into slots of the consumer's: where those were unmapped the consumer would end."""
    return _attack("nixl_staged", tries, seed)


WRITE_ATTACKS = (Attack("late_writes_direct", 24, direct), Attack("late_writes_staged", 24, staged))


def main() -> None:
    """A producer; its words come from standard input."""
    rank = Rank("producer", sys.argv[1], 120.0)
    for array, value in zip(rank.arrays, (0x11, 0x22), strict=True):
        array[:PROMPT_BLOCKS] = value
    print(f"{_OURS}{rank.jobs.port}", flush=True)
    job_id, ids = next(NUMBERS), np.arange(PROMPT_BLOCKS)
    rank.jobs.begin(PeerJob(job_id, PeerAction.SEND, "attacked", 0, ids, names=b"".join(NAMES)), Reached())
    rank.jobs.ready([job_id], 1, Reached())
    for _ in sys.stdin:
        rank.jobs.ready([job_id], len(PIECES), Reached())
        print(_OURS, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
