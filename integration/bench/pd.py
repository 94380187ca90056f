"""What disaggregation costs: the rate at which blocks go to another engine, and what it adds to the first token.

Transfer: two processes with a pool each, on two GPUs where there are two, and one pushes its blocks to the other's in
random order; in turn with one large copy of as many bytes over the same link. First token: the mini engine in two
processes against one, on a random model of `--layers` layers, for prompts of the lengths asked for, in turn; and how
much of a KV transfer was over when the prefill was. Without a GPU the same runs on the CPU, with smaller numbers: the
goals are a GPU's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.model import ModelConfig, PagedLlama
from integration.mini_engine.pd import Ask, EngineProcess, EngineShape, make_engine, peer_settings
from integration.report import Report
from kv_connector.build import open_transport
from kv_connector.config import PeerConfig
from kv_connector.peer.base import Arrived, Connected, PeerTransport, Push
from kv_connector.peer.identity import PeerIdentity
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.worker.peers import pool_of

CASES = (("2 MiB blocks", 2 << 20, 1, 0.9), ("64 KiB pieces", 64 << 10, 32, 0.8))
ADDED_TTFT_GOAL_MS = 100.0
HIDDEN_GOAL = 0.8
LIMIT_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=["shared_memory", "nixl"], default="shared_memory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--bytes", type=int, help="of one transfer (4 GiB, 32k tokens of an 8B model; on the CPU 64 MiB)"
    )
    parser.add_argument("--lengths", help="tokens of prompts (2048,8192,32768; on the CPU 256,1024)")
    parser.add_argument("--layers", type=int, default=0, help="of the model (24; on the CPU 6)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=["transfer", "first_token"], help="one part")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    num_bytes = options.bytes or ((4 << 30) if on_gpu else (64 << 20))
    lengths = [int(n) for n in (options.lengths or ("2048,8192,32768" if on_gpu else "256,1024")).split(",")]
    options.layers = options.layers or (24 if on_gpu else 6)
    report = Report("pd")
    for name, piece, regions, goal in CASES if options.only != "first_token" else ():
        measure_transfer(report, options, name, piece, regions, num_bytes, goal)
        report.write(options.json)
    if options.only != "transfer":
        measure_first_token(report, options, lengths)
    report.write(options.json)
    return 0


# The transfer.


def measure_transfer(
    report: Report, options: argparse.Namespace, name: str, piece: int, regions: int, num_bytes: int, goal: float
) -> None:
    """Rates of pushes and of one large copy of as many bytes, in turn, in GB/s."""
    num_blocks = max(2, num_bytes // (piece * regions))
    context = multiprocessing.get_context("spawn")
    pipe, remote = context.Pipe()
    shape = (options.kind, options.device, piece, regions, num_blocks)
    process = context.Process(target=_receive, args=(remote, *shape), daemon=True)
    process.start()
    port = _expect(pipe)
    transport, tensors = _open(*shape, device_index=0)
    link = transport.connect("127.0.0.1", port)
    _poll_until(transport, lambda event: isinstance(event, Connected))
    rng = np.random.default_rng(0)
    rates: list[float] = []
    copies: list[float] = []
    for run in range(options.runs + 1):
        sources, targets = rng.permutation(num_blocks), rng.permutation(num_blocks)
        pipe.send((run, sources, targets))
        _expect(pipe)
        start = time.perf_counter()
        transport.push(link, Push(run, run, 0, sources, targets, range(regions)))
        while not pipe.poll(0):
            transport.poll(0.001)
        seconds = _expect(pipe) - start
        _expect(pipe)  # it has verified the bytes
        if run:  # the first connects, maps and registers
            rates.append(num_blocks * piece * regions / seconds / 1e9)
            copies.append(_large_copy(tensors, options.device))
    pipe.send(None)
    transport.close()
    process.join(30)
    rate, copy = median(rates), median(copies)
    row = {"case": name, "kind": options.kind, "bytes": num_blocks * piece * regions, "push_gb_s": rates}
    report.rows.append(row | {"copy_gb_s": copies})
    print(f"{name}: {rate:.2f} GB/s ({min(rates):.2f}..{max(rates):.2f}), one large copy {copy:.2f} GB/s")
    report.claim(f"{name}: rate against one large copy", rate / copy, goal, "of the copy's", "higher")


def _open(
    kind: str, device: str, piece: int, regions: int, num_blocks: int, device_index: int
) -> tuple[PeerTransport, list[torch.Tensor]]:
    if device.startswith("cuda"):
        device = f"cuda:{device_index % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    tensors = [_marks(region, num_blocks, device).repeat(1, piece) for region in range(regions)]
    layout = CacheLayout.from_tensors(
        {str(i): t for i, t in enumerate(tensors)}, num_blocks, {str(i): 0 for i in range(regions)}
    )
    pool = pool_of(layout, make_lane(layout.device, Priority.PEER, timing=False))
    config = PeerConfig(kind=kind, secret="known to both of the benchmark", staging_memory=256 << 20)
    identity = PeerIdentity("bench", "uint8", "", 16, 1, 1, 0, pool.pieces)
    return open_transport(config, identity, secrets.token_hex(4), pool), tensors


def _marks(region: int, num_blocks: int, device: str | torch.device) -> torch.Tensor:
    """What every byte of a block is, in one region: uint8 of shape (num_blocks, 1)."""
    return ((torch.arange(num_blocks, device=device) * 7 + region) % 251).to(torch.uint8)[:, None]


def _receive(pipe: Connection, kind: str, device: str, piece: int, regions: int, num_blocks: int) -> None:
    transport, tensors = _open(kind, device, piece, regions, num_blocks, device_index=1)
    pipe.send(transport.port)
    link = _poll_until(transport, lambda event: isinstance(event, Connected)).link
    while True:
        while not pipe.poll(0):
            transport.poll(0.001)
        told = pipe.recv()
        if told is None:
            break
        number, sources, targets = told
        transport.grant(link, number, targets.tolist())
        pipe.send("granted")
        left = num_blocks * regions
        while left:
            for event in transport.poll(0.01):
                if isinstance(event, Arrived) and event.grant == number:
                    left -= event.count * len(event.regions)
        pipe.send(time.perf_counter())  # one clock for all processes of a machine
        transport.revoke(link, number)
        for region, tensor in enumerate(tensors):
            assert torch.equal(
                tensor[targets, ::512], _marks(region, num_blocks, tensor.device)[sources].expand(-1, -(-piece // 512))
            )
            tensor.zero_()
        pipe.send("verified")
    transport.close()


def _poll_until(transport: PeerTransport, found: Any) -> Any:
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end:
        for event in transport.poll(0.05):
            if found(event):
                return event
    raise TimeoutError("the other process does not answer")


def _expect(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_SECONDS):
        raise TimeoutError("the other process does not answer")
    return pipe.recv()


def _large_copy(tensors: Sequence[torch.Tensor], device: str) -> float:
    """One copy of the same bytes to another GPU, or within memory: GB/s."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    on_gpu = device.startswith("cuda")
    other = f"cuda:{1 % torch.cuda.device_count()}" if on_gpu else "cpu"
    target = torch.zeros(flat.shape, dtype=torch.uint8, device=other)
    seconds = []
    for _ in range(3):
        if on_gpu:
            torch.cuda.synchronize(flat.device)
        start = time.perf_counter()
        target.copy_(flat)
        if on_gpu:
            torch.cuda.synchronize(flat.device)
            torch.cuda.synchronize(target.device)
        seconds.append(time.perf_counter() - start)
    return float(flat.numel() / min(seconds) / 1e9)


# The first token.


def measure_first_token(report: Report, options: argparse.Namespace, lengths: Sequence[int]) -> None:
    """Time to the first token of a pair of engines and of one, and the share of a transfer that a prefill hides."""
    blocks = (max(lengths) + 64) // 16 * 3
    shape = EngineShape(blocks, 16, {}, max_step_tokens=2048)
    start = partial(_start, options.layers, options.device, shape, options.kind)
    alone, prefill, decode = (EngineProcess(partial(start, role)) for role in ("both", "producer", "consumer"))
    rng = np.random.default_rng(1)
    for length in lengths:
        times: dict[str, list[float]] = {"alone": [], "pair": [], "prefill": []}
        for run in range(options.runs + 1):
            prompt = tuple(rng.integers(0, 500, length).tolist())
            seconds = _first_tokens(prompt, alone, prefill, decode)
            if run:
                for name, value in seconds.items():
                    times[name].append(1e3 * value)
        added = median(times["pair"]) - median(times["alone"])
        exposed = max(0.0, median(times["pair"]) - median(times["prefill"]))
        report.rows.append({"tokens": length, **times})
        print(f"{length} tokens: alone {median(times['alone']):.1f} ms, pair {median(times['pair']):.1f} ms")
        report.claim(f"added to the first token at {length} tokens", added, ADDED_TTFT_GOAL_MS, "ms", "lower")
        report.rows[-1]["behind_prefill_ms"] = exposed
    _measure_hidden(report, options, prefill, decode, 8192 if 8192 in lengths else lengths[-1])
    for engine in (alone, prefill, decode):
        engine.end()


def _first_tokens(
    prompt: tuple[int, ...], alone: EngineProcess, prefill: EngineProcess, decode: EngineProcess
) -> dict[str, float]:
    start = time.perf_counter()
    alone.answer(alone.ask(Ask(prompt, 1)))
    alone_seconds = time.perf_counter() - start
    start = time.perf_counter()
    told = prefill.answer(prefill.ask(Ask(prompt, 1, {"do_remote_decode": True})))
    prefill_seconds = time.perf_counter() - start
    decode.answer(decode.ask(Ask(prompt, 1, told.transfer)))
    return {"alone": alone_seconds, "pair": time.perf_counter() - start, "prefill": prefill_seconds}


def _measure_hidden(
    report: Report, options: argparse.Namespace, prefill: EngineProcess, decode: EngineProcess, length: int
) -> None:
    """Asked one behind the other, the whole transfer follows the prefill; asked at once, only what it does not hide."""
    rng = np.random.default_rng(2)
    told = prefill.answer(prefill.ask(Ask(tuple(rng.integers(0, 500, 40).tolist()), 1, {"do_remote_decode": True})))
    assert told.transfer is not None
    address = {name: told.transfer[name] for name in ("remote_host", "remote_port", "remote_ports")}
    behind: dict[bool, list[float]] = {True: [], False: []}
    for run in range(options.runs + 1):
        for at_once in (True, False):
            prompt = tuple(rng.integers(0, 500, length).tolist())
            name = f"{run}-{at_once}"
            first = Ask(prompt, 1, {"do_remote_decode": True, "transfer_id": name})
            second = Ask(prompt, 1, {"do_remote_prefill": True, "transfer_id": name, **address})
            waiting = decode.ask(second) if at_once else 0
            prefill.answer(prefill.ask(first))
            end = time.perf_counter()
            decode.answer(waiting or decode.ask(second))
            if run:
                behind[at_once].append(time.perf_counter() - end)
    hidden = 1 - median(behind[True]) / median(behind[False])
    report.rows.append({"tokens": length, "behind_s": behind[False], "behind_at_once_s": behind[True]})
    report.claim(f"hidden behind the prefill at {length} tokens", hidden, HIDDEN_GOAL, "share", "higher")


def _start(layers: int, device: str, shape: EngineShape, kind: str, role: str) -> MiniEngine:
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        device = f"cuda:{int(role == 'consumer') % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    config = ModelConfig(num_hidden_layers=layers, max_position_embeddings=1 << 16)
    model = PagedLlama.random(config, seed=0, device=device)
    settings = {} if role == "both" else {"peer": peer_settings(kind, role)}
    named = EngineShape(shape.num_blocks, shape.block_size, settings, shape.max_step_tokens, role)
    return make_engine(model, named, "random")


if __name__ == "__main__":
    sys.exit(main())
