"""When a KV transfer stops in the middle: blocks are given back once nothing is written to them any more."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kv_connector.peer.base import Connected, Lost
from kv_connector.peer.protocol.jobs import PeerJobs
from kv_connector.peer.wire.messages import Want
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport
from kv_connector.types import PeerAction, PeerJob
from tests.peer.peers import IDENTITY, PIECES, Pool, info_of
from tests.simulation.clock import VirtualTime
from tests.simulation.network import Network
from tests.simulation.peers import SimulatedPeers

NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(4)]


class Done:
    """A marker that is reached."""

    def query(self) -> bool:
        return True


def send() -> PeerJob:
    return PeerJob(1, PeerAction.SEND, "transfer", 0, np.arange(4), names=b"".join(NAMES))


def receive(port: int, engine_id: str) -> PeerJob:
    ids = np.arange(10, 14)
    return PeerJob(
        2, PeerAction.RECEIVE, "transfer", 0, ids, NAMES[-1], "here", (port,), engine_id=engine_id, request_id="request"
    )


@pytest.mark.parametrize("carrier", ["nixl", "cuda_ipc"])
@pytest.mark.parametrize("who", ["the producer withdraws", "the producer fails", "the consumer cancels"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_given_back_when_the_last_write_has_landed(carrier: str, who: str, seed: int) -> None:
    """Copies that were handed to a device cannot be called back, whoever stops the transfer."""
    time = VirtualTime(seed)
    network = Network(time)
    producer, consumer = (SimulatedPeers(network, name, carrier) for name in ("producer", "consumer"))
    pools = Pool(seed=1), Pool(seed=2)
    sender, receiver = producer.open_peers(pools[0].pool), consumer.open_peers(pools[1].pool)
    ended: list[tuple[int, bool]] = []
    landed_after: list[int] = []
    consumer.on_write = lambda block_ids: landed_after.append(len(ended))
    network.slow_writes = 500.0

    def wait(seconds: float) -> None:
        time.run_until(time.now() + seconds)
        ended.extend((job.job_id, job.ok) for job in receiver.poll())

    sender.begin(send(), Done())
    sender.ready([1], 1, Done())
    receiver.begin(receive(sender.port, producer.engine_id), Done())
    while not producer._transport._writing:
        wait(1e-4)
    if who == "the producer withdraws":
        sender.withdraw(["transfer"])
    elif who == "the producer fails":
        sender.fail([1])
    else:
        receiver.cancel([2])
    for _ in range(10_000):
        wait(1e-3)
    assert landed_after and not any(landed_after), "a write has landed in blocks that were given back"
    assert ended == [(2, False)]
    assert pools[1].block(9) != pools[0].block(0)
    assert [job.job_id for job in sender.poll()] == [1]
    network.check_at_rest()
    for peers in (producer, consumer):
        peers.close()


@pytest.mark.parametrize("blocks", [(37, 38, 39, 40), (0, 1, 2, 2)])
def test_who_wants_blocks_outside_of_its_pool_is_dropped(blocks: tuple[int, ...]) -> None:
    """A pool of 40 blocks was told of when the link was opened; what is pushed elsewhere is other memory."""
    net, pool = LoopbackNet(), Pool(40)
    transport = LoopbackTransport(net, Pool(60).pool, info_of(pool, "producer"))
    hostile = LoopbackTransport(net, pool.pool, info_of(pool, "hostile"))
    jobs = PeerJobs(transport, "producer", IDENTITY, 120.0, 60.0)
    jobs.begin(send(), Done())
    jobs.ready([1], len(PIECES), Done())
    link = hostile.connect("here", transport.port)
    jobs.turn(0.0)
    assert any(isinstance(event, Connected) for event in hostile.poll(0.0))
    hostile.grant(link, 7, [0, 1, 2, 3])
    hostile.send(link, Want("transfer", "producer", 7, 0, 4, NAMES[-1], blocks))
    jobs.turn(0.0)
    assert [type(event) for event in hostile.poll(0.0)] == [Lost], "it was served"
    assert transport.counters.sent_bytes == 0
    assert jobs.poll() == [], "it is still to be had"
    jobs.close()
