"""Blocks that go to another engine through host memory, coded on their way beside the same as they are.

Two processes of one machine, NIXL over TCP (UCX), a pool each on the CPU; the blocks are SmolLM2's shape and hold its
own keys and values where `integration.models.smollm2_caches` has left them, else normal numbers. Raw and coded links
push the same blocks to the same places in turn, the first form another one each time; the clock stops when the last
block has arrived, and every byte is compared. What travels is what the transport has counted.

Loopback is faster than any network and than the CPU's coder. In a network of its own it can be as slow as one:

    unshare -n sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 1gbit burst 256k latency 50ms;
      python -m integration.bench.pd_lossless --link 1gbit --json FILE'
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch

from integration.bench.pd import LIMIT_SECONDS, _expect
from integration.models import smollm2_caches
from integration.report import Report, hardware
from kv_connector.build import open_transport
from kv_connector.config import PeerConfig, PeerRoute, WireForm
from kv_connector.peer.base import Arrived, Connected, PeerTransport, Push
from kv_connector.peer.carriers.nixl_agent import why_not
from kv_connector.peer.identity import PeerIdentity
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.worker.peers import pool_of

NUM_PIECES, TOKENS = 60, 32
"""Of a block: keys and values of 30 layers."""
SHARE_GOAL, TIME_GOAL = 0.77, 0.82
"""Bytes that travel, and time, over those of raw blocks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What both processes are told."""

    num_blocks: int
    caches: Path
    staging_memory: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--caches", type=Path, default=smollm2_caches.DEFAULT)
    parser.add_argument("--mib", type=int, default=64, help="of a transfer, raw")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--link", default="loopback", help="what the two are connected by, for the name of the claims")
    options = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 0
    os.environ.setdefault("UCX_TLS", "tcp")  # as between machines without RDMA
    piece_bytes = smollm2(options.caches).shape[1] * 2
    shape = Shape((options.mib << 20) // (NUM_PIECES * piece_bytes), options.caches, 64 << 20)
    report = Report("pd_lossless")
    print(f"{hardware()['cpu']}, {hardware()['cores']} cores, {options.link}")
    measure(report, shape, options.link, options.runs)
    report.write(options.json)
    return 0


def smollm2(path: Path) -> torch.Tensor:
    """Pieces of blocks, bf16 of shape (pieces, elements)."""
    if not path.is_file():
        return torch.randn((256, TOKENS * 3 * 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    caches = smollm2_caches.load(path)
    layers, _, tokens, heads, dim = caches.shape
    return caches[:, :, : tokens // TOKENS * TOKENS].reshape(layers * 2 * (tokens // TOKENS), TOKENS * heads * dim)


class Side:
    """A pool, and links of both forms for it."""

    def __init__(self, shape: Shape, is_source: bool) -> None:
        torch.set_num_threads(1)
        pieces = smollm2(shape.caches)
        rows = torch.arange(NUM_PIECES * shape.num_blocks) % len(pieces)
        self.expected = pieces[rows].view(shape.num_blocks, NUM_PIECES, -1)
        self.tensors = [self.expected[:, i].clone() for i in range(NUM_PIECES)]
        if not is_source:
            self.clear()
        layout = CacheLayout.from_tensors({str(i): t for i, t in enumerate(self.tensors)}, shape.num_blocks)
        self.transports = {form: self._open(layout, form, shape.staging_memory) for form in WireForm}

    def linked(self) -> dict[WireForm, int]:
        """The links, once there is one of each form; all are served meanwhile."""
        links: dict[WireForm, int] = {}
        end = time.monotonic() + LIMIT_SECONDS
        while len(links) < len(self.transports):
            assert time.monotonic() < end, "the other process does not answer"
            for form, transport in self.transports.items():
                for event in transport.poll(0.01):
                    if isinstance(event, Connected):
                        links[form] = event.link
        return links

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def check(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Blocks are those that were sent."""
        for index, tensor in enumerate(self.tensors):
            there, here = tensor[targets], self.expected[sources, index]
            assert torch.equal(there.view(torch.int16), here.contiguous().view(torch.int16)), "other bytes have come"

    def _open(self, layout: CacheLayout, form: WireForm, staging: int) -> PeerTransport:
        lane = make_lane(layout.device, Priority.PEER, timing=False)
        pool = pool_of(layout, lane, codes=form is WireForm.LOSSLESS)
        identity = PeerIdentity("bench", "bfloat16", "", TOKENS, 1, 1, 0, pool.pieces)
        config = PeerConfig(
            "nixl",
            route=PeerRoute.STAGED,
            secret="known to both of the benchmark",
            staging_memory=staging,
            timeout_ms=60_000,
        )
        return open_transport(config, identity, secrets.token_hex(4), pool)


def measure(report: Report, shape: Shape, link: str, runs: int) -> None:
    """A row of each form, and the claims."""
    context = multiprocessing.get_context("spawn")
    pipe, remote = context.Pipe()
    process = context.Process(target=_receive, args=(remote, shape), daemon=True)
    process.start()
    ports = _expect(pipe)
    side = Side(shape, is_source=True)
    for form, transport in side.transports.items():
        transport.connect("127.0.0.1", ports[form])
    links = side.linked()
    seconds: dict[WireForm, list[float]] = {form: [] for form in WireForm}
    rng = np.random.default_rng(0)
    for run in range(runs + 1):
        sources, targets = rng.permutation(shape.num_blocks), rng.permutation(shape.num_blocks)
        for form in list(WireForm)[:: 1 if run % 2 else -1]:
            pipe.send((form, run, sources, targets))
            _expect(pipe)
            transport, start = side.transports[form], time.perf_counter()
            transport.push(links[form], Push(run, run, 0, sources, targets, range(NUM_PIECES)))
            while not pipe.poll(0):
                transport.poll(0.001)
            taken = _expect(pipe) - start
            _expect(pipe)  # it has compared the bytes
            if run:  # the first connects and registers
                seconds[form].append(taken)
    pipe.send(None)
    num_bytes = shape.num_blocks * sum(tensor[0].numel() * 2 for tensor in side.tensors)
    for form, transport in side.transports.items():
        share = transport.counters.slot_bytes / transport.counters.sent_bytes
        rate = num_bytes / median(seconds[form]) / 1e9
        row = {"form": form.value, "link": link, "bytes": num_bytes, "share": share, "seconds": seconds[form]}
        report.rows.append(row | {"real_values": shape.caches.is_file(), "gb_s": rate})
        spread = f"{num_bytes / max(seconds[form]) / 1e9:.3f} to {num_bytes / min(seconds[form]) / 1e9:.3f}"
        print(f"{link}, {form.value}: {rate:.3f} GB/s of raw bytes ({spread}), {share:.3f} of them travel")
        transport.close()
    process.join(30)
    raw, coded = (seconds[form] for form in (WireForm.RAW, WireForm.LOSSLESS))
    ratio = median(c / r for c, r in zip(coded, raw, strict=True))
    report.claim(f"share_that_travels_{link}", report.rows[-1]["share"], SHARE_GOAL, "of raw bytes", "lower")
    report.claim(f"lossless_over_raw_{link}", ratio, TIME_GOAL, "of raw's time", "lower")


def _receive(pipe: Connection, shape: Shape) -> None:
    side = Side(shape, is_source=False)
    pipe.send({form: transport.port for form, transport in side.transports.items()})
    links = side.linked()
    while True:
        while not pipe.poll(0):
            for transport in side.transports.values():
                transport.poll(0.001)
        told = pipe.recv()
        if told is None:
            break
        form, number, sources, targets = told
        transport, left = side.transports[form], shape.num_blocks * NUM_PIECES
        transport.grant(links[form], number, targets.tolist())
        pipe.send("granted")
        while left:
            for event in transport.poll(0.01):
                if isinstance(event, Arrived) and event.grant == number:
                    left -= event.count * len(event.regions)
        pipe.send(time.perf_counter())  # one clock for all processes of a machine
        transport.revoke(links[form], number)
        side.check(sources, targets)
        side.clear()
        pipe.send("compared")
    for transport in side.transports.values():
        transport.close()


if __name__ == "__main__":
    sys.exit(main())
