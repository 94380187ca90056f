"""A load that runs while the model computes: exposed wait per layer group, and a Chrome trace of one step.

A prompt whose first part lies on the host is admitted, so its step loads that part in layer groups while the forward
pass computes the rest. The same step is timed with the prefix on the device already (compute alone) and the load is
timed alone; what the step costs beyond the compute is what the load exposed. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.model import ModelConfig, PagedLlama, SequenceChunk
from integration.mini_engine.request import EngineRequest
from integration.mini_engine.runner import LlamaModel, LocalRunner, StepResult
from integration.mini_engine.scheduler import Scheduler
from integration.report import Report, hardware
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import Config
from kv_connector.index import CacheIdentity
from kv_connector.types import LoadTiming, StepPlan

BLOCK_SIZE = 16
# Llama-3.1-8B's layers: 4 KiB a token and layer.
MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
)


class RecordingRunner(LocalRunner):
    """Keeps the load timings that pass by in the reports."""

    timings: list[LoadTiming]
    submit_ms: list[float]

    def record(self) -> None:
        """Begin: nothing is kept yet. The launching thread's time in `start_load_kv` is kept too."""
        self.timings, self.submit_ms = [], []
        (worker,) = self.workers
        start_load_kv = worker.start_load_kv

        def timed(full_graph: bool = False) -> None:
            start = time.perf_counter()
            start_load_kv(full_graph)
            self.submit_ms.append(1e3 * (time.perf_counter() - start))

        worker.start_load_kv = timed  # type: ignore[method-assign]

    def execute(self, plan: StepPlan | None, chunks: Sequence[SequenceChunk]) -> StepResult:
        result = super().execute(plan, chunks)
        self.timings += [timing for report in result.reports for timing in report.load_timings]
        return result


def make_engine(options: argparse.Namespace, model: PagedLlama) -> tuple[MiniEngine, RecordingRunner]:
    num_blocks = 2 * (options.prefix_tokens + options.new_tokens) // BLOCK_SIZE + 8
    config = Config(
        host_memory=options.host_memory,
        write_policy="write_through",
        layer_group_bytes=options.layer_group_bytes,
        trace_loads=True,
        load_choice="sync",
    )
    scheduler = Scheduler(num_blocks, BLOCK_SIZE, max_step_tokens=options.prefix_tokens + options.new_tokens)
    runner = RecordingRunner(LlamaModel(model), num_blocks, BLOCK_SIZE, partial(build_worker, config))
    runner.record()
    connector = build_scheduler(config, BLOCK_SIZE, runner.world_size, tree=scheduler.tree)
    identity = CacheIdentity("overlap", "bfloat16", "NHD", BLOCK_SIZE)
    return MiniEngine(scheduler, runner, identity, connector), runner


def prompt(options: argparse.Namespace, tail: int) -> list[int]:
    """The shared prefix and a tail of its own."""
    prefix = [i * 7 % 4000 for i in range(options.prefix_tokens)]
    return prefix + [(i * 11 + tail) % 4000 for i in range(options.new_tokens)]


def step_ms(engine: MiniEngine, token_ids: list[int]) -> tuple[float, EngineRequest]:
    """Device time of the step that prefills this prompt."""
    request = engine.add(token_ids, 1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    engine.step()
    end.record()
    torch.cuda.synchronize()
    engine.run()
    return start.elapsed_time(end), request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, default=Path("overlap_trace.json"))
    parser.add_argument("--prefix-tokens", type=int, default=28672)
    parser.add_argument("--new-tokens", type=int, default=4096)
    parser.add_argument("--host-memory", default="8GiB")
    parser.add_argument("--layer-group-bytes", default="0", help="0: as the calibration says")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: there is nothing to overlap")
        return 0
    model = PagedLlama.random(MODEL, 0, "cuda", torch.bfloat16)
    engine, runner = make_engine(options, model)
    assert engine.connector is not None
    while engine.connector.host.pool.capacity * BLOCK_SIZE < options.prefix_tokens:
        engine.step()  # reports how much of the host pool is pinned by now
    engine.generate([prompt(options, 1)], 1)  # computes the prefix and saves it

    report = Report("overlap")
    alone, with_load = [], []
    for repeat in range(options.repeats + 1):
        ms, request = step_ms(engine, prompt(options, 100 + repeat))
        assert request.device_hit_tokens == options.prefix_tokens
        alone.append(ms)
        engine.scheduler.device.reset()
        ms, request = step_ms(engine, prompt(options, 200 + repeat))
        assert request.host_hit_tokens == options.prefix_tokens
        with_load.append(ms)
    submit = median(sorted(runner.submit_ms)[-options.repeats :])  # steps without a load take next to nothing
    print(f"{hardware()['gpu']}: {options.prefix_tokens} tokens from the host, {options.new_tokens} to compute")
    report_waits(report, alone[1:], with_load[1:], runner.timings[-options.repeats :], submit)
    engine.scheduler.device.reset()
    write_trace(options.trace, lambda: step_ms(engine, prompt(options, 999)))
    copying, shared = overlap_ms(options.trace)
    print(f"trace: copies take {copying:.1f} ms, {shared:.1f} ms of it beside kernels of the model")
    report.claim("share_of_copy_time_beside_compute_in_trace", shared / copying, 0.5, "of 1", "higher")
    report.write(options.json)
    engine.shutdown()
    return 0


def report_waits(
    report: Report, alone: Sequence[float], with_load: Sequence[float], timings: Sequence[LoadTiming], submit: float
) -> None:
    """Print and record what the load took, and what each layer group made the compute stream wait."""
    load = median(timing.load_ms for timing in timings)
    groups = [median(waits) for waits in zip(*(timing.load_stall_ms for timing in timings), strict=True)]
    print(f"{len(groups)} layer groups, medians of {len(timings)} steps")
    print(f"step, prefix on the device   {median(alone):8.2f} ms ({min(alone):.2f}..{max(alone):.2f})")
    print(f"step, prefix from the host   {median(with_load):8.2f} ms ({min(with_load):.2f}..{max(with_load):.2f})")
    print(f"the load itself              {load:8.2f} ms, of which the launching thread submits {submit:.2f} ms")
    for group, wait in enumerate(groups):
        print(f"exposed wait of group {group:2}     {wait:8.3f} ms")
        report.rows.append({"group": group, "load_stall_ms": wait})
    report.rows.append({"compute_ms": median(alone), "with_load_ms": median(with_load), "load_ms": load})
    report.rows.append({"submit_ms": submit})
    report.claim("exposed_wait_of_layer_groups_over_load", sum(groups) / load, 0.03, "of 1", "lower")
    report.claim("load_hidden_behind_compute", 1 - (median(with_load) - median(alone)) / load, 0.5, "of 1", "higher")


def write_trace(path: Path, work: Callable[[], object]) -> None:
    """A Chrome trace of the work (chrome://tracing, or ui.perfetto.dev)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    print(f"wrote {path}")


def overlap_ms(path: Path) -> tuple[float, float]:
    """Milliseconds that host-to-device copies ran in a trace, and how many of them beside kernels of other streams."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"] and e["dur"] > 20]
    streams = {e["args"]["stream"] for e in copies}
    kernels = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "kernel" and e["args"]["stream"] not in streams and "copy_pieces" not in e["name"]
    )
    shared = sum(max(0.0, min(end, e["ts"] + e["dur"]) - max(start, e["ts"])) for e in copies for start, end in kernels)
    return sum(e["dur"] for e in copies) / 1e3, shared / 1e3


if __name__ == "__main__":
    sys.exit(main())
