"""What disaggregation adds to the first token in vLLM, and how much of a KV transfer its prefill hides.

Three engines: one alone, one that computes prompts on the first GPU and one that continues them on the last, asked in
turn. `added` is what a client waits longer for the first token of the pair than for that of the one. Asked one behind
the other, the whole transfer follows the prefill; asked at once, only what the prefill does not hide, and in both cases
the step of the decode engine, which is measured by itself on a prompt that it holds. Needs vLLM, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from integration.bench.engines import Engine, start_engines
from integration.bench.options import add_arguments, engine_options, unavailable
from integration.bench.vllm_engine import VllmOptions, VllmServer
from integration.report import Report, hardware
from kv_connector.values import parse_size

ADDED_GOAL_MS = 100.0
HIDDEN_GOAL = 0.8
Params = dict[str, Any]


def first_token(server: VllmServer, token_ids: Sequence[int], params: Params | None = None) -> Params | None:
    """Runs in the engine's process: one token of a prompt; what a prefill says to the decode engine."""
    asked = server.params(1)
    asked.extra_args = {"kv_transfer_params": params} if params else None
    (output,) = server.llm.generate([{"prompt_token_ids": list(token_ids)}], asked, use_tqdm=False)
    told: Params | None = output.kv_transfer_params
    return told


def counted(server: VllmServer) -> dict[str, float]:
    """Runs in the engine's process: what our connector has counted."""
    return server.stats()


class Pair:
    """The three engines, and prompts that nobody has seen."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.alone, self.prefill, self.decode = (engines[name] for name in ("none", "producer", "consumer"))
        self._rng = np.random.default_rng(1)
        told = self.prefill.call(first_token, self.prompt(40), {"do_remote_decode": True})
        assert told is not None
        self._address = {name: told[name] for name in ("remote_host", "remote_port", "remote_ports")}
        self._num_asked = 0

    def prompt(self, length: int) -> list[int]:
        """New random tokens."""
        return [int(token) for token in self._rng.integers(3, 500, length)]

    def in_turn(self, length: int) -> dict[str, float]:
        """Milliseconds of one engine alone and of the pair, asked one behind the other, for one prompt."""
        prompt = self.prompt(length)
        start = time.perf_counter()
        self.alone.call(first_token, prompt)
        alone = time.perf_counter() - start
        start = time.perf_counter()
        told = self.prefill.call(first_token, prompt, {"do_remote_decode": True})
        prefilled = time.perf_counter() - start
        self.decode.call(first_token, prompt, told)
        pair = time.perf_counter() - start
        start = time.perf_counter()
        self.decode.call(first_token, prompt)
        held = time.perf_counter() - start
        times = {"alone": alone, "prefill": prefilled, "pair": pair, "behind": pair - prefilled, "held": held}
        return {name: 1e3 * seconds for name, seconds in times.items()}

    def at_once(self, length: int) -> float:
        """Milliseconds from the end of the prefill to the decode engine's token, where it was asked with it."""
        prompt = self.prompt(length)
        self._num_asked += 1
        name = f"at-once-{self._num_asked}"
        self.decode.begin(first_token, prompt, {"do_remote_prefill": True, "transfer_id": name, **self._address})
        self.prefill.call(first_token, prompt, {"do_remote_decode": True, "transfer_id": name})
        end = time.perf_counter()
        self.decode.finish()
        return 1e3 * (time.perf_counter() - end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(VllmOptions, parser, host_memory="0", device_tokens=98304)
    parser.add_argument("--kind", choices=["shared_memory", "nixl"], default="shared_memory")
    parser.add_argument("--lengths", help="tokens of prompts (2048,8192,32768; tiny: 256,1024)")
    parser.add_argument("--runs", type=int, default=6)
    options = parser.parse_args()
    if reason := unavailable(VllmOptions, options):
        print(reason)
        return 0
    lengths = [int(n) for n in (options.lengths or ("256,1024" if options.tiny else "2048,8192,32768")).split(",")]
    if options.tiny:
        options.device_tokens = 8192
    os.environ["PYTHONHASHSEED"] = "0"  # engines must give a block the same name
    report = Report("vllm_pd")
    engines = start(options, max(lengths) + 8)
    try:
        pair = Pair(engines)
        for length in lengths:
            measure(report, options, pair, length)
        stats = pair.decode.call(counted)
        report.rows.append({"part": "received", "kind": options.kind, **stats})
        print({name: value for name, value in stats.items() if "peer" in name or "receive" in name})
    finally:
        for engine in engines.values():
            engine.close()
    report.write(options.json)
    return 0


def start(options: argparse.Namespace, max_model_len: int) -> dict[str, Engine]:
    """The engines by name; the prefill's on the first GPU, the others on the last."""
    last = max(0, torch.cuda.device_count() - 1)
    peer = {"peer": {"kind": options.kind, "secret": "known to both of the benchmark"}}
    size = parse_size(options.host_memory)
    wanted = [
        replace(engine_options(VllmOptions, options, name, max_model_len, size, **peer), device=device)
        for name, device in (("none", last), ("producer", 0), ("consumer", last))
    ]
    print(f"{hardware()['gpu'] or hardware()['cpu']} x {last + 1}; logs of the engines: {wanted[0].logs}", flush=True)
    engines, _ = start_engines(wanted, options.start_timeout)
    if len(engines) < len(wanted):
        raise SystemExit("an engine did not start")
    return engines


def measure(report: Report, options: argparse.Namespace, pair: Pair, length: int) -> None:
    """One length: `runs` prompts of either kind, in turn, behind one that gets everything warm."""
    times: dict[str, list[float]] = {}
    for run in range(options.runs + 1):
        found = pair.in_turn(length) | {"at_once": pair.at_once(length)}
        if run:
            for name, value in found.items():
                times.setdefault(name, []).append(value)
    middle = {name: median(values) for name, values in times.items()}
    report.rows.append({"part": "first_token", "kind": options.kind, "tokens": length, "all_ms": times})
    print(f"{length:6} tokens: " + ", ".join(f"{name} {value:.1f}" for name, value in middle.items()) + " ms")
    added = median(pair - alone for pair, alone in zip(times["pair"], times["alone"], strict=True))
    report.claim(f"added_to_the_first_token_at_{length}_tokens", added, ADDED_GOAL_MS, "ms", "lower")
    transfer = middle["behind"] - middle["held"]
    hidden = 1 - max(0.0, middle["at_once"] - middle["held"]) / transfer if transfer > 0 else 1.0
    report.claim(f"hidden_behind_the_prefill_at_{length}_tokens", hidden, HIDDEN_GOAL, "of 1", "higher")


if __name__ == "__main__":
    sys.exit(main())
