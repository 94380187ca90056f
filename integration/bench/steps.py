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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from integration.bench import index
from integration.report import Report, hardware
from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.histograms import Histograms
from kv_connector.index import BlockGroup, Event, adopt_hashes
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.ledger import EndedJob
from kv_connector.scheduler.observers import GuardedObserver, JobTimes, Observer
from kv_connector.scheduler.traces import RequestTraces
from kv_connector.tracing import SpanTracer
from kv_connector.types import BlockHash, StepPlan, StepReport

BLOCK_SIZE = 16
QUIET_STEPS = 64
OBSERVED_STEPS = 16
TRACED_SHARE = 0.01
LEAST_FOR_DECILES = 10
"""Samples; of fewer `quantiles` makes figures up that lie outside of what was measured."""
MATCH_GOAL = 0.3
"""Of a look-up in vLLM's flat pool: what a match took before, 0.26 to 0.30 on three machines."""

_rng = random.Random(15)
_device_ids = itertools.count()


def make_hashes(count: int) -> list[BlockHash]:
    """Hashes of a prefix that nobody has seen."""
    return [BlockHash(_rng.randbytes(32)) for _ in range(count)]


@dataclass(slots=True)
class Prompt:
    """A request that grows by a token a step."""

    request_id: str
    block_hashes: list[BlockHash]
    num_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.block_hashes) * BLOCK_SIZE + 1 + _rng.randrange(BLOCK_SIZE - 1)
        self.block_ids = [next(_device_ids) for _ in range(len(self.block_hashes) + 1)]


@dataclass(slots=True)
class DeviceBlock:
    """A free block of an engine, in vLLM's linked list."""

    block_id: int
    block_hash: BlockHash
    next: DeviceBlock | None = None


class Device:
    """The engine's blocks: pins cost nothing, and the reuse order is walked as `engines/vllm/blocks.py` does."""

    def __init__(self, hashes: Sequence[BlockHash] = ()) -> None:
        self.head: DeviceBlock | None = None
        for block_hash in reversed(hashes):
            self.head = DeviceBlock(next(_device_ids), block_hash, self.head)

    def touch(self, block_ids: Sequence[int]) -> None:
        pass

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        pass

    num_available = 1 << 30

    def forget(self, block_ids: Collection[int]) -> None:
        pass

    def next_reused(self, limit: int) -> list[tuple[int, BlockHash]]:
        block, found = self.head, []
        while block is not None and limit > 0:
            if block.block_hash is not None:
                found.append((block.block_id, BlockHash(bytes(block.block_hash))))
            block = block.next
            limit -= 1
        return found


class Side:
    """A scheduler half with its requests, stepped by hand."""

    def __init__(
        self,
        capacity: int,
        device: Device | None = None,
        publishes_events: bool = False,
        groups: Sequence[BlockGroup] = (BlockGroup(),),
        observers: Sequence[Observer] = (),
        **settings: Any,
    ) -> None:
        given = {"host_memory": 1 << 30, "write_policy": "write_through", "load_choice": "sync", **settings}
        config = Config.from_mapping(given)
        self.half = SchedulerHalf(
            config, BLOCK_SIZE, publishes_events=publishes_events, groups=groups, observers=observers
        )
        self.half.bind_block_pool(device or Device())
        self.capacity = capacity
        self.num_groups = len(groups)
        self.half.update_connector_output([self._report(0)])
        self.running: list[Prompt] = []

    def cache(self, hashes: Sequence[BlockHash]) -> None:
        """Put a prefix on the host, as a save would have."""
        host = self.half.host
        ids = host.allocate(len(hashes))
        assert ids is not None, "the host is too small"
        host.attach(ids, self.half.tree.insert_path(hashes, time.monotonic()), Event.SWAP_OUT)
        host.fill(ids)
        host.release(ids)

    def admit(self, prompt: Prompt) -> int:
        """Returns the tokens that are loaded."""
        num_tokens, _ = self.half.get_num_new_matched_tokens(prompt, 0)
        tables = [prompt.block_ids] * self.num_groups
        self.half.update_state_after_alloc(prompt, tables, 0, num_tokens or 0)
        self.running.append(prompt)
        return num_tokens or 0

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Admit each and compute what it does not load, one a step."""
        for prompt in prompts:
            computed = self.admit(prompt)
            item = ScheduledRequest(prompt.request_id, computed, prompt.num_tokens - computed)
            self.end(self.half.build_connector_meta(SchedulerOutput([item])))

    def end(self, plan: StepPlan) -> None:
        """All copies of the step end."""
        jobs = (*plan.loads, *plan.saves, *plan.background_loads)
        self.half.update_connector_output([self._report(plan.step, tuple(job.job_id for job in jobs))])

    def decode(self, before: Callable[[], object] = lambda: None) -> float:
        """One step in which all that run compute a token; CPU microseconds, what is asked `before` it included."""
        items = []
        for prompt in self.running:
            prompt.num_tokens += 1
            new: list[list[int]] = []
            if prompt.num_tokens % BLOCK_SIZE == 0:
                prompt.block_hashes += make_hashes(1)
                new = [[next(_device_ids)]]
            items.append(ScheduledRequest(prompt.request_id, prompt.num_tokens - 1, 1, new))
        start = time.thread_time_ns()
        before()
        self.end(self.half.build_connector_meta(SchedulerOutput(items)))
        return (time.thread_time_ns() - start) / 1e3

    def _report(self, step: int, jobs: tuple[int, ...] = ()) -> StepReport:
        return StepReport(step, 0, jobs, num_host_blocks=self.capacity, block_bytes=1 << 20)


def take_turns(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each side `repeats` times, another one first in every round."""
    names, times = list(sides), {name: list[float]() for name in sides}
    for number in range(repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(sides[name]())
    return times


def record(report: Report, case: str, times: Mapping[str, Sequence[float]], unit: str = "us") -> dict[str, float]:
    """Print and record the medians of a case, which are returned."""
    medians = {}
    for side, values in times.items():
        low, high = _spread(values)
        low_name, high_name = ("p10", "p90") if len(values) >= LEAST_FOR_DECILES else ("min", "max")
        medians[side] = median(values)
        row = {"case": case, "side": side, "unit": unit, "median": medians[side], low_name: low, high_name: high}
        report.rows.append(row | {"count": len(values)})
        print(f"{case:14}{side:28}{medians[side]:12.1f} {unit} ({low:.1f}..{high:.1f})", flush=True)
    return medians


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Of the lowest tenth and the highest; of few samples the lowest and the highest, as nothing lies between."""
    if len(values) < LEAST_FOR_DECILES:
        return min(values), max(values)
    low, *_, high = quantiles(values, n=10)
    return low, high


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

    def timed(name: str, is_new: bool) -> float:
        side = sides[name]
        if is_new:
            prompts[name] = make_hashes(options.prompt_blocks)
        prompt = Prompt(f"{next(_device_ids)}", prompts[name])
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


def observed(report: Report, options: argparse.Namespace) -> None:
    """What is read of both, once a step as engines do, is part of the step. Spans go to OpenTelemetry's own batches, on
    whose thread they would be exported, and from there nowhere."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    traces = RequestTraces(SpanTracer(provider), TRACED_SHARE)
    length = options.prompt_blocks // 16
    prefixes = [make_hashes(length // 2) for _ in range(options.requests)]
    room = 4 * length * (options.steps * OBSERVED_STEPS + options.requests)
    sides = {
        "nothing on": Side(room),
        "all on": Side(room, publishes_events=True, observers=(GuardedObserver(traces),)),
    }
    off = sides["nothing on"].half
    off.metrics.histograms = Unobserved()
    off._ledger._times = Untimed()
    for side in sides.values():
        for prefix in prefixes:
            side.cache(prefix)
        side.start([Prompt(f"{i}", prefixes[i % len(prefixes)] + make_hashes(length // 2)) for i in range(64)])

    numbers = itertools.count()

    def turn(name: str) -> float:
        """Microseconds of a step, of many: one takes too little to tell."""
        side = sides[name]
        new = [(f"new {i}", prefixes[i % len(prefixes)]) for i in itertools.islice(numbers, OBSERVED_STEPS)]
        prompts = [Prompt(request_id, prefix + make_hashes(length // 2)) for request_id, prefix in new]
        start = time.thread_time_ns()
        for prompt in prompts:
            side.half.request_finished(side.running.pop(0))
            side.start([prompt])
            side.decode()
            list(side.half.take_events())
            side.half.get_kv_connector_stats()
            [histogram.count for _, histogram in side.half.metrics.histograms.series()]
        return (time.thread_time_ns() - start) / 1e3 / OBSERVED_STEPS

    gc.collect()
    gc.freeze()
    times = take_turns({name: lambda name=name: turn(name) for name in sides}, options.steps)
    gc.unfreeze()
    medians = record(report, "observed", times)
    provider.shutdown()
    report.claim("observed_step_to_one_that_is_not", medians["all on"] / medians["nothing on"], 1.03, "x", "lower")


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
