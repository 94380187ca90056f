"""vLLM serving under load: what a connector costs where nothing is hit, and what it gives chats that do not fit.

Miss path: batches of prompts that nobody asked before, every engine in turn, each against the engine without a
connector in the same round. Chats: users talk about a document each, four times as many tokens in all as the device
holds; turns arrive at random at rising rates, whether or not the engine keeps up, and each rate runs for a fixed time.
Needs vLLM, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from integration.bench.vllm_engine import (
    Engine,
    EngineServer,
    add_arguments,
    engine_options,
    everywhere,
    start_engines,
    unavailable,
)
from integration.bench.vllm_phases import Phases
from integration.bench.vllm_timeline import timeline
from integration.report import Report, hardware


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Turns of `users` that arrive `rate` times a second for `seconds`; lengths in tokens."""

    users: int
    document: int
    question: int
    answer: int
    max_length: int
    rate: float
    seconds: float
    seed: int


@dataclass(slots=True)
class ChatResult:
    """Within the time: turns answered, tokens of them, and ms to the first token of every turn that arrived.

    A turn whose first token did not come in time counts with the ms that it had waited, and in `waiting`.
    """

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    waiting: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)  # see `Phases.stop`
    counted: dict[str, float] = field(default_factory=dict)  # by our connector


class ChatRun:
    """One `ChatLoad` on one engine; runs in the engine's process."""

    def __init__(self, server: EngineServer, load: ChatLoad) -> None:
        self._server, self._load = server, load
        self._random = np.random.default_rng(load.seed)
        gaps = self._random.exponential(1 / load.rate, int(2 * load.rate * load.seconds) + 20)
        self._arrivals: list[float] = np.cumsum(gaps).tolist()  # the last ones long after the end
        self._histories = [document(user, load.document) for user in range(load.users)]
        self._idle = list(range(load.users))
        self._running: dict[str, tuple[int, float]] = {}  # user, arrival
        self._phases: Phases
        self._started: set[str] = set()  # have their first token
        self._num_submitted = 0
        self.result = ChatResult()

    def run(self) -> ChatResult:
        """Serve until the time is over; what is unfinished then is aborted."""
        before, self._phases = self._server.stats(), Phases(self._server.scheduler)
        begin = time.perf_counter()
        while (now := time.perf_counter() - begin) < self._load.seconds:
            while self._idle and self._arrivals[self._num_submitted] <= now:
                self._submit(self._arrivals[self._num_submitted])
            if not self._server.busy:
                time.sleep(0.0005)
                continue
            for output in self._server.step():
                self._take(output, time.perf_counter() - begin)
        self.result.phases = self._phases.stop()
        self.result.counted = {name: value - before[name] for name, value in self._server.stats().items()}
        late = [arrival for name, (_, arrival) in self._running.items() if name not in self._started]
        late += [t for t in self._arrivals[self._num_submitted :] if t < self._load.seconds]
        self.result.waiting = len(late)
        self.result.ttft_ms += [1e3 * (self._load.seconds - arrival) for arrival in late]
        self._server.llm.llm_engine.abort_request(list(self._running))
        self._server.settle()
        return self.result

    def _submit(self, arrival: float) -> None:
        user = self._idle.pop(int(self._random.integers(len(self._idle))))
        load, history = self._load, self._histories[user]
        if len(history) + load.question + load.answer > load.max_length:
            del history[load.document :]
        history += self._random.integers(3, 500, load.question).tolist()
        name = f"{load.seed}-{self._num_submitted}"
        self._num_submitted += 1
        self._running[name] = (user, arrival)
        self._phases.arrived(name)
        self._server.submit(name, history, load.answer)

    def _take(self, output: Any, now: float) -> None:
        name = output.request_id
        if name not in self._running:
            return  # it was aborted
        user, arrival = self._running[name]
        self._phases.answered(name, output.finished)
        if name not in self._started:
            self._started.add(name)
            self.result.ttft_ms.append(1e3 * (now - arrival))
        if output.finished:
            del self._running[name]
            self._histories[user] += output.outputs[0].token_ids
            self._idle.append(user)
            self.result.turns += 1
            self.result.prompt_tokens += len(output.prompt_token_ids)
            self.result.cached_tokens += output.num_cached_tokens or 0


def document(user: int, length: int) -> list[int]:
    """The same for every engine and rate."""
    return [int(token) for token in np.random.default_rng(10**6 + user).integers(3, 500, length)]


def run_chat(server: EngineServer, load: ChatLoad) -> ChatResult:
    """Runs in the engine's process."""
    return ChatRun(server, load).run()


def trace_chat(server: EngineServer, load: ChatLoad) -> dict[str, float]:
    """Runs in the engine's process: what the GPU does during such a load; the trace is kept beside its log."""
    kept = server.options.logs / f"trace_{server.options.connector.replace(':', '_')}.json.gz"
    return timeline(ChatRun(server, load).run, kept)


def read_documents(server: EngineServer, load: ChatLoad) -> None:
    """Runs in the engine's process: every document once, so that all are in the caches that hold them."""
    for user in range(load.users):
        server.generate(document(user, load.document))
    server.settle()


def run_misses(server: EngineServer, seed: int, prompts: int, length: int, answer: int) -> float:
    """Runs in the engine's process: tokens a second, prompts and answers, of a batch without any reuse."""
    tokens = np.random.default_rng(2 * 10**6 + seed).integers(3, 500, (prompts, length)).tolist()
    batch = [{"prompt_token_ids": token_ids} for token_ids in tokens]
    start = time.perf_counter()
    server.llm.generate(batch, server.params(answer), use_tqdm=False)
    seconds = time.perf_counter() - start
    server.settle()
    return prompts * (length + answer) / seconds


def main() -> int:
    options = parse_options()
    if options.redraw:
        draw(options.png, json.loads(options.redraw.read_text())["rows"], "chats")
        return 0
    if reason := unavailable(options):
        print(reason)
        return 0
    report = Report("vllm_serving")
    kept = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    report.rows.append({"part": "options", **kept})
    wanted = [engine_options(options, c, options.max_length) for c in options.connectors.split(",")]
    print(f"{hardware()['gpu'] or hardware()['cpu']}; logs of the engines: {wanted[0].logs}", flush=True)
    engines, _ = start_engines(wanted, options.start_timeout)
    try:
        everywhere(engines, EngineServer.wait_for_host)
        measure_misses(options, report, engines)
        report.write(options.json)
        measure_chats(options, report, engines)
    finally:
        for engine in engines.values():
            engine.close()
    report.write(options.json)
    draw(options.png, report.rows, f"{options.users} chats, 4 times what the device holds, {hardware()['gpu']}")
    return 0


def parse_options() -> argparse.Namespace:
    """The command line; `--tiny` sets all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, host_memory="30GiB", device_tokens=49152)
    parser.add_argument("--png", type=Path, help="the picture of the chats")
    parser.add_argument("--redraw", type=Path, metavar="JSON", help="only draw what an earlier run wrote")
    parser.add_argument("--rounds", type=int, default=6, help="of the miss path")
    parser.add_argument("--miss-prompts", type=int, default=20, help="in a batch of the miss path")
    parser.add_argument("--miss-length", type=int, default=2048)
    parser.add_argument("--rates", default="3,6,12", help="turns a second; one that comes twice is run twice")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each rate and engine")
    parser.add_argument("--trace", type=float, default=0.0, help="at last, seconds of the last rate under a profiler")
    parser.add_argument("--users", type=int, help="default: 4 times the device's tokens")
    parser.add_argument("--document", type=int, default=8000, help="tokens")
    parser.add_argument("--question", type=int, default=160, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--max-length", type=int, default=12288, help="a chat that reaches it begins anew")
    options = parser.parse_args()
    if options.tiny:
        options.host_memory, options.device_tokens, options.max_length = "24MiB", 2048, 1024
        options.document, options.question, options.answer = 480, 40, 8
        options.miss_prompts, options.miss_length = 6, 256
    options.users = options.users or round(4 * options.device_tokens / (options.document + options.question))
    return options


def measure_misses(options: argparse.Namespace, report: Report, engines: dict[str, Engine]) -> None:
    """All engines in each round, in an order that turns around; the first round is to get warm."""
    rounds = []
    for turn in range(options.rounds + 1):
        ordered = dict(engines if turn % 2 else reversed(engines.items()))
        rates = everywhere(ordered, run_misses, turn, options.miss_prompts, options.miss_length, 2 * options.answer)
        for name in engines.keys() - ordered.keys():
            del engines[name]
        rounds.append(rates)
        print(f"misses, round {turn}: " + ", ".join(f"{n} {rates[n]:.0f} tokens/s" for n in rates), flush=True)
    for name in engines:
        found = [rates[name] for rates in rounds[1:]]
        report.rows.append(
            {"part": "misses", "connector": name, "tokens_per_second": median(found), "all_tokens_per_second": found}
        )
        if name != "none" and "none" in engines:
            ratio = median(rates[name] / rates["none"] for rates in rounds[1:])
            print(f"{name}: {ratio:.4f} of the throughput without a connector where nothing is hit")
            if name.startswith("ours"):
                report.claim(f"{name}_miss_path_throughput", ratio, 0.99, "of 1", "higher")


def measure_chats(options: argparse.Namespace, report: Report, engines: dict[str, Engine]) -> None:
    """Every rate, and for each all engines in turn."""
    rates = [float(rate) for rate in options.rates.split(",")]
    lengths = (options.users, options.document, options.question, options.answer, options.max_length)
    loads = [ChatLoad(*lengths, rates[0], min(4.0, options.seconds), 0)]
    loads += [ChatLoad(*lengths, rate, options.seconds, seed) for seed, rate in enumerate(rates, 1)]
    everywhere(engines, read_documents, loads[0])
    everywhere(engines, run_chat, loads[0])  # to get warm
    print(f"{options.users} users, documents of {options.document} tokens; {options.device_tokens} fit on the device")
    print(f"{'rate':>6}  {'engine':14} {'turns/s':>8} {'TTFT p50':>9} {'p99':>9} ms  {'cached':>7}  waiting at the end")
    for load in loads[1:]:
        for name, result in everywhere(engines, run_chat, load).items():
            row = chat_row(name, load, result)
            report.rows.append(row)
            print(
                f"{load.rate:6g}  {name:14} {row['turns_per_second']:8.2f} {row['ttft_p50_ms']:9.1f} "
                f"{row['ttft_p99_ms']:9.1f}     {row['cached_share']:7.1%}  {result.waiting}"
            )
            shown = {key.removesuffix("_ms"): value for key, value in result.phases.items() if key[:5] != "call_"}
            print("".join(f"  {key} {value:.1f}" for key, value in shown.items()), flush=True)
        report.write(options.json)
    claim_chats(report)
    if options.trace:
        traced = replace(loads[-1], seconds=options.trace, seed=len(loads))
        for name, found in everywhere(engines, trace_chat, traced).items():
            report.rows.append({"part": "timeline", "connector": name, **found})
            print(f"{name:14}" + "".join(f"  {key} {value:.4g}" for key, value in found.items()), flush=True)


def chat_row(name: str, load: ChatLoad, result: ChatResult) -> dict[str, Any]:
    """What the JSON file keeps."""
    times = result.ttft_ms or [0.0]
    return {
        "part": "chats",
        "connector": name,
        **asdict(load),
        "turns_per_second": result.turns / load.seconds,
        "tokens_per_second": (result.prompt_tokens + result.turns * load.answer) / load.seconds,
        "ttft_p50_ms": float(np.percentile(times, 50)),
        "ttft_p99_ms": float(np.percentile(times, 99)),
        "cached_share": result.cached_tokens / max(1, result.prompt_tokens),
        "waiting": result.waiting,
        "arrived": len(result.ttft_ms),
        "phases": result.phases,
        "counted": result.counted,
    }


def over_runs(rows: Sequence[dict[str, Any]], name: str, figure: str) -> dict[float, float]:
    """The median of a figure of one engine over all runs at a rate, by rate."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["part"] == "chats" and row["connector"] == name:
            found.setdefault(row["rate"], []).append(row[figure])
    return {rate: median(values) for rate, values in found.items()}


def claim_chats(report: Report) -> None:
    """The highest throughput over all rates, against OffloadingConnector's."""
    names = dict.fromkeys(row["connector"] for row in report.rows if row["part"] == "chats")
    best = {name: max(over_runs(report.rows, name, "turns_per_second").values()) for name in names}
    for name in best:
        if name.startswith("ours") and best.get("offloading"):
            ratio = best[name] / best["offloading"]
            report.claim(f"{name}_chat_throughput_over_offloading", ratio, 1.15, "x", "higher")


def draw(path: Path | None, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Write a PNG: throughput and time to first token over the rate at which turns arrive. Needs matplotlib."""
    chats = [row for row in rows if row["part"] == "chats"]
    if path is None or not chats:
        return
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib; --redraw makes it from the JSON file")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (throughput, ttft) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in dict.fromkeys(row["connector"] for row in chats):
        turns, p50, p99 = (over_runs(chats, name, key) for key in ("turns_per_second", "ttft_p50_ms", "ttft_p99_ms"))
        (line,) = throughput.plot(list(turns), list(turns.values()), marker="o", label=name)
        ttft.plot(list(p50), list(p50.values()), marker="o", color=line.get_color(), label=name)
        ttft.plot(list(p99), list(p99.values()), marker=".", color=line.get_color(), linestyle="--")
    throughput.set_ylabel("turns answered a second")
    ttft.set_ylabel("time to first token, ms (median, dashed: 99th percentile)")
    ttft.set_yscale("log")
    for axes in (throughput, ttft):
        axes.set_xlabel("turns arriving a second")
        axes.set_ylim(bottom=0 if axes is throughput else None)
        axes.grid(True, which="both", alpha=0.2)
        axes.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
