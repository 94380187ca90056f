"""What copies cost the model-runner thread: a step of requests, long copies, a load's first group, two loads at once.

Through the transfer engine, as in service. A step's saves are one job, whatever the requests are (`SchedulerHalf`); as
many jobs of a block each are measured too. Long copies are timed twice: while the launching thread rests, and while it
never leaves Python, as where launching is what an engine waits for: the submitting thread needs the GIL. Needs a
GPU; `--tiny` runs through all of it anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from integration.bench.copies import size
from integration.bench.copy_cases import Case, TimedPath, large_copy_ms, make_case, synchronize
from integration.report import Report, hardware
from kv_connector.config import Config
from kv_connector.transfer.costs.known import link_costs
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import CopyJob, Direction

REQUESTS = 64
STEP_SECONDS = 0.005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", default="16,64,256,2048", help="KiB")
    parser.add_argument("--regions", type=int, default=64, help="pieces of a block")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of a long copy")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="a few KiB, to see that it works")
    options = parser.parse_args()
    if options.tiny:
        options.pieces, options.regions, options.bytes, options.repeats = "1,4", 4, 1 << 18, 2
    if not (torch.cuda.is_available() or options.tiny):
        print("no GPU: there is nothing to submit to")
        return 0
    report = Report("submitting")
    print(f"{hardware()['gpu'] or hardware()['cpu']}: time of the launching thread, medians of {options.repeats}")
    for piece_bytes in (int(float(text) * 1024) for text in options.pieces.split(",")):
        case = make_case(piece_bytes, options.regions, options.bytes)
        try:
            measure_case(report, case, options.repeats)
        finally:
            case.close()
        report.write(options.json)
    return 0


def measure_case(report: Report, case: Case, repeats: int) -> None:
    """All of it for pieces of one size."""
    costs = link_costs(raw_form(case.layout), Config(host_memory=case.host.tensor.nbytes))
    path = TimedPath(make_path(raw_form(case.layout), case.host, Config(), costs))
    engine = TransferEngine(raw_form(case.layout), case.host, Config(), path, costs=costs)
    try:
        for direction in Direction:
            measure_long(report, case, engine, path, direction, repeats)
        for num_jobs in (1, REQUESTS):
            measure_step(report, case, engine, num_jobs, 3 * repeats)
        measure_first_group(report, case, engine, repeats)
        measure_beside_long(report, case, engine, 3 * repeats)
    finally:
        engine.close()


def measure_long(
    report: Report, case: Case, engine: TransferEngine, path: TimedPath, direction: Direction, repeats: int
) -> None:
    """A save, or a load in the background, of all blocks."""
    job = CopyJob(1, direction, case.device_ids, case.host_ids, "x" if direction is Direction.LOAD else None)

    def submit() -> None:
        if direction is Direction.LOAD:
            engine.submit_background_load([job], engine.mark())
        else:
            engine.submit_save([job])

    found: dict[str, list[float]] = {"resting": [], "in_python": []}
    launching: list[float] = []
    share: list[float] = []
    link = median(large_copy_ms(case, direction) for _ in range(repeats))
    for _ in range(repeats + 1):
        for name, times in found.items():
            synchronize()
            path.thread_ms, start = 0.0, engine.mark()
            begin = time.perf_counter()
            submit()
            launching.append(1e6 * (time.perf_counter() - begin))
            copy = engine._in_flight[-1]
            while copy.end is None and name == "resting":
                time.sleep(1e-4)
            compute_in_python(engine)
            assert copy.end is not None
            times.append(start.elapsed_time(copy.end))
            share.append(path.thread_ms / times[-1])
    label = f"{direction.value}_{label_of(case)}"
    ms = {name: median(times[1:]) for name, times in found.items()}
    print(f"{label:>14}: {case.num_bytes >> 20} MiB in line after {median(launching[2:]):.0f} us", end="; ")
    print(f"{ms['resting']:.1f} ms while the thread rests, {ms['in_python']:.1f} ms while it is in Python", end=", ")
    print(f"{link:.1f} ms at the link's rate; submitting takes {median(share[2::2]):.1%}", flush=True)
    row = {"part": "long", "case": label, "launching_us": launching[2:], "link_ms": link, "all_ms": found}
    report.rows.append(row | {"submitting_share": share[2::2]})
    report.claim(f"launching_thread_for_a_long_{label}", median(launching[2:]), 100.0, "us", "lower")
    report.claim(f"submitting_thread_share_of_a_long_{label}", median(share[2::2]), 0.05, "of 1", "lower")


def compute_in_python(engine: TransferEngine) -> None:
    """Steps that never leave Python, until the copies under way have been reported."""
    while not engine.poll():
        end = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < end:
            pass
        engine.catch_up()


def measure_step(report: Report, case: Case, engine: TransferEngine, num_jobs: int, repeats: int) -> None:
    """A step that saves a block of each request, in so many jobs, and takes in what has ended."""
    count = min(REQUESTS, len(case.device_ids))
    cuts = [count * i // num_jobs for i in range(num_jobs + 1)]
    times = []
    for _ in range(repeats + 1):
        parts = [slice(start, end) for start, end in pairwise(cuts)]
        jobs = [CopyJob(i, Direction.SAVE, case.device_ids[p], case.host_ids[p]) for i, p in enumerate(parts)]
        synchronize()
        begin = time.perf_counter()
        engine.submit_save(jobs)
        engine.catch_up()
        engine.poll()
        engine.pending_bytes(Direction.SAVE)
        times.append(1e6 * (time.perf_counter() - begin))
        engine.drain()
    label = f"{count}_requests_{label_of(case)}" + ("" if num_jobs == 1 else "_in_as_many_jobs")
    print(f"{label}: {median(times[1:]):.0f} us", flush=True)
    report.rows.append({"part": "step", "case": label, "jobs": num_jobs, "us": times[1:]})
    report.claim(f"launching_thread_for_{label}", median(times[1:]), 100.0, "us", "lower")


def measure_first_group(report: Report, case: Case, engine: TransferEngine, repeats: int) -> None:
    """How long after `submit_load` began a load's first layer group is there, beyond its bytes at the link's rate; and
    when the call returned."""
    if case.layout.device.type != "cuda":
        return
    link = median(large_copy_ms(case, Direction.LOAD) for _ in range(repeats))
    late: list[float] = []
    returned: list[float] = []
    for repeat in range(repeats + 1):
        synchronize()
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        begin = time.perf_counter()
        engine.submit_load([case.job(Direction.LOAD, repeat)])
        returned.append(1e6 * (time.perf_counter() - begin))
        assert engine._load is not None
        first, group = engine._load.events[0], engine._load.groups[0]
        engine.wait_all()
        synchronize()
        regions = case.layout.regions[group.start : group.stop]
        group_bytes = len(case.device_ids) * sum(region.piece_bytes for region in regions)
        late.append(1e3 * (start.elapsed_time(first) - link * group_bytes / case.num_bytes))
        engine.drain()
    print(
        f"first group of a load, {label_of(case)}: {median(late[1:]):.0f} us late, {group_bytes / 2**20:.1f} MiB; "
        f"submit_load returns after {median(returned[1:]):.0f} us",
        flush=True,
    )
    report.rows.append(
        {"part": "first_group", "case": label_of(case), "late_us": late[1:], "returned_us": returned[1:]}
    )
    report.claim(f"first_group_late_{label_of(case)}", median(late[1:]), 150.0, "us", "lower")


def measure_beside_long(report: Report, case: Case, engine: TransferEngine, repeats: int) -> None:
    """The launching thread's time for a small load that its step waits for, while all other blocks are being submitted
    as a load in the background."""
    few = min(32, len(case.device_ids) // 2)
    long = CopyJob(1, Direction.LOAD, case.device_ids[few:], case.host_ids[few:], "x")
    step = CopyJob(2, Direction.LOAD, case.device_ids[:few], case.host_ids[:few])
    times = []
    for repeat in range(repeats + 1):
        synchronize()
        engine.submit_background_load([long], engine.mark())
        time.sleep(1e-4 * (repeat % 10))
        begin = time.perf_counter()
        engine.submit_load([step])
        times.append(1e6 * (time.perf_counter() - begin))
        engine.wait_all()
        engine.drain()
    label = f"a_load_beside_a_long_one_{label_of(case)}"
    print(f"{label}: {median(times[1:]):.0f} us, at most {max(times[1:]):.0f}", flush=True)
    report.rows.append({"part": "beside_long", "case": label_of(case), "us": times[1:]})
    report.claim(f"launching_thread_for_{label}", median(times[1:]), 1000.0, "us", "lower")


def label_of(case: Case) -> str:
    """Such as `16KiB`."""
    return size(case.piece_bytes).replace(" ", "")


if __name__ == "__main__":
    sys.exit(main())
