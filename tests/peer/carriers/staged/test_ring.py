"""Memory that is handed from process to process: whoever else is on the machine keeps nobody from it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kv_connector.peer.carriers.staged import ring
from kv_connector.peer.carriers.staged.ring import _MOST_UNCLAIMED, _UNCLAIMED_SECONDS, Descriptors
from tests.peer.peers import Arrived, Backend, Lost, Pool, Side, link_up, push_all, until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def descriptors(clock: Clock) -> Iterator[Descriptors]:
    found = Descriptors(clock)
    yield found
    found.close()


def connect(name: str) -> socket.socket:
    """Who connects and sends nothing."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(b"\0" + name.encode())
    except BlockingIOError:
        sock.close()
        raise
    return sock


def hand_over(descriptors: Descriptors) -> str:
    """The token of memory that is handed over."""
    token, fd = secrets.token_hex(ring.TOKEN_BYTES), ring.create(1, 4096)
    ring.hand_over(descriptors.name, token, fd)
    os.close(fd)
    return token


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_is_had_once(descriptors: Descriptors) -> None:
    token = hand_over(descriptors)
    fd = descriptors.take(token)
    assert fd is not None
    os.close(fd)
    assert descriptors.take(token) is None


def test_who_connects_and_says_nothing_keeps_nobody_out(descriptors: Descriptors) -> None:
    with ExitStack() as stack:
        for _ in range(5 * _MOST_UNCLAIMED):
            stack.enter_context(connect(descriptors.name))
            descriptors.receive()
        fd = descriptors.take(hand_over(descriptors))
        assert fd is not None
        os.close(fd)


def test_descriptors_that_nobody_asks_for_keep_nobody_out(descriptors: Descriptors) -> None:
    before = num_open()
    tokens = []
    for _ in range(3 * _MOST_UNCLAIMED):
        tokens.append(hand_over(descriptors))
        descriptors.receive()
    assert num_open() - before <= _MOST_UNCLAIMED
    assert descriptors.take(tokens[0]) is None, "the oldest go first"
    fd = descriptors.take(hand_over(descriptors))
    assert fd is not None
    os.close(fd)


def test_what_nobody_asks_for_goes_in_time(descriptors: Descriptors, clock: Clock) -> None:
    before = num_open()
    with connect(descriptors.name):
        old = hand_over(descriptors)
        descriptors.receive()
        clock.now = _UNCLAIMED_SECONDS / 2
        young = hand_over(descriptors)
        descriptors.receive()
        clock.now = _UNCLAIMED_SECONDS
        assert descriptors.take(old) is None
        fd = descriptors.take(young)
        assert fd is not None
        os.close(fd)
    assert num_open() == before


def test_a_token_that_comes_again_replaces_nothing(descriptors: Descriptors) -> None:
    token, fds = "ab" * ring.TOKEN_BYTES, [ring.create(1, 4096), ring.create(2, 4096)]
    for fd in fds:
        ring.hand_over(descriptors.name, token, fd)
        os.close(fd)
    fd = descriptors.take(token)
    assert fd is not None
    assert os.fstat(fd).st_size == 4096, "the first"
    os.close(fd)


def test_other_users_are_shown_out_as_they_come(clock: Clock) -> None:
    theirs = Descriptors(clock, uid=os.geteuid() + 1)
    before = num_open()
    token = hand_over(theirs)
    with connect(theirs.name) as idle:
        theirs.receive()
        assert theirs.take(token) is None
        assert idle.recv(1) == b"", "closed"
    assert num_open() == before
    theirs.close()


def test_local_users_who_crowd_end_no_transfer() -> None:
    """They take every place in the queues of both engines, stay, and send what nobody asked for."""
    backend = Backend("shared_memory")
    a, b = Side(backend.open(Pool(seed=1))), Side(backend.open(Pool(seed=2)))
    names = [side.transport._carrier._descriptors.name for side in (a, b)]  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for name in names:
            for _ in range(300):
                try:
                    stack.enter_context(connect(name))
                except BlockingIOError:
                    break
        for side in (a, b):
            side.poll(0.1)
        link, back = link_up(a, b)
        b.transport.grant(back, 7, [1, 2])
        push_all(a, link, [3, 4], [1, 2], grant=7)
        until(lambda: bool(b.of(Arrived)), a, b)
        assert not a.of(Lost) + b.of(Lost)
    for side in (a, b):
        side.transport.close()
