"""How fast scattered blocks move over the link, beside one large pinned copy: our paths, the driver's batch, loops.

Blocks of `--regions` pieces, at random ids on both sides, between a GPU cache whose layers lie apart and the pinned
host pool. Every way moves the same bytes in the same run, and they are compared afterwards. Also: both directions at
once, and the share of the copy for which it keeps the submitting thread's processor. Needs a GPU; `--tiny` runs through
all of it anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from integration.bench.copy_cases import Case, Way, large_copy_ms, make_case, on_streams, ways_of
from integration.bench.regimes import rotated
from integration.report import Report, hardware
from kv_connector.types import Direction

DUPLEX_COPIES = 3
"""Each way. Each has a thread of its own, and one of them is told first: of so many copies that is little."""
GOALS = {1 << 10: 0.85, 4 << 10: 0.94, 16 << 10: 0.97, 64 << 10: 0.97, 256 << 10: 0.97, 2 << 20: 0.97}
"""Of the link, by piece."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one way in one direction: milliseconds on the device, and of the submitting thread, one entry a run."""

    ms: list[float]
    cpu_ms: list[float]

    def rate(self, num_bytes: int) -> float:
        """GB/s."""
        return num_bytes / median(self.ms) / 1e6


def main() -> int:
    options = parse_options()
    if not (torch.cuda.is_available() or options.tiny):
        print("no GPU: there is no link to measure")
        return 0
    report = Report("copies")
    print(f"{hardware()['gpu'] or hardware()['cpu']}, {options.bytes >> 20} MiB a run, {options.repeats} runs, medians")
    print(
        f"{'piece':>9} {'way':>8} {'to device':>11} {'of link':>8} {'cpu':>6} {'to host':>11} {'of link':>8} {'cpu':>6}"
    )
    for piece_bytes in (int(float(text) * 1024) for text in options.pieces.split(",")):
        case = make_case(piece_bytes, options.regions, options.bytes)
        try:
            measure_case(report, case, options)
        finally:
            case.close()
        report.write(options.json)
    draw(options.png, report)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--pieces", default="1,4,16,64,256,2048", help="KiB")
    parser.add_argument("--regions", type=int, default=64, help="pieces of a block")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="moved in one run: 8k tokens of an 8B model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ways", default="ours,runs,direct,staged,vllm,loop")
    parser.add_argument("--tiny", action="store_true", help="a few KiB, to see that it works")
    options = parser.parse_args()
    if options.tiny:
        options.pieces, options.regions, options.bytes, options.repeats = "1,4", 4, 1 << 18, 2
    return options


def measure_case(report: Report, case: Case, options: argparse.Namespace) -> None:
    """All ways in turn in every run, in an order that rotates, then what only ours has."""
    ways = ways_of(case, options.ways.split(","))
    sides = ["link", *ways]
    timings = {(name, direction): Timing([], []) for name in sides for direction in Direction}
    for turn in range(options.repeats + 1):
        for direction in Direction:
            for name in rotated(sides, turn):
                timing = timings[name, direction]
                if name == "link":
                    timing.ms.append(large_copy_ms(case, direction))
                else:
                    run_once(case, ways[name], direction, timing)
    duplex = measure_duplex(case, ways["ours"], options.repeats)
    for timing in (*timings.values(), *duplex):
        del timing.ms[0], timing.cpu_ms[:1]  # the first run compiles and touches memory
    case.verify(ways)
    report_case(report, case, timings, duplex)
    for way in ways.values():
        way.close()


def run_once(case: Case, way: Way, direction: Direction, timing: Timing) -> None:
    """One copy of all bytes; `way.num_bytes` may be less for what is slow."""

    def submit() -> None:
        begin = time.thread_time()
        way.copy(direction)
        timing.cpu_ms.append(1e3 * (time.thread_time() - begin))

    timing.ms.append(on_streams(case, [submit]) * case.num_bytes / way.num_bytes)


def measure_duplex(case: Case, way: Way, repeats: int) -> tuple[Timing, Timing]:
    """Both directions at once: ours, and two large copies; some of each, one behind the other, as in service."""
    ours, link = Timing([], []), Timing([], [])
    sides = {"link": (link, case.large_copy), "ours": (ours, way.copy)}
    for turn in range(repeats + 1):
        for timing, copy in (sides[name] for name in rotated(list(sides), turn)):
            both = [partial(copy, direction) for direction in Direction]
            timing.ms.append(on_streams(case, both * DUPLEX_COPIES, num_streams=len(both)))
    return ours, link


def report_case(
    report: Report, case: Case, timings: dict[tuple[str, Direction], Timing], duplex: tuple[Timing, Timing]
) -> None:
    """Print a line for each way, and claim what ours reached."""
    piece = case.piece_bytes
    for name in dict.fromkeys(name for name, _ in timings):
        line = f"{size(piece):>9} {name:>8}"
        for direction in Direction:
            timing, link = timings[name, direction], timings["link", direction]
            share = median(link.ms) / median(timing.ms)
            cpu = median(timing.cpu_ms) / median(timing.ms) if timing.cpu_ms else 0.0
            line += f" {timing.rate(case.num_bytes):6.1f} GB/s {share:8.3f} {cpu:6.1%}"
            row = {"piece_bytes": piece, "way": name, "direction": direction.value, "share_of_link": share}
            row |= {"cpu_share": cpu, "gigabytes_per_second": timing.rate(case.num_bytes), "all_ms": timing.ms}
            report.rows.append(row)
            if name == "ours" and piece in GOALS:
                label = f"{direction.value}_{size(piece).replace(' ', '')}"
                report.claim(f"share_of_link_{label}", share, GOALS[piece], "of 1", "higher")
                if piece >= 16 << 10:
                    report.claim(f"submitting_thread_share_{label}", cpu, 0.05, "of 1", "lower")
        print(line, flush=True)
    ours, link = duplex
    share = median(link.ms) / median(ours.ms)
    report.rows.append({"piece_bytes": piece, "part": "duplex", "all_ms": ours.ms, "link_ms": link.ms})
    report.claim(f"share_of_duplex_{size(piece).replace(' ', '')}", share, 0.95, "of 1", "higher")


def size(num_bytes: int) -> str:
    """Such as `16 KiB`."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 1024:g} KiB"


def draw(path: Path | None, report: Report) -> None:
    """Write a PNG: share of the link over the size of a piece, a line for each way. Needs matplotlib."""
    rows = [row for row in report.rows if "way" in row]
    if path is None or not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for axes, direction in zip(panels, Direction, strict=True):
        for name in dict.fromkeys(row["way"] for row in rows if row["way"] != "link"):
            own = [row for row in rows if row["way"] == name and row["direction"] == direction.value]
            axes.plot(
                [row["piece_bytes"] / 1024 for row in own],
                [row["share_of_link"] for row in own],
                marker="o",
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("piece, KiB")
        axes.set_title("to the device" if direction is Direction.LOAD else "to the host")
        axes.grid(True, alpha=0.2)
    panels[0].set_ylabel("share of one large pinned copy")
    panels[0].set_ylim(0, 1.05)
    panels[1].legend()
    figure.suptitle(f"scattered blocks over the link, {hardware()['gpu']}")
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
