"""What each policy of a host tier hits on real and synthetic traces, at host sizes from a fiftieth of a trace upwards.

Every policy serves the same requests behind the same device cache. A figure is the host hits as a share of all blocks
that are asked for, in per cent; sizes are shares of a trace's distinct blocks. Ours run through the package's own index
classes (`kv_connector/replay/`), the others are models of their own (`policy_baselines.py`). `--trace` takes files in
the format of Mooncake's traces, which github.com/kvcache-ai/Mooncake has in its folder FAST25-release/traces; without
one only the synthetic traces run, which are the same every time. No time is measured: any machine gives the same
figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from integration.bench.policy_baselines import GDSF, LRU, S3FIFO, SLRU, Belady, HostCache, PrefixCache
from integration.bench.policy_traces import synthetic_traces
from integration.report import Report
from kv_connector.config import WritePolicy
from kv_connector.replay import POLICIES, Trace, read_trace

SIZES = (2.0, 5.0, 10.0, 15.0, 25.0, 40.0, 60.0)
"""Host blocks, in per cent of a trace's distinct blocks."""
RIVALS: dict[str, type[LRU]] = {"LRU": LRU, "SLRU": SLRU, "S3-FIFO": S3FIFO, "GDSF": GDSF}
BOUND = "Belady"
DEFAULT = WritePolicy.ADAPTIVE.value
"""The column of which something is claimed."""
SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE.value
OURS = {f"{name} (threshold 2)" if name == SELECTIVE else name: make for name, make in POLICIES.items()}
"""By the name of a column."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.bench.policies", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="traces in Mooncake's format")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, metavar="PERCENT", help="of distinct blocks")
    parser.add_argument("--share", type=float, default=1.0, help="of each trace that is replayed, from its beginning")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="hits over host size, a panel for each trace")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 1 or not all(0 < size <= 100 for size in options.sizes):
        parser.error("--share is above 0 and at most 1, --sizes are above 0 and at most 100")
    report = Report("policies", arguments=list(sys.argv[1:] if arguments is None else arguments))
    for trace in [*(read_trace(path, options.share) for path in options.trace), *synthetic_traces(options.share)]:
        report.rows += replay_trace(trace, options.sizes)
    report.rows.sort(key=lambda row: row["margin"])
    print_rows(report.rows)
    claim(report)
    draw(options.picture, report.rows)
    report.write(options.json)
    return 0


def replay_trace(trace: Trace, sizes: Sequence[float]) -> list[Row]:
    """A row for each size, with what each policy hits and how far our default is ahead of the best rival, in points."""
    start = time.process_time()
    rows = [measure(trace, size) for size in sizes]
    device_hits = 100 * sum(trace.device_hits) / trace.num_blocks
    seconds = time.process_time() - start
    print(
        f"{trace.name}: {len(trace.requests):,} requests for {trace.num_blocks:,} blocks, {trace.num_distinct:,} "
        f"distinct; a device of {trace.device_blocks:,} hits {device_hits:.1f} %; {seconds:.0f} s of CPU",
        flush=True,
    )
    return rows


def measure(trace: Trace, size: float) -> Row:
    """One row: every policy on a host of `size` per cent of the trace's distinct blocks, one block at least."""
    capacity = max(1, int(size * trace.num_distinct / 100))
    hosts: dict[str, Callable[[], HostCache]] = {
        **{name: partial(rival, policy, capacity) for name, policy in RIVALS.items()},
        **{name: partial(make, capacity) for name, make in OURS.items()},
        BOUND: partial(Belady, capacity, trace.requests, trace.device_hits),
    }
    hits = {name: 100 * num_hits(trace, make()) / trace.num_blocks for name, make in hosts.items()}
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "distinct_blocks": trace.num_distinct,
        "device_blocks": trace.device_blocks,
        "device_hits_percent": 100 * sum(trace.device_hits) / trace.num_blocks,
        "host_percent": size,
        "host_blocks": capacity,
        "host_hits_percent": hits,
        "default": DEFAULT,
        "margin": hits[DEFAULT] - max(hits[name] for name in RIVALS),
    }


def rival(policy: type[LRU], capacity: int) -> HostCache:
    """A host of so many blocks under a policy that we compare with."""
    return PrefixCache(policy(capacity))


def num_hits(trace: Trace, host: HostCache) -> int:
    """Blocks that a host finds, over all requests of a trace."""
    served = zip(trace.requests, trace.device_hits, strict=True)
    return sum(host.request(hashes, first, now) for now, (hashes, first) in enumerate(served))


def print_rows(rows: Sequence[Row]) -> None:
    """A table, the row in which our default is furthest behind first."""
    names = list(rows[0]["host_hits_percent"])
    print("\nhost hits, per cent of all blocks; margin: our default less the best of " + ", ".join(RIVALS))
    print(f"{'trace':24}{'host %':>8}{'margin':>9}" + "".join(f"{name:>{max(len(name), 6) + 2}}" for name in names))
    for row in rows:
        hits = row["host_hits_percent"]
        cells = "".join(f"{hits[name]:{max(len(name), 6) + 2}.2f}" for name in names)
        print(f"{row['trace'][:23]:24}{row['host_percent']:8g}{row['margin']:+9.2f}{cells}")
    print()


def claim(report: Report) -> None:
    """What was asked for, of the rows with the worst first."""
    report.claim("default_to_best_rival_in_the_worst_row", report.rows[0]["margin"], -0.5, "points", "higher")
    ahead = [row["host_hits_percent"][DEFAULT] - row["host_hits_percent"]["LRU"] for row in report.rows]
    report.claim("default_to_lru_on_average", mean(ahead), 2.0, "points", "higher")


def draw(path: Path | None, rows: Sequence[Row]) -> None:
    """Write a PNG: hits over host size, a panel for each trace, a line for each policy. Needs matplotlib."""
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = sorted({row["trace"] for row in rows})
    figure, grid = pyplot.subplots(
        1, len(traces), figsize=(4.2 * len(traces), 4.5), layout="constrained", squeeze=False
    )
    for axes, trace in zip(grid[0], traces, strict=True):
        own = sorted((row for row in rows if row["trace"] == trace), key=lambda row: row["host_percent"])
        for name in own[0]["host_hits_percent"]:
            style = {"linewidth": 2.5} if name in OURS else {"linewidth": 1.2, "linestyle": "--"}
            hits = [row["host_hits_percent"][name] for row in own]
            axes.plot([row["host_percent"] for row in own], hits, marker="o", markersize=3, label=name, **style)
        axes.set_xscale("log")
        axes.set_xticks([row["host_percent"] for row in own], [f"{row['host_percent']:g}" for row in own])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("host, % of distinct blocks")
        axes.set_title(trace)
        axes.grid(True, alpha=0.2)
    grid[0][0].set_ylabel("host hits, % of all blocks")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize=8)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
