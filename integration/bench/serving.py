"""Engines under load: what a connector costs where nothing is hit, and what it gives chats that do not fit.

All engines run beside each other on one GPU and take turns, in an order that rotates from round to round and from
window to window. Miss path: batches of prompts that nobody asked before, each engine against the one without a
connector in the same round; a last round, which is not timed, tells what the connector's calls take. Chats: some
numbers of users, of whose chats the host holds more or less, several lengths of answers, each at some rates (`chats`),
and who is ahead in which (`regimes`). Engines start once for all of them. One that does not start, or is not what its
name says, is named with its reason and the others are measured.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from integration.bench.chats import ChatShape, Window, begin_chats, chat_row, run_window
from integration.bench.engines import Engines, EngineServer, start_engines, wait_for_host
from integration.bench.options import (
    EngineOptions,
    add_arguments,
    bytes_per_token,
    check_device,
    engine_options,
    unavailable,
    usual_dtype,
)
from integration.bench.regimes import (
    claim_misses,
    claim_regime,
    host_bytes,
    label,
    milliseconds,
    regimes,
    rotated,
    window_seconds,
)
from integration.bench.vllm_timeline import timeline
from integration.report import Report, hardware
from kv_connector.errors import ConfigError

SATURATED = "saturated"
"""In place of a rate: as soon as one user is answered another one asks."""
_CLOSING_SECONDS = 10.0  # what is left of the limit for the last lines and for the engines' ends


def run_misses(server: EngineServer, seed: int, prompts: int, length: int, answer: int) -> float:
    """Runs in the engine's process: tokens a second, prompts and answers, of a batch without any reuse."""
    tokens = np.random.default_rng(2 * 10**6 + seed).integers(3, 500, (prompts, length)).tolist()
    start = time.perf_counter()
    server.generate_all(tokens, answer)
    seconds = time.perf_counter() - start
    server.settle()
    return prompts * (length + answer) / seconds


def follow_misses(server: EngineServer, seed: int, prompts: int, length: int, answer: int) -> dict[str, float]:
    """Runs in the engine's process: what the connector's calls take in such a batch."""
    phases = server.follow()
    run_misses(server, seed, prompts, length, answer)
    return phases.stop()


def trace_misses(server: EngineServer, seed: int, prompts: int, length: int, answer: int) -> dict[str, float]:
    """Runs in the engine's process: what the GPU does in such a batch; the trace is kept beside its log."""
    kept = server.options.logs / f"trace_{server.options.name}.json.gz"
    return timeline(lambda: run_misses(server, seed, prompts, length, answer), kept)


def trace_window(server: EngineServer, window: Window) -> dict[str, float]:
    """Runs in the engine's process: what the GPU does in a window; the trace is kept beside its log."""
    kept = server.options.logs / f"trace_{server.options.name}.json.gz"
    return timeline(lambda: server.kept.run(window), kept)


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """What this takes beside `add_arguments`."""
    parser.add_argument("--rounds", type=int, default=0, help="of the miss path; 0 leaves it out")
    parser.add_argument("--miss-prompts", type=int, default=20, help="in a batch of the miss path")
    parser.add_argument("--miss-length", type=int, default=2048)
    parser.add_argument("--miss-answer", type=int, default=64)
    parser.add_argument("--answers", default="8,32,128", help="tokens, a regime each; empty leaves the chats out")
    parser.add_argument("--misses-only", metavar="CONNECTOR", help="that leaves before the chats, such as none")
    parser.add_argument("--rates", default=SATURATED, help="turns a second; one that comes twice is run twice")
    parser.add_argument("--seconds", type=float, default=30.0, help="that count, of each window")
    parser.add_argument("--lead", type=float, default=2.0, help="seconds of each window before those that count")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of all: windows are made to fit")
    parser.add_argument("--users", type=numbers, default=[12], help="so many, then so many, as in 24,12,6")
    parser.add_argument("--at-once", type=int, help="of the users, who ask at a time; default: half of them")
    parser.add_argument("--document", type=int, default=8000, help="tokens")
    parser.add_argument("--question", type=int, default=160, help="tokens")
    parser.add_argument("--max-length", type=int, default=12288, help="a chat that reaches it begins anew")
    parser.set_defaults(trace=0.0, trace_misses=False)  # where the engine is in another process than a profiler


def numbers(text: str) -> list[int]:
    """Positive ones, each once, with commas between them."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: give different numbers above 0, as in 24,12,6")
    return found


def made_tiny(options: argparse.Namespace) -> argparse.Namespace:
    """With `--tiny` all sizes but the host's, where that is a multiple of the chats."""
    if options.tiny:
        options.device_tokens, options.max_length = 2048, 1024
        options.document, options.question = 480, 40
        options.miss_prompts, options.miss_length, options.miss_answer = 6, 256, 16
    return options


def serve(kind: type[EngineOptions], parser: argparse.ArgumentParser) -> int:
    """Measure engines of this kind as the command line asks, and write the result. Returns the exit status."""
    begin = time.monotonic()
    add_arguments(kind, parser, host_memory="1x", device_tokens=24576)
    add_serving_arguments(parser)
    options = made_tiny(parser.parse_args())
    if reason := unavailable(kind, options):
        print(reason)
        return 0
    shapes = [chat_shape(options, users) for users in options.users]
    each = bytes_per_token(options.tiny, usual_dtype(options.tiny))
    chats_bytes = [shape.mean_tokens * each for shape in shapes]
    try:
        size = kind.host_size(host_bytes(options.host_memory, chats_bytes[0]))
    except ConfigError as error:
        raise SystemExit(f"{error}, or a multiple of what the first users' chats hold, such as 0.5x") from None
    check_host(size * sum(name != "none" for name in options.connectors))
    wanted = [engine_options(kind, options, name, options.max_length, size) for name in options.connectors]
    check_device(wanted)
    report = Report(f"{kind.package}_serving")
    kept = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    shares = [round(size / num_bytes, 2) for num_bytes in chats_bytes]
    sizes = {"chats_bytes": [round(num_bytes) for num_bytes in chats_bytes], "host_bytes": size, "host_shares": shares}
    versions = {kind.package: report.version(kind.package)}
    report.rows.append({"part": "options", **kept, **sizes, "versions": versions})
    print(f"{hardware()['gpu'] or hardware()['cpu']}; logs of the engines: {wanted[0].logs}")
    for shape, num_bytes, share in zip(shapes, chats_bytes, shares, strict=True):
        print(
            f"{shape.users} chats hold {num_bytes / 2**30:.2f} GiB on average, the device {options.device_tokens} of "
            f"{shape.mean_tokens:.0f} tokens, the host {size / 2**30:.2f} GiB or {share:g} of the chats",
            flush=True,
        )
    measure(options, report, wanted, shapes, begin)
    report.write(options.json)
    return 0


def chat_shape(options: argparse.Namespace, users: int) -> ChatShape:
    """Of so many users' chats."""
    at_once = options.at_once or max(1, users // 2)
    return ChatShape(users, at_once, options.document, options.question, options.max_length)


def check_host(wanted: int, limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> None:
    """Exits where the engines' host memory, all together, is more than this machine or container has left.

    A container's limit that is above what the machine has is of one whose memory grows as it is used.
    """
    import psutil  # which engines bring

    memory, text = psutil.virtual_memory(), limit_file.read_text().strip() if limit_file.exists() else ""
    limit = int(text) if text.isdigit() else memory.total
    available = min(memory.available + max(0, limit - memory.total), limit)
    if wanted > 0.9 * available:
        raise SystemExit(
            f"the engines ask for {wanted / 2**30:.1f} GiB of host memory in all, {available / 2**30:.1f} GiB are "
            "available: give fewer --connectors, fewer --users, or a smaller --host-memory"
        )


def measure(
    options: argparse.Namespace, report: Report, wanted: list[EngineOptions], shapes: list[ChatShape], begin: float
) -> None:
    """Start the engines, measure all that was asked for, and stop them."""
    engines, _ = start_engines(wanted, options.start_timeout)
    try:
        engines.at_once(wait_for_host)
        if options.rounds:
            measure_misses(options, report, engines, begin)
            add_failed(report, engines)
            report.write(options.json)
        if options.answers:
            measure_chats(options, report, engines, shapes, begin)
    finally:
        engines.close()
    add_failed(report, engines)


def add_failed(report: Report, engines: Engines) -> None:
    """A row for each engine that is not measured, or not any more, and each of the host's shares."""
    options = report.rows[0]
    known = {row["connector"] for row in report.rows if row["part"] == "failed"}
    for name in engines.failed.keys() - known:
        row = {"part": "failed", "connector": name, "reason": engines.failed[name], "host_bytes": options["host_bytes"]}
        report.rows += [row | {"host_share": share} | options["versions"] for share in options["host_shares"]]


def measure_misses(options: argparse.Namespace, report: Report, engines: Engines, begin: float) -> None:
    """All engines in each round, in rotating order, until the limit is near; what there is then is in the result. The
    first round is to get warm, and one behind the last is timed call by call."""
    lengths = (options.miss_prompts, options.miss_length, options.miss_answer)
    before, rounds, longest = report.rows, list[dict[str, float]](), 0.0
    for turn in range(options.rounds + 1):
        since = time.monotonic()
        if since - begin + 2 * longest > options.limit - _CLOSING_SECONDS:
            print(f"no time for more than {max(0, turn - 1)} of {options.rounds} rounds")
            break
        rates = dict(engines.each(rotated(list(engines), turn), run_misses, turn, *lengths))
        rounds.append(rates)
        longest = max(longest, time.monotonic() - since)
        print(f"misses, round {turn}: " + ", ".join(f"{n} {rates[n]:.0f} tokens/s" for n in rates), flush=True)
        report.rows = before + [miss_row(name, rounds[1:]) | before[0]["versions"] for name in engines if turn]
        report.write(options.json)
    calls = engines.everywhere(follow_misses, len(rounds), *lengths)
    for row in report.rows[len(before) :]:
        name = row["connector"]
        row["phases"] = calls.get(name, {})
        spent = [value for key, value in row["phases"].items() if key.startswith("call_")]
        row["calls_ms"] = sum(spent) if spent else None  # not seen of an engine in another process
        if "over_none" in row:
            spread = f"{row['over_none']:.4f} ({row['over_none_p10']:.4f} to {row['over_none_p90']:.4f})"
            print(f"{name}: {spread} of the throughput without a connector, calls take {milliseconds(row)} a step")
            claim_misses(report, row)
    if options.trace_misses:
        add_timelines(report, engines.everywhere(trace_misses, len(rounds) + 1, *lengths))


def add_timelines(report: Report, found: dict[str, dict[str, float]]) -> None:
    """A row for each engine that was traced."""
    for name, shares in found.items():
        report.rows.append({"part": "timeline", "connector": name, **shares})
        print(f"{name:20}" + "".join(f"  {key} {value:.4g}" for key, value in shares.items()), flush=True)


def miss_row(name: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """What the JSON file keeps of one engine: of each round, in order, whose names are in the order they ran in."""
    found = [rates[name] for rates in rounds]
    row: dict[str, Any] = {"part": "misses", "connector": name, "tokens_per_second": median(found)}
    row |= {"all_tokens_per_second": found, "orders": [list(rates) for rates in rounds]}
    if name != "none" and all("none" in rates for rates in rounds):
        ratios = [rates[name] / rates["none"] for rates in rounds]
        low, high = (float(np.percentile(ratios, share)) for share in (10, 90))
        row |= {"over_none": median(ratios), "over_none_p10": low, "over_none_p90": high, "all_over_none": ratios}
    return row


def measure_chats(
    options: argparse.Namespace, report: Report, engines: Engines, shapes: list[ChatShape], begin: float
) -> None:
    """Every number of users, answer and rate, and for each all engines in rotating order; claims on a regime when it is
    measured."""
    rates = [None if rate == SATURATED else float(rate) for rate in options.rates.split(",")]
    asked = [(int(answer), rate) for answer in options.answers.split(",") for rate in rates]
    if options.misses_only in engines:
        engines.pop(options.misses_only).close()
    print(
        f"{'host':>5} {'answer':>6} {'rate':>9}  {'engine':20} {'turns/s':>8} {'TTFT p50':>9} {'p99':>9} ms "
        f"{'cached':>8}  waiting"
    )
    for number, shape in enumerate(shapes):
        engines.at_once(begin_chats, shape)
        # Compiles what a first use does.
        engines.at_once(run_window, Window(-number, asked[0][0], None, 0.0, 2 * options.lead))
        left = options.limit - (time.monotonic() - begin) - _CLOSING_SECONDS - options.trace * len(engines)
        count = len(asked) * len(engines) * (len(shapes) - number)
        seconds = window_seconds(options.seconds, left, count, options.lead)
        if seconds <= 0:
            raise SystemExit(f"{left:.0f} s are left of --limit: no room for {count} windows")
        print(f"windows of {seconds:.1f} s behind {options.lead:g} s that do not count")
        first = 1 + number * len(asked)
        windows = [Window(n, *each, options.lead, seconds) for n, each in enumerate(asked, first)]
        for window in windows:
            measure_window(report, engines, shape, report.rows[0]["host_shares"][number], window)
            report.write(options.json)
    if options.trace:
        traced = replace(windows[-1], number=windows[-1].number + 1, lead=0.0, seconds=options.trace)
        add_timelines(report, engines.everywhere(trace_window, traced))


def measure_window(report: Report, engines: Engines, shape: ChatShape, share: float, window: Window) -> None:
    """Of all engines, with a row for each, and the claims on its regime."""
    common = {"host_bytes": report.rows[0]["host_bytes"], "host_share": share}
    common |= report.rows[0]["versions"] | asdict(shape)
    order = rotated(list(engines), window.number - 1)
    for name, result in engines.each(order, run_window, window):
        row = chat_row(name, window, result) | common | {"place": order.index(name)}
        report.rows.append(row)
        print_row(row)
    add_failed(report, engines)
    claim_regimes(report, share, window)


def claim_regimes(report: Report, share: float, window: Window) -> None:
    """On the regime of a window that all engines have had."""
    found = regimes(row for row in report.rows if row["part"] in ("chats", "failed"))
    for regime in found:
        if (regime["host_share"], regime["answer"], regime["rate"]) == (share, window.answer, window.rate):
            print(label(regime) + "".join(f"; {name} {reason}" for name, reason in regime["missing"].items()))
            claim_regime(report, regime)


def print_row(row: dict[str, Any]) -> None:
    """One line of figures and one of phases; `>=` in front of a lower bound."""
    p50, p99 = (
        f"{'>=' if name in row.get('lower_bounds', ()) else ''}{row[name]:.1f}"
        for name in ("ttft_p50_ms", "ttft_p99_ms")
    )
    rate = SATURATED if row["rate"] is None else row["rate"]
    print(
        f"{row['host_share']:4g}x {row['answer']:6} {rate:>9}  {row['connector']:20} "
        f"{row['turns_per_second']:8.2f} {p50:>9} {p99:>9}    {row['cached_share']:8.1%}  {row['waiting']} of "
        f"{row['arrived']}{'  VOID: ' + row['void'] if 'void' in row else ''}"
    )
    shown = {key.removesuffix("_ms"): value for key, value in row["phases"].items() if key[:5] != "call_"}
    print("".join(f"  {key} {value:.1f}" for key, value in shown.items()), flush=True)
