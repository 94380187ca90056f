"""Time to first token of engines with a prefix computed, on the device and on the host: ours beside other connectors.

One prompt at a time, one output token, wall time of `generate`; for each prompt every engine in turn, in rotating
order. A host hit is the same prompt after the device's prefixes are forgotten. Hits are whole chunks of every
connector, and 8 tokens follow, which are no block: where a prompt is whole chunks of LMCache's, all but one token are a
hit, the step runs as one whole CUDA graph, and there LMCache 0.5 returns without loading anything (its `start_load_kv`
finds no attention metadata): splendid times, wrong tokens. So each host hit must give the device hit's token
(`no_hit`). Our statistics say how fast loads went. A second part asks for prompts of which 75 % lie on the host. How
long the model waited for layers there is told by one more engine of ours, which times each layer group (`TIMED`): that
takes the thread that launches the model 0.8 ms of a hit of 8,192 tokens (SGLang, H200, 2026-11-27), so others do not.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from integration.bench.engines import Engine, EngineError, Engines, EngineServer, Sample, start_engines, wait_for_host
from integration.bench.options import EngineOptions, check_device, engine_options
from integration.bench.peers import parse_connector
from integration.bench.regimes import rotated
from integration.report import Report, hardware
from kv_connector.values import parse_size

OVER_PEERS = {
    "offloading": {2048: 0.75, 8192: 0.75, 32768: 0.9},
    "lmcache": {},
    "simple": {},
    "hicache": {},
}
"""Goals: a host hit of ours over one of a peer, by tokens; 1 where none is named."""
TIMED = "ours:trace_loads=true"
"""Ours as by default, but that it tells how long the model waited; nothing else of it is held against anything."""
LOAD_OVER_LINK = 0.95
"""Goal: bytes of a host hit over the time in which its load ran, over the rate of one large copy."""
TAIL = 8
"""Tokens behind the hit: less than a block, which whoever saved it would hit too."""
_seeds = count(1)


@dataclass(frozen=True, slots=True)
class Probe:
    """What one engine did with one prompt; `clearing` is how the device was cleared, empty without a connector, and
    `counted` what ours counted of the host hit."""

    computed: Sample
    device_hit: Sample
    host_hit: Sample | None = None
    clearing: str = ""
    counted: dict[str, float] = field(default_factory=dict)


def probe(server: EngineServer, token_ids: Sequence[int]) -> Probe:
    """Runs in the engine's process. Saves have arrived before anything that is measured begins."""
    computed = server.generate(token_ids)
    server.settle()
    device_hit = server.generate(token_ids)
    if server.options.connector == "none":
        return Probe(computed, device_hit)
    clearing = server.clear_device()
    host_hit, counted = generate_counted(server, token_ids)
    return Probe(computed, device_hit, host_hit, clearing, counted)


def probe_part(server: EngineServer, token_ids: Sequence[int], num_hit: int) -> tuple[Sample, dict[str, float]]:
    """Runs in the engine's process: a prompt whose first `num_hit` tokens are on the host, and what ours counted."""
    server.generate(token_ids[: num_hit + TAIL])
    server.clear_device()
    return generate_counted(server, token_ids)


def generate_counted(server: EngineServer, token_ids: Sequence[int]) -> tuple[Sample, dict[str, float]]:
    """Runs in the engine's process: the prompt, and what ours counted until all of it was saved."""
    before = server.stats()
    sample = server.generate(token_ids)
    server.settle()
    return sample, {name: value - before[name] for name, value in server.stats().items()}


def add_ttft_arguments(kind: type[EngineOptions], parser: argparse.ArgumentParser) -> None:
    """What this takes beside `add_arguments`."""
    parser.set_defaults(connectors=f"{kind.kinds},{TIMED}")
    parser.add_argument("--lengths", default="2048,8192,32768", help="tokens of the hits; empty: only the start")
    parser.add_argument("--part-length", type=int, default=8192, help="prompt of which 75 %% are hit on the host")
    parser.add_argument("--prompts", type=int, default=6, help="of the longest length, of others more")


def made_tiny(options: argparse.Namespace) -> argparse.Namespace:
    """With `--tiny` all sizes."""
    if options.tiny:
        options.lengths, options.part_length = "256,512", 512
        options.host_memory, options.device_tokens = "32MiB", 2048
    return options


def first_tokens(
    name: str,
    kind: type[EngineOptions],
    options: argparse.Namespace,
    last: Callable[[Report, Engines], None] | None = None,
) -> tuple[Report, list[EngineOptions]]:
    """Measure engines of this kind; the result, of a benchmark of this name, and what they were started with. `last` is
    called before they stop."""
    report = Report(name)
    link = link_rate(torch.device("cuda", options.device) if torch.cuda.is_available() else torch.device("cpu"))
    kept = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    order = "that of connectors, rotated by one with each prompt"
    report.rows.append({"part": "options", **kept, "tail": TAIL, "order": order, "link_bytes_per_second": link})
    print(f"{hardware()['gpu'] or hardware()['cpu']}: one large pinned copy to the device, {link / 1e9:.1f} GB/s")
    lengths = [int(length) for length in options.lengths.split(",") if length]
    longest = max(lengths, default=options.part_length)
    size = kind.host_size(parse_size(options.host_memory))
    wanted = [engine_options(kind, options, connector, longest + 2 * TAIL, size) for connector in options.connectors]
    print(f"logs of the engines: {wanted[0].logs}", flush=True)
    if lengths:
        check_device(wanted)
        measure_hits(options, report, wanted, lengths, link, last)
    return report, wanted


def measure_hits(
    options: argparse.Namespace,
    report: Report,
    wanted: Sequence[EngineOptions],
    lengths: Sequence[int],
    link: float,
    last: Callable[[Report, Engines], None] | None,
) -> None:
    """Parts one and two, on engines that run beside each other."""
    engines, _ = start_engines(wanted, options.start_timeout)
    try:
        engines.everywhere(wait_for_host)
        for length in lengths:  # compiles what a first use compiles
            engines.everywhere(probe, prompt(length + TAIL))
        print(f"{'tokens':>7}  {'engine':20} {'computed':>22} {'device hit':>22} {'host hit':>22} ms, median (spread)")
        for length in lengths:
            measure_length(report, engines, length, num_prompts(options.prompts, length, lengths))
            claim_length(report, length, length * wanted[0].bytes_per_token / link)
            claim_loads(report, length, link)
            report.write(options.json)
        measure_part(report, engines, options.part_length, options.prompts)
        if last is not None:
            last(report, engines)
        report.write(options.json)
    finally:
        engines.close()
        failed = engines.failed.items()
        report.rows += [{"part": "failed", "connector": name, "reason": reason} for name, reason in failed]


def num_prompts(of_longest: int, length: int, lengths: Sequence[int]) -> int:
    """More of shorter ones, whose times differ by more of what they are: four times as many of a sixteenth."""
    return of_longest * round(math.sqrt(max(lengths) / length))


def prompt(length: int) -> list[int]:
    """Tokens that no prompt had before."""
    return [int(token) for token in np.random.default_rng(next(_seeds)).integers(3, 500, length)]


def in_turn(
    engines: Engines, num_turns: int, length: int, but: Sequence[str] = ()
) -> Iterator[tuple[Engine, list[int]]]:
    """Every prompt for every engine but some, in an order that rotates from prompt to prompt."""
    for turn in range(num_turns):
        token_ids = prompt(length)
        for name in rotated([name for name in engines if name not in but], turn):
            yield engines[name], token_ids


def measure_length(report: Report, engines: Engines, length: int, num_turns: int) -> None:
    """One length, all engines in turn; a row for each engine and kind of hit."""
    probes: dict[str, list[Probe]] = {name: [] for name in engines}
    for engine, token_ids in in_turn(engines, num_turns, length + TAIL):
        try:
            probes[engine.name].append(engine.call(probe, token_ids))
        except EngineError as error:
            engines.drop(engine.name, error)
    for name in engines:
        computed = [p.computed for p in probes[name]]
        kinds = {"computed": computed, "device_hit": [p.device_hit for p in probes[name]]}
        if hits := [p.host_hit for p in probes[name] if p.host_hit is not None]:
            kinds["host_hit"] = hits
        for kind, samples in kinds.items():
            row = {"part": "hits", "connector": name, "tokens": length, "kind": kind, **summary(samples)}
            row |= {"clearing": sorted({p.clearing for p in probes[name]})}
            row |= {"prompts": len(samples), "tokens_as_computed": same_tokens(samples, computed)}
            if kind == "host_hit":
                row |= load_rates([p.counted for p in probes[name]])
                if reason := no_hit(samples, kinds["device_hit"], length):
                    row["void"] = reason
                    print(f"         {name}: its host hits are void: {reason}")
            report.rows.append(row)
        print(f"{length:7}  {name:20}" + "".join(f" {spread(samples):>22}" for samples in kinds.values()), flush=True)


def load_rates(counted: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Bytes of loads over the time in which they ran, of each hit and the median; nothing where nothing was timed."""
    timed = [stats for stats in counted if stats.get("load_milliseconds")]
    rates = [1e3 * stats["loaded_bytes"] / stats["load_milliseconds"] for stats in timed]
    return {"load_bytes_per_second": median(rates), "all_load_bytes_per_second": rates} if rates else {}


def same_tokens(samples: Sequence[Sample], others: Sequence[Sample]) -> int:
    """How many tokens are those of the others, for the same prompts."""
    return sum(a.token == b.token for a, b in zip(samples, others, strict=True))


def no_hit(on_host: Sequence[Sample], on_device: Sequence[Sample], length: int) -> str:
    """Why the time of host hits is not that of hits; empty where it is.

    After either hit an engine computes the same last tokens of a prompt, alone, behind the same bytes: one shape and
    order of sums, so the greedy token is the same, of each prompt. The one computed with the whole prompt says less: in
    another shape sums are rounded otherwise, and now and then another token wins.
    """
    for place, samples in (("host", on_host), ("device", on_device)):
        for sample in samples:
            if sample.cached_tokens != length:  # of the device: another shape, and nothing to compare with
                return f"{sample.cached_tokens} of {length} tokens were a hit on the {place}"
            if place == "host" and sample.device_tokens:
                return f"{sample.device_tokens} of {length} tokens were still on the device"
    if (num_same := same_tokens(on_host, on_device)) < len(on_host):
        return f"{num_same} of {len(on_host)} tokens are those of device hits"
    return ""


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and all of them."""
    times = [sample.ms for sample in samples]
    cached = median(sample.cached_tokens for sample in samples)
    return {"ms": median(times), "all_ms": times, "cached_tokens": cached}


def spread(samples: Sequence[Sample]) -> str:
    """Median, least and most, in ms."""
    times = [sample.ms for sample in samples]
    return f"{median(times):.1f} ({min(times):.1f}..{max(times):.1f})"


def claim_length(report: Report, length: int, link_seconds: float) -> None:
    """The claims on host hits of one length, for each engine of ours: over those of peers, and over a device hit of the
    engine without a connector and the bytes at the link's rate."""
    rows = [row for row in report.rows if row.get("tokens") == length and "kind" in row and "void" not in row]
    measured = {row.get("connector") for row in report.rows}
    ms = {(row["connector"], row["kind"]): row["ms"] for row in rows}
    for name in [name for name, kind in ms if kind == "host_hit" and parse_connector(name).is_ours and name != TIMED]:
        value = ms[name, "host_hit"]
        if ("none", "device_hit") in ms:
            bound = ms["none", "device_hit"] + 1e3 * link_seconds
            claim = f"{name}_host_hit_over_nones_device_hit_plus_link_{length}"
            report.claim(claim, value / bound, 1.0, "of 1", "lower")
        for peer, goals in OVER_PEERS.items():
            if (peer, "host_hit") in ms:
                ratio = value / ms[peer, "host_hit"]
                report.claim(f"{name}_host_hit_over_{peer}_{length}", ratio, goals.get(length, 1.0), "of 1", "lower")
            elif peer in measured:
                print(f"no host hit of {peer} to compare with")


def claim_loads(report: Report, length: int, link: float) -> None:
    """The claims on the loads themselves, of host hits of one length, over the link's bytes a second."""
    for row in report.rows:
        is_held = row.get("tokens") == length and row.get("connector") != TIMED and "void" not in row
        if is_held and "load_bytes_per_second" in row:
            claim = f"{row['connector']}_load_over_link_{length}"
            report.claim(claim, row["load_bytes_per_second"] / link, LOAD_OVER_LINK, "of 1", "higher")


def measure_part(report: Report, engines: Engines, length: int, num_turns: int) -> None:
    """Part two: 75 % on the host, the rest new."""
    num_hit = length * 3 // 4
    results: dict[str, list[tuple[Sample, dict[str, float]]]] = {}
    for engine, token_ids in in_turn(engines, num_turns + 1, length, but=["none"]):
        try:
            results.setdefault(engine.name, []).append(engine.call(probe_part, token_ids, num_hit))
        except EngineError as error:
            engines.drop(engine.name, error)
    for name, found in results.items():
        counted = found[1:]  # the first may compile something
        if not counted:
            continue
        samples = [sample for sample, _ in counted]
        loading, exposed = (
            sum(stats.get(key, 0.0) for _, stats in counted) for key in ("load_milliseconds", "load_stall_milliseconds")
        )
        row = {"part": "75_percent", "connector": name, "tokens": length, "hit_tokens": num_hit, **summary(samples)}
        row |= {"load_ms": loading / len(counted), "load_stall_ms": exposed / len(counted)}
        if others := {sample.cached_tokens for sample in samples} - {num_hit}:
            row["void"] = f"{', '.join(map(str, sorted(others)))} of {length} tokens were a hit, not {num_hit}"
        report.rows.append(row)
        print(f"{num_hit} of {length} tokens on the host, {name}: {spread(samples)} ms", flush=True)
        if loading and name == TIMED and "void" not in row:
            report.claim("ours_exposed_wait_over_load_at_75_percent", exposed / loading, 0.1, "of 1", "lower")


def link_rate(device: torch.device) -> float:
    """Bytes a second of one large copy from pinned memory to the device; from memory to memory without a GPU."""
    has_gpu = device.type == "cuda"
    source = torch.ones((1 << 30) if has_gpu else (64 << 20), dtype=torch.uint8, pin_memory=has_gpu)
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        if has_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    del target
    torch.cuda.empty_cache()  # the engines need it
    return source.numel() / median(seconds[1:])
