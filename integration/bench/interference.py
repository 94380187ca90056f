"""What copies cost the model, and the model the copies: products, decoding, prefill, and small copies beside them.

Copies go back and forth through the transfer engine, as in service, while the main stream computes; every measurement
without copies alternates with one beside them. Small copies are such as engines make in front of every step and behind
it, of what it reads and of what it sampled: beside loads or saves of ours they share the copy engine of that direction,
as they do with one large copy, which stands for what gives no turns (`cuda/turns.py`). Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch

from integration.bench.copy_cases import Case, Way, large_copy_ms, make_case, ways_of
from integration.bench.device_time import device_ms
from integration.bench.regimes import rotated
from integration.report import Report, hardware
from kv_connector.config import Config
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.types import CopyJob, Direction

LAYERS, HIDDEN, INTERMEDIATE, KEYS = 32, 4096, 14336, 1024  # Llama-3.1-8B's
PRODUCT, PRODUCTS = 8192, 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", default="16,64,2048", help="KiB")
    parser.add_argument("--regions", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=9 << 28, help="of one copy: as long as the products take")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ways", default="ours,runs,direct,batch8,batch64")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: there is no model to disturb")
        return 0
    report = Report("interference")
    print(f"{hardware()['gpu']}: copies of {options.bytes >> 20} MiB beside the model, medians of {options.repeats}")
    decode, prefill = Model(32), Model(4096)
    for piece_bytes in (int(float(text) * 1024) for text in options.pieces.split(",")):
        case = make_case(piece_bytes, options.regions, options.bytes)
        try:
            for name, way in ways_of(case, options.ways.split(",")).items():
                measure_products(report, case, name, way, options.repeats)
                way.close()
            measure_small_copies(report, case, options.repeats)
            measure_model(report, case, "decode", decode.replay, options.repeats)
            measure_model(report, case, "prefill", prefill.forward, options.repeats)
        finally:
            case.close()
        report.write(options.json)
    return 0


class Model:
    """The products of an 8B transformer for so many tokens, with weights of its own for each layer."""

    def __init__(self, num_tokens: int) -> None:
        shapes = [(HIDDEN + 2 * KEYS, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
        self._layers = [
            [torch.randn(shape, dtype=torch.bfloat16, device="cuda") / shape[1] ** 0.5 for shape in shapes]
            for _ in range(LAYERS)
        ]
        self._hidden = torch.randn((num_tokens, HIDDEN), dtype=torch.bfloat16, device="cuda")
        self.forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.forward()

    def forward(self) -> None:
        """Launch every product."""
        hidden = self._hidden
        for qkv, output, gate_up, down in self._layers:
            attended = (hidden @ qkv.T)[:, :HIDDEN]
            hidden = hidden + attended @ output.T
            gate, up = (hidden @ gate_up.T).chunk(2, dim=1)
            hidden = torch.nn.functional.rms_norm(hidden + (torch.nn.functional.silu(gate) * up) @ down.T, (HIDDEN,))

    def replay(self) -> None:
        """All of them as one graph, sixteen times: a second or so of decoding has none of the launching thread."""
        for _ in range(16):
            self._graph.replay()


def measure_products(report: Report, case: Case, name: str, way: Way, repeats: int) -> None:
    """Thirty large products on the main stream, and a copy that begins with them on another."""
    left = torch.randn((PRODUCT, PRODUCT), dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, left)

    for direction in Direction:
        alone: list[float] = []
        beside: list[float] = []
        copying: list[float] = []
        link: list[float] = []
        for _ in range(repeats + 1):
            # A large copy in front of both: each begins on a GPU that has rested as long.
            large_copy_ms(case, direction)
            alone.append(device_ms(products))
            link.append(large_copy_ms(case, direction))
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            products()  # launched first: the copy is not to run ahead of them
            end_products = torch.cuda.Event(enable_timing=True)
            end_products.record()
            side.wait_event(start)
            with torch.cuda.stream(side):
                begin.record()
                way.copy(direction)
                end.record()
            torch.cuda.synchronize()
            beside.append(start.elapsed_time(end_products))
            copying.append(begin.elapsed_time(end) * case.num_bytes / way.num_bytes)
        slower = median(beside[1:]) / median(alone[1:]) - 1
        share = median(link[1:]) / median(copying[1:])
        label = f"{case.piece_bytes >> 10}KiB_{direction.value}"
        print(f"{label:>14} {name:>7}: products {slower:+.1%}, copy at {share:.3f} of the link", flush=True)
        row = {"part": "products", "way": name, "case": label, "alone_ms": alone[1:], "beside_ms": beside[1:]}
        report.rows.append(row | {"copy_ms": copying[1:], "link_ms": link[1:]})
        if name == "ours":
            report.claim(f"products_slower_{label}", slower, 0.02, "of 1", "lower")
            report.claim(f"share_of_link_beside_products_{label}", share, 0.95, "of 1", "higher")


def measure_model(report: Report, case: Case, name: str, work: Callable[[], None], repeats: int) -> None:
    """A loop of the model with and without loads, saves, and both, through the transfer engine all the time."""
    engine = TransferEngine(raw_form(case.layout), case.host, Config(staging_memory="256MiB"))
    found: dict[str, list[float]] = {"alone": [], "loads": [], "saves": [], "loads and saves": []}
    for repeat in range(repeats + 1):
        for number, beside in enumerate(rotated(list(found), repeat)):
            with copying(engine, case, beside, 4 * repeat + number):
                found[beside].append(device_ms(work))
    engine.close()
    label = f"{case.piece_bytes >> 10}KiB"
    ms = {beside: median(times[1:]) for beside, times in found.items()}
    slower = {beside: ms[beside] / ms["alone"] - 1 for beside in ms if beside != "alone"}
    print(
        f"{label:>14} {name}: {ms['alone']:.1f} ms alone, " + ", ".join(f"{v:+.1%} by {k}" for k, v in slower.items())
    )
    report.rows.append({"part": name, "case": label, "ms": {beside: times[1:] for beside, times in found.items()}})
    for beside, value in slower.items():
        report.claim(f"{name}_slower_by_{beside.replace(' ', '_')}_{label}", value, 0.02, "of 1", "lower")


@contextmanager
def copying(engine: TransferEngine, case: Case, kind: str, number: int) -> Iterator[None]:
    """Loads and saves of disjoint blocks are in line, enough for what follows, and end with it."""
    half = len(case.device_ids) // 2
    if "loads" in kind:
        part = case.device_ids[:half], case.host_ids[:half]
        engine.submit_background_load([CopyJob(2 * number, Direction.LOAD, *part, "x")], engine.mark())
    if "saves" in kind:
        engine.submit_save([CopyJob(2 * number + 1, Direction.SAVE, case.device_ids[half:], case.host_ids[half:])])
    try:
        yield
    finally:
        engine.drain()


def measure_small_copies(report: Report, case: Case, repeats: int) -> None:
    """Small copies of the main stream one after the other, alone, beside one large copy, and beside loads or saves of
    ours, in the same direction. Each that began beside it counts, also the one that ends with it."""
    here = torch.zeros(1024, dtype=torch.int32, pin_memory=True)
    there = torch.zeros(1024, dtype=torch.int32, device="cuda")
    engine = TransferEngine(raw_form(case.layout), case.host, Config(staging_memory="256MiB"))
    side, kinds = torch.cuda.Stream(), ["alone", "large copy", "ours"]
    for direction in Direction:
        to, by = (there, here) if direction is Direction.LOAD else (here, there)
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(repeats + 1):
            for number, kind in enumerate(rotated(kinds, repeat)):
                torch.cuda.synchronize()
                is_over = begin_long_copy(case, engine, direction, kind, side, len(kinds) * repeat + number)
                times = []
                while len(times) < 40:
                    begin = time.perf_counter()
                    to.copy_(by, non_blocking=True)
                    torch.cuda.current_stream().synchronize()
                    times.append(1e6 * (time.perf_counter() - begin))
                    if is_over():
                        break
                engine.drain()
                found[kind] += times if repeat else []
        label = f"{case.piece_bytes >> 10}KiB_{direction.value}"
        print(f"{label:>14} small copies: " + ", ".join(f"{k} {describe(v)}" for k, v in found.items()), flush=True)
        report.rows.append({"part": "small copies", "case": label, "us": found})
    engine.close()


def begin_long_copy(
    case: Case, engine: TransferEngine, direction: Direction, kind: str, side: torch.cuda.Stream, number: int
) -> Callable[[], bool]:
    """Returns what says whether it is over; nothing is copied `alone`, which is never over."""
    if kind == "alone":
        return lambda: False
    if kind == "ours":
        job = case.job(direction, number)
        if direction is Direction.LOAD:
            engine.submit_background_load([job], engine.mark())
        else:
            engine.submit_save([job])
        return lambda: bool(engine.poll())
    with torch.cuda.stream(side):
        case.large_copy(direction)
        end = torch.cuda.Event()
        end.record()
    return end.query


def describe(times: list[float]) -> str:
    """Median, 90th percentile, most."""
    return f"{median(times):.0f} / {float(np.percentile(times, 90)):.0f} / {max(times):.0f} us"


if __name__ == "__main__":
    sys.exit(main())
