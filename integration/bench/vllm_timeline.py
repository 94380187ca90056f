"""What the GPU did while an engine served: how much of the time kernels ran, and how long small copies had to wait.

From a trace of torch's profiler. A model uploads a few small arrays in front of every step, and downloads its tokens
behind it; where those queue behind large copies on the same link, the step waits, and no count of kernels or of the
connector's calls tells. Nor does it tell that kernels follow one another more slowly than before, or for how long the
GPU rests before a load and behind it.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

SMALL_BYTES = 1 << 18
"""A copy of the model's own has less: arrays of a step; a block that is loaded or saved has more."""
COMPUTES_US = 1000.0
"""Kernels between two replays of the decoding step's graph that take longer compute a prompt; less is sampling."""
_WAYS = {"HtoD": ("upload", "load"), "DtoH": ("download", "save")}
"""How the profiler marks copies, and what the small and the large ones are called here."""


def timeline(run: Callable[[], object], kept: Path | None = None) -> dict[str, float]:
    """Profile `run` on this process's device and summarize it; empty without a GPU. See `summarize`.

    `kept`: where the trace is written, gzip of the format that chrome://tracing and Perfetto read.
    """
    if not torch.cuda.is_available():
        return {}
    # What PyTorch does on the CPU is left out: to record it slows the thread that launches the model.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        if kept is not None:
            kept.write_bytes(gzip.compress(path.read_bytes(), 6))
        return summarize(json.loads(path.read_text())["traceEvents"])


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Shares of the traced time, and mean, 90th percentile and most of what small copies took, in microseconds.

    `upload_us`, `download_us`: from the moment at which the copy could begin (it was called, and what is in front of it
    in its stream has ended) to its end. `upload_share`, `download_share`: the sum of these over the traced time.
    `kernel_share`, `load_share`, `save_share`: the time in which any kernel, or any large copy of that way, ran. Of the
    CUDA graph that ran most often see `_of_graph`, and of what ran between its replays `_of_prompts`.
    """
    calls: dict[int, float] = {}  # when an operation was called, by the trace's correlation
    done: list[tuple[float, float, str, dict[str, Any]]] = []  # (begin, end, kind, arguments) of what the GPU did
    for event in events:
        kind, found = event.get("cat", ""), event.get("args", {})
        if kind in ("cuda_runtime", "cuda_driver") and "correlation" in found:
            calls[found["correlation"]] = float(event["ts"])
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            done.append((float(event["ts"]), float(event["ts"]) + float(event["dur"]), kind, found | event))
    done.sort(key=lambda item: item[0])
    if not done:
        return {}
    last_end: dict[Any, float] = {}
    waits: dict[str, list[float]] = {small: [] for small, _ in _WAYS.values()}
    running: dict[str, list[tuple[float, float]]] = {"kernel": []} | {large: [] for _, large in _WAYS.values()}
    for begin, end, kind, found in done:
        way = next((names for mark, names in _WAYS.items() if mark in found["name"]), None)
        if kind == "kernel":
            running["kernel"].append((begin, end))
        elif kind == "gpu_memcpy" and way is not None:
            if found.get("bytes", 0) < SMALL_BYTES:
                possible = max(last_end.get(found["stream"], 0.0), calls.get(found.get("correlation", -1), begin))
                waits[way[0]].append(end - min(possible, begin))
            else:
                running[way[1]].append((begin, end))
        last_end[found["stream"]] = max(end, last_end.get(found["stream"], 0.0))
    wall = max(end for _, end, _, _ in done) - done[0][0]
    shares = {f"{name}_share": covered(intervals) / wall for name, intervals in running.items()}
    kernels = [found | {"begin": begin, "end": end} for begin, end, kind, found in done if kind == "kernel"]
    own = _replays(kernels)
    told = _of_graph(own, kernels) | _of_prompts(own, running["kernel"], running["load"]) if own else {}
    return {"traced_ms": wall / 1e3} | shares | _of_waits(waits, wall) | told


def _of_waits(waits: Mapping[str, Sequence[float]], wall: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, times in waits.items():
        found |= {
            f"{name}s": float(len(times)),
            f"{name}_share": sum(times) / wall,
            f"{name}_us": mean(times) if times else 0.0,
            f"{name}_p90_us": float(np.percentile(times, 90)) if times else 0.0,
            f"{name}_most_us": max(times, default=0.0),
        }
    return found


def _replays(kernels: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Kernels of each replay of the CUDA graph that ran most often, as decoding does; none where no graph ran."""
    replays: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for kernel in kernels:
        if kernel.get("graph id"):
            replays[kernel["graph id"], kernel["correlation"]].append(kernel)
    if not replays:
        return []
    ((often, _),) = Counter(graph for graph, _ in replays).most_common(1)
    return sorted((run for (graph, _), run in replays.items() if graph == often), key=lambda run: run[0]["begin"])


def _of_graph(own: Sequence[Sequence[Mapping[str, Any]]], kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`graph_first_us` and `graph_last_us`: how long a replay took without attention, whose time follows from the
    requests, in the median of the first and the last tenth; `beside_us`: how long kernels of other streams ran beside
    those of its stream."""
    rest = [run[-1]["end"] - run[0]["begin"] - sum(_until_next(run)) for run in own]
    tenth = -(-len(rest) // 10)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # of its stream, and of the others
    for kernel in kernels:
        spans[kernel["stream"] == own[0][0]["stream"]].append((kernel["begin"], kernel["end"]))
    beside = sum(map(covered, spans.values())) - covered(sorted(spans[True] + spans[False]))
    ends = {"graph_first_us": median(rest[:tenth]), "graph_last_us": median(rest[-tenth:])}
    return {"graph_replays": float(len(own)), **ends, "beside_us": beside}


def _of_prompts(
    own: Sequence[Sequence[Mapping[str, Any]]],
    kernels: Sequence[tuple[float, float]],
    loads: Sequence[tuple[float, float]],
) -> dict[str, float]:
    """Of the times between two replays in which a prompt was computed, medians: `prompt_us`, all of it,
    `prompt_idle_us`, without a kernel or a load, and of those with a load by DMA `load_begins_us`, from the end of the
    replay before it, `load_us`, and `load_left_us`, from its end to the next replay. `kernels` and `loads` are sorted
    by their begin."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for before, after in pairwise(own):
        begin, end = before[-1]["end"], after[0]["begin"]
        computed, loaded = _within(kernels, begin, end), _within(loads, begin, end)
        if covered(computed) < COMPUTES_US:
            continue
        times["prompt_us"].append(end - begin)
        times["prompt_idle_us"].append(end - begin - covered(sorted(computed + loaded)))
        if loaded:
            last = max(until for _, until in loaded)
            times["load_begins_us"].append(loaded[0][0] - begin)
            times["load_us"].append(last - loaded[0][0])
            times["load_left_us"].append(end - last)
    counts = {"prompts": float(len(times["prompt_us"])), "prompts_with_loads": float(len(times["load_us"]))}
    return counts | {name: median(found) for name, found in times.items() if found}


def _within(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Those that begin there, cut off at the end."""
    first, last = (bisect_left(intervals, (moment,)) for moment in (begin, end))
    return [(since, min(until, end)) for since, until in intervals[first:last]]


def _until_next(run: Sequence[Mapping[str, Any]]) -> Iterable[float]:
    """From the begin of each kernel of attention to that of the next."""
    return (after["begin"] - one["begin"] for one, after in pairwise(run) if "flash" in one["name"].lower())


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals that are sorted by their begin."""
    total, reached = 0.0, float("-inf")
    for begin, end in intervals:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
