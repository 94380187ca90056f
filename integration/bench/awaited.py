"""A load that a step waits for, layer group by layer group, by path: when each group is submitted and when it is there.

Through the transfer engine, as in service, into a cache whose layers are allocations of their own, as engines have
them. Either the layers wait for their groups while the launching thread is in Python between one and the next, as where
a forward pass is launched kernel by kernel, and the step is light or not; or all of a light step's load is waited for
up front, as where the pass is one CUDA graph. All paths take turns, in an order that rotates. Needs a GPU; `--tiny`
runs through all of it anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from integration.bench.copies import size
from integration.bench.copy_cases import Case, TimedPath, large_copy_ms, make_case, synchronize
from integration.bench.regimes import rotated
from integration.report import Report, hardware
from kv_connector.config import Config, PathName
from kv_connector.transfer.costs.known import link_costs
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import Direction

LAUNCHING_SHARE = 0.5  # of the time that a load takes at the link's rate, for the layers that wait for it,
LAUNCHING_MS = 10.0  # and at most
OVER_LINK = 0.95
LAYERS, LIGHT_LAYERS, UP_FRONT = "by layer", "by layer in a light step", "up front"
WAITS = LAYERS, LIGHT_LAYERS, UP_FRONT


class Loader:
    """A transfer engine with one path."""

    def __init__(self, case: Case, name: PathName) -> None:
        form, config = raw_form(case.layout), Config(copy_path=name, host_memory=case.host.tensor.nbytes)
        costs = link_costs(form, config)
        self._case = case
        self._path = TimedPath(make_path(form, case.host, config, costs))
        self._engine = TransferEngine(form, case.host, config, self._path, costs=costs)
        self._lane = make_lane(case.layout.device, Priority.MEASURE, timing=True)

    def load(self, job_id: int, waits: str, launching_ms: float) -> dict[str, Any]:
        """All blocks; milliseconds until they are there, and of each group from the load's begin on: bytes, when it was
        submitted, from and to, and when it was there."""
        case, engine = self._case, self._engine
        self._path.submitted.clear()
        synchronize()
        start, begin = self._lane.mark(), time.perf_counter()
        engine.submit_load([case.job(Direction.LOAD, job_id)], is_urgent=waits != LAYERS)
        load = engine._load
        assert load is not None
        if waits == UP_FRONT:
            engine.wait_all()
        else:
            self._launch(launching_ms)
        end = self._lane.mark()
        synchronize()
        there = [start.elapsed_time(event) for event in load.events]
        submitted = [tuple(1e3 * (second - begin) for second in seconds) for seconds in self._path.submitted]
        groups = list(zip(load.part_bytes, *zip(*submitted, strict=True), there, strict=True))
        result = {"ms": start.elapsed_time(end), "groups": groups}
        engine.drain()
        return result

    def _launch(self, launching_ms: float) -> None:
        names = self._case.layout.layer_names
        for name in names:
            until = time.perf_counter() + 1e-3 * launching_ms / len(names)
            while time.perf_counter() < until:
                pass
            self._engine.wait_layer(name)

    def close(self) -> None:
        """Its path is closed, too."""
        self._engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", default="64,128,256", help="KiB")
    parser.add_argument("--regions", type=int, default=64, help="pieces of a block, a layer each")
    parser.add_argument("--bytes", default="256,1024,4096", help="MiB of a load")
    parser.add_argument("--paths", default="auto,direct,runs,staged")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a few KiB, to see that it works")
    options = parser.parse_args()
    if options.tiny:
        options.pieces, options.regions, options.bytes, options.repeats = "1,4", 4, "0.25", 2
        options.paths = "auto"
    if not (torch.cuda.is_available() or options.tiny):
        print("no GPU: there is nothing to load to")
        return 0
    report, names = Report("awaited"), [PathName(name) for name in options.paths.split(",")]
    print(f"{hardware()['gpu'] or hardware()['cpu']}: loads that a step waits for, medians of {options.repeats}")
    for mebibytes in options.bytes.split(","):
        for kibibytes in options.pieces.split(","):
            num_bytes, piece_bytes = int(float(mebibytes) * 2**20), int(float(kibibytes) * 2**10)
            case = make_case(piece_bytes, options.regions, num_bytes, apart=True)
            try:
                measure_case(report, case, names, options.repeats)
            finally:
                case.close()
            report.write(options.json)
    return 0


def measure_case(report: Report, case: Case, names: Sequence[PathName], repeats: int) -> None:
    """All paths and ways to wait, for pieces of one size and so many bytes."""
    link = median(large_copy_ms(case, Direction.LOAD) for _ in range(repeats))
    loaders = {name.value: Loader(case, name) for name in names}
    launching_ms = min(LAUNCHING_MS, LAUNCHING_SHARE * link)
    label = f"{size(case.num_bytes)} in pieces of {size(case.piece_bytes)}"
    try:
        for waits in WAITS:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in loaders}
            for turn in range(repeats + 1):
                for name in rotated(list(loaders), turn):
                    found[name].append(loaders[name].load(turn, waits, launching_ms))
            for name, loads in found.items():
                report_loads(report, case, waits, name, loads[1:], link, label)
    finally:
        for loader in loaders.values():
            loader.close()


def report_loads(
    report: Report, case: Case, waits: str, name: str, loads: Sequence[dict[str, Any]], link: float, label: str
) -> None:
    """A row of one path, with the groups of its median load, and a claim on what is chosen."""
    middle = sorted(loads, key=lambda load: load["ms"])[len(loads) // 2]
    first = median(load["groups"][0][-1] for load in loads)
    share = link / max(1e-9, middle["ms"])
    print(f"{label}, waited for {waits}, {name}: {middle['ms']:.2f} ms, {share:.3f} of the link, first {first:.2f} ms")
    row = {"waits": waits, "path": name, "piece_bytes": case.piece_bytes, "num_bytes": case.num_bytes}
    row |= {"all_ms": [load["ms"] for load in loads], "link_ms": link, "first_ms": first, "groups": middle["groups"]}
    report.rows.append(row)
    if name == PathName.AUTO:
        claim = f"share_of_link_{label}_waited_for_{waits}".replace(" ", "_")
        report.claim(claim, share, OVER_LINK, "of 1", "higher")


if __name__ == "__main__":
    sys.exit(main())
