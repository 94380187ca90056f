"""What a step of the scheduler half costs, and what it costs where it used to cost much more: CPU time of its thread.

Each case is a ratio in one run. Both sides take turns, step by step, in an order that rotates; medians count.

    full host       200 requests decode on a host without a free block, against one with room
    no room         64 requests decode whose prompts wait to be saved: all of the host pinned, or leased but for a block
    write_back      the 64 quiet steps after a burst of 12 prompts, and those after them, against those before it
    riders          100 requests that wait for one load of their prefix while 64 decode, against one
    reset           of a full host with blocks in use, and of one that tells routers of each block; the longer of two
    block groups    a prompt that is computed and saved, and that is hit, with two groups against one; by block
    storage keys    of one prompt, against one SHA-256 a block
    observed        a step in which one of 64 requests ends and another is admitted that hits half of its prompt, with
                    histograms, events and traces of 1 % of the requests, against none of these
    index           insert, evict and match of a cached block, against vLLM's flat pool (or its model: `flat_pool.py`)
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from integration.bench import index
from integration.bench.stepped_half import BLOCK_SIZE, Device, Prompt, Side, draw_from, make_hashes
from integration.bench.turns import record, take_turns
from integration.report import Report, hardware
from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.histograms import Histograms
from kv_connector.index import BlockGroup, adopt_hashes
from kv_connector.scheduler.ledger import EndedJob
from kv_connector.scheduler.observers import GuardedObserver, JobTimes
from kv_connector.scheduler.traces import RequestTraces
from kv_connector.tracing import SpanTracer
from kv_connector.types import BlockHash

QUIET_STEPS = 64
OBSERVED_STEPS = 16
TRACED_SHARE = 0.01
MATCH_GOAL = 0.3
"""Of a look-up in vLLM's flat pool: what a match took before, 0.26 to 0.30 on three machines."""


def reset(side: Side) -> float:
    """Milliseconds that it takes, with the blocks of a request in use."""
    host = side.half.host
    in_use = host.blocks_of(side.half.tree.match(side.running[0].block_hashes)) if side.running else []
    host.acquire(in_use)
    start = time.thread_time_ns()
    side.half.reset_cache()
    milliseconds = (time.thread_time_ns() - start) / 1e6
    host.release(in_use)
    side.half.check()
    return milliseconds


def full_host(report: Report, options: argparse.Namespace) -> None:
    """Also resets both, in the end."""
    length = options.prompt_blocks
    sides = {}
    for name, room in (("room", options.blocks // 4 + options.requests * length), ("full", 0)):
        side = sides[name] = Side(options.blocks + room)
        prefixes = [make_hashes(length) for _ in range(options.blocks // length)]
        for prefix in prefixes:
            side.cache(prefix)
        side.start([Prompt(f"{i}", list(prefix)) for i, prefix in enumerate(prefixes[: options.requests])])
    rest = sides["full"].half.host.pool.num_free
    sides["full"].cache(make_hashes(rest))
    gc.collect()
    gc.freeze()  # as vLLM does after start-up: what is cached is not walked again and again
    medians = record(
        report, "full host", take_turns({name: side.decode for name, side in sides.items()}, options.steps)
    )
    assert sides["full"].half.host.num_evicted and not sides["room"].half.host.num_evicted
    report.claim("full_host_to_host_with_room", medians["full"] / medians["room"], 2, "x", "lower")
    resets = [reset(side) for side in sides.values()]
    told, told_resets = Side(options.blocks, publishes_events=True), []
    for _ in resets:
        told.cache(make_hashes(options.blocks))
        told_resets.append(reset(told))
    record(report, "reset", {"no router listens": resets, "routers are told of each block": told_resets}, "ms")
    report.claim("reset_of_a_full_host", max(resets), 50, "ms", "lower")
    report.claim("reset_of_a_full_host_with_routers_told", max(told_resets), 50, "ms", "lower")
    gc.unfreeze()


def no_room(report: Report, options: argparse.Namespace) -> None:
    """Prompts of running requests wait for room that there is none of."""
    length, count = options.prompt_blocks, options.waiting_requests
    small = max(length, 16)
    sides = {"room": Side(2 * count * (length + options.steps)), "pinned": Side(small), "leased": Side(small)}
    pinned = make_hashes(small)
    sides["pinned"].cache(pinned)
    sides["pinned"].half.pin_prefix(pinned, are_given=False)
    assert sides["leased"].half.host.allocate(small - 1)
    for side in sides.values():
        side.start([Prompt(f"{i}", make_hashes(length)) for i in range(count)])
    medians = record(report, "no room", take_turns({name: side.decode for name, side in sides.items()}, options.steps))
    for name in ("pinned", "leased"):
        report.claim(f"{name}_host_to_host_with_room", medians[name] / medians["room"], 2, "x", "lower")


def write_back(report: Report, options: argparse.Namespace) -> None:
    """One burst of prompts, and the steps after it that have nothing to do."""
    length = options.prompt_blocks
    hashes = make_hashes(25 * length)
    side = Side(30 * length, Device(hashes), write_policy="write_back")
    side.cache(hashes)
    before = [side.decode() for _ in range(options.steps)]
    burst = [Prompt(f"{i}", make_hashes(length)) for i in range(12)]
    for prompt in burst:
        side.admit(prompt)
    items = [ScheduledRequest(prompt.request_id, 0, 32 * BLOCK_SIZE) for prompt in burst]
    side.end(side.half.build_connector_meta(SchedulerOutput(items)))
    for prompt in burst:
        side.half.request_finished(prompt)
    side.running.clear()
    falling = [side.decode() for _ in range(QUIET_STEPS)]
    after = [side.decode() for _ in range(options.steps)]
    soon = f"the {QUIET_STEPS} steps after it"
    medians = record(report, "write_back", {"before a burst": before, soon: falling, "later": after})
    for name, claim in ((soon, f"write_back_{QUIET_STEPS}_steps_after_a_burst"), ("later", "write_back_later")):
        report.claim(f"{claim}_to_before", medians[name] / medians["before a burst"], 3, "x", "lower")


def riders(report: Report, options: argparse.Namespace) -> None:
    """A step asks every waiting request anew; their prefix is being loaded."""
    prefix = make_hashes(options.prompt_blocks)
    calls = {}
    for count in (1, 100):
        side = Side(4 * len(prefix) + 64 * options.steps, load_choice="async")
        side.start([Prompt(f"{i}", make_hashes(4)) for i in range(64)])
        side.cache(prefix)
        loading = Prompt("loading", list(prefix))
        assert side.admit(loading), "the prefix is on the host"
        side.half.build_connector_meta(SchedulerOutput([]))  # the load is planned, and never ends
        side.running.remove(loading)
        waiting = [Prompt(f"waits {i}", list(prefix)) for i in range(count)]

        def ask(side: Side = side, waiting: Sequence[Prompt] = waiting) -> None:
            for prompt in waiting:
                answer = side.half.get_num_new_matched_tokens(prompt, 0)
                assert answer == (None, False), "it waits for the load"

        calls[f"{count} waiting"] = lambda side=side, ask=ask: side.decode(ask)
    medians = record(report, "riders", take_turns(calls, options.steps))
    ratio = medians["100 waiting"] / medians["1 waiting"]
    report.claim("a_hundred_waiting_requests_to_one", ratio, 2, "x", "lower")


def block_groups(report: Report, options: argparse.Namespace) -> None:
    """Two groups of full attention, of which each has its own copy of every block of a prompt."""
    sides = {"one": Side(8 * options.prompt_blocks), "two": Side(8 * options.prompt_blocks, groups=(BlockGroup(),) * 2)}
    prompts: dict[str, list[BlockHash]] = {}
    numbers = itertools.count()

    def timed(name: str, is_new: bool) -> float:
        side = sides[name]
        if is_new:
            prompts[name] = make_hashes(options.prompt_blocks)
        prompt = Prompt(f"{next(numbers)}", prompts[name])
        start = time.thread_time_ns()
        side.start([prompt])
        side.half.request_finished(prompt)
        side.running.clear()
        return (time.thread_time_ns() - start) / options.prompt_blocks / side.num_groups

    for case, is_new in (("computed", True), ("hit", False)):
        calls = {name: lambda name=name, is_new=is_new: timed(name, is_new) for name in sides}
        medians = record(report, f"groups, {case}", take_turns(calls, options.steps), "ns")
        report.claim(f"{case}_block_of_two_groups_to_one", medians["two"] / medians["one"], 1.6, "x", "lower")


def storage_keys(report: Report, options: argparse.Namespace) -> None:
    """What a look-up or a fetch of a whole prompt needs."""
    hashes, (root,) = make_hashes(options.prompt_blocks), make_hashes(1)
    ways = {
        "adopt_hashes": lambda: adopt_hashes(root, hashes),
        "one sha256 a block": lambda: b"".join(hashlib.sha256(root + name).digest() for name in hashes),
    }

    def timed(way: Callable[[], bytes]) -> float:
        start = time.thread_time_ns()
        way()
        return (time.thread_time_ns() - start) / 1e3

    calls = {name: lambda way=way: timed(way) for name, way in ways.items()}
    medians = record(report, "storage keys", take_turns(calls, options.steps))
    ratio = medians["adopt_hashes"] / medians["one sha256 a block"]
    report.claim("storage_keys_to_one_sha256_a_block", ratio, 1, "x", "lower")


class Unobserved(Histograms):
    """Histograms of an engine that had none."""

    def observe(self, name: str, tier: str, value: float) -> None:
        pass


class Untimed(JobTimes):
    """Of an engine that timed no job."""

    def __init__(self) -> None:
        pass

    def ended(self, ended: EndedJob, seconds: float) -> None:
        pass


class BusySide(Side):
    """64 requests run, and in each step one of them ends and another is admitted that hits half of its prompt. What is
    drawn follows from the step's number: sides do the same."""

    def __init__(self, options: argparse.Namespace, num_steps: int, is_observed: bool, **observed_by: Any) -> None:
        self.half_length = options.prompt_blocks // 16 // 2
        super().__init__(8 * self.half_length * (num_steps + options.requests), **observed_by)
        if not is_observed:
            self.half.metrics.histograms = Unobserved()
            self.half._ledger._times = Untimed()
        draw_from("prefixes")
        self.prefixes = [make_hashes(self.half_length) for _ in range(options.requests)]
        for prefix in self.prefixes:
            self.cache(prefix)
        self.start([self.prompt(f"{number}", number) for number in range(64)])

    def prompt(self, request_id: str, number: int) -> Prompt:
        """Its second half is new."""
        draw_from(request_id)
        return Prompt(request_id, self.prefixes[number % len(self.prefixes)] + make_hashes(self.half_length))

    def step(self, number: int) -> float:
        """CPU microseconds. What is read once a step by engines is part of it."""
        prompt = self.prompt(f"new {number}", number)
        start = time.thread_time_ns()
        self.half.request_finished(self.running.pop(0))
        self.start([prompt])
        self.decode()
        list(self.half.take_events())
        self.half.get_kv_connector_stats()
        [histogram.count for _, histogram in self.half.metrics.histograms.series()]
        return (time.thread_time_ns() - start) / 1e3


def observed(report: Report, options: argparse.Namespace) -> None:
    """Spans go to OpenTelemetry's own batches, on whose thread they would be exported, and from there nowhere.

    A sample is some steps of each side, one by one in turn, so that what disturbs the machine disturbs all. Turns are
    drawn, but no side comes twice in a row: it would find the processor's caches as it left them. Sides begin anew in
    every round, since where their memory happens to lie makes a percent of difference. Two are equal, to show what is
    left of all that. The garbage collector runs between samples: what it walks are all sides, on the account of the one
    that it comes to in."""
    off, again, on = sides = "nothing on", "nothing on, again", "all on"
    samples, numbers = max(1, options.steps // 10), itertools.count()  # of a round
    times: dict[str, list[float]] = {name: [] for name in sides}
    turns, order = random.Random(15), list(sides)
    gc.disable()
    for number in range(3 * samples):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
        traces = GuardedObserver(RequestTraces(SpanTracer(provider), TRACED_SHARE))
        by = {on: {"publishes_events": True, "observers": (traces,)}}
        num_steps, names = samples * OBSERVED_STEPS, sides[:: -1 if number % 2 else 1]
        busy = {name: BusySide(options, num_steps, name == on, **by.get(name, {})) for name in names}
        gc.collect()
        gc.freeze()
        for _ in range(samples):
            sums = dict.fromkeys(sides, 0.0)
            for step in itertools.islice(numbers, OBSERVED_STEPS):
                last, order = order[-1], turns.sample(sides, len(sides))
                while order[0] == last:
                    turns.shuffle(order)
                for name in order:
                    sums[name] += busy[name].step(step)
            for name, total in sums.items():
                times[name].append(total / OBSERVED_STEPS)
            gc.collect()
        gc.unfreeze()
        provider.shutdown()
    gc.enable()
    record(report, "observed", times)
    more = {
        f"{name}: more": [100 * (a / b - 1) for a, b in zip(times[name], times[off], strict=True)]
        for name in (again, on)
    }
    medians = record(report, "observed", more, "%")
    report.claim("observed_step_to_one_that_is_not", 1 + medians[f"{on}: more"] / 100, 1.03, "x", "lower")


def cached_block(report: Report, options: argparse.Namespace) -> None:
    """As `index.py`, at one size."""
    capacity = options.blocks // index.CHAIN * index.CHAIN
    flat = (index.vllm_index() or [index.FlatIndex])[0]
    repeats = {side.name: index.measure(side(capacity), capacity) for side in (index.OurIndex, flat)}
    gc.collect()
    gc.freeze()
    times: dict[str, dict[str, list[float]]] = {operation: {} for operation in index.OPERATIONS}
    numbers = {name: itertools.count() for name in repeats}
    for number in range(options.steps):
        for name in list(repeats)[:: 1 if number % 2 else -1]:
            for operation, value in repeats[name](next(numbers[name])).items():
                times[operation].setdefault(name, []).append(value)
    gc.unfreeze()
    for operation, goal in (("insert", 1.5), ("evict", 1.5), ("match", MATCH_GOAL)):
        medians = record(report, operation, times[operation], "ns")
        ratio = medians[index.OurIndex.name] / medians[flat.name]
        report.claim(f"{operation}_to_flat_pool", ratio, goal, "x", "lower")


CASES = (full_host, no_room, write_back, riders, block_groups, storage_keys, observed, cached_block)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=80, help="of each side, of each case")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="cached on the host")
    parser.add_argument("--prompt-blocks", type=int, default=2048, help="of a request")
    parser.add_argument("--requests", type=int, default=200, help="that run on the full host")
    parser.add_argument("--waiting-requests", type=int, default=64, help="whose blocks find no room")
    options = parser.parse_args(arguments)
    report = Report("steps", arguments=list(sys.argv[1:] if arguments is None else arguments))
    print(f"{hardware()['cpu']}, {hardware()['cores']} cores; medians of {options.steps} steps, CPU time")
    for case in CASES:
        case(report, options)
    report.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
