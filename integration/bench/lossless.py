"""Coded host blocks beside raw ones: the kernels, whole loads and saves, what they cost products, and what fits.

Every part runs by itself, so that one that fails leaves the others. Blocks are those of an 8B model, 64 pieces of
32 KiB, filled with SmolLM2's own caches (`integration.models.smollm2_caches` writes them); loads and saves go through
a ring of buffers in device memory as those of the staged path do, for both forms alike. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from kv_connector.triton_kernels import code_pieces, coded_rows
from kv_connector.triton_kernels.copy_pieces import RegionTable, gather_pieces, scatter_pieces

from integration.models import smollm2_caches
from integration.report import Report, hardware
from kv_connector.transfer.cuda.copier import driver_copier
from kv_connector.types import Direction

REGIONS, PIECE = 64, 32 << 10  # 16 tokens of Llama-3.1-8B
PRODUCT, PRODUCTS = 8192, 40
NUM_BUFFERS, BUFFER = 3, (128 << 20) // 3  # as the staged path has them
GB = 1e9
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Of which form, and how many programs they are launched with."""

    programs: int
    coded: bool = True

    def __str__(self) -> str:
        return f"{'coded' if self.coded else 'raw'}, {self.programs} programs"


RAW, CODED = Kernel(16, coded=False), Kernel(16)
"""As the engine launches them."""
OTHERS = Kernel(4), Kernel(8), Kernel(32), Kernel(132)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--caches", type=Path, default=smollm2_caches.DEFAULT)
    parser.add_argument("--bytes", type=int, default=1 << 31, help="raw bytes of a whole load or save")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140, help="no part begins later")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return 0
    report = Report("lossless")
    print(f"{hardware()['gpu']}: medians of {options.repeats}")
    begin, failed = time.perf_counter(), 0
    bench = Bench(report, options)
    for part in (bench.exactness, bench.shares, bench.kernels, bench.whole, bench.products, bench.pieces):
        elapsed = time.perf_counter() - begin
        print(f"\n== {part.__name__}, after {elapsed:.0f} s", flush=True)
        if elapsed > options.seconds:
            print("left out: no time")
            continue
        try:
            part()
        except Exception:  # noqa: BLE001 - the other parts are worth having
            failed += 1
            traceback.print_exc(file=sys.stdout)
            report.rows.append({"part": part.__name__, "failed": traceback.format_exc()})
        report.write(options.json)
    print(f"{time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


class Blocks:
    """Scattered blocks of a cache, twice as many as move, filled with real caches; their table for each form."""

    def __init__(self, caches: torch.Tensor, piece_bytes: int, regions: int, count: int) -> None:
        self.piece_bytes, self.regions, self.count = piece_bytes, regions, count
        flat = caches.contiguous().view(torch.uint8).flatten().to(DEVICE)
        flat = flat.repeat(-(-piece_bytes // flat.numel()))
        pieces = flat[: flat.numel() // piece_bytes * piece_bytes].view(-1, piece_bytes)
        self.cache = torch.empty((regions, 2 * count, piece_bytes), dtype=torch.uint8, device=DEVICE)
        # A region has pieces of one layer's keys or values, as far as they go.
        stream, numbers = max(1, len(pieces) // 60), torch.arange(2 * count, device=DEVICE)
        for region in range(regions):
            self.cache[region] = pieces[(region * stream + numbers % stream) % len(pieces)]
        self.ids = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].to(DEVICE)
        self.stored = coded_rows.coded_bytes(piece_bytes)
        self.raw_bytes, self.coded_bytes = regions * piece_bytes, -(-regions * self.stored // 4096) * 4096
        self.raw = RegionTable.upload(list(self.cache), [piece_bytes * i for i in range(regions)])
        self.coded = RegionTable.upload(list(self.cache), [self.stored * i for i in range(regions)])
        self.verdicts = torch.zeros(count, dtype=torch.int32, pin_memory=True)

    @property
    def num_bytes(self) -> int:
        """Raw bytes of all that move."""
        return self.count * self.raw_bytes

    def row_bytes(self, kernel: Kernel) -> int:
        """Of a host row."""
        return self.coded_bytes if kernel.coded else self.raw_bytes

    def pack(self, kernel: Kernel, rows: torch.Tensor, first: int, count: int, stream: Any = None) -> None:
        """Blocks to rows."""
        options = {"first": first, "count": count, "num_programs": kernel.programs, "stream": stream}
        if kernel.coded:
            code_pieces.encode_pieces(self.coded, self.ids, rows, self.verdicts, **options)
        else:
            gather_pieces(self.raw, self.ids, rows, **options)

    def unpack(self, kernel: Kernel, rows: torch.Tensor, first: int, count: int, stream: Any = None) -> None:
        """Rows to blocks."""
        options = {"first": first, "count": count, "num_programs": kernel.programs, "stream": stream}
        if kernel.coded:
            code_pieces.decode_pieces(self.coded, self.ids, rows, **options)
        else:
            scatter_pieces(self.raw, self.ids, rows, **options)


class Pipeline:
    """Whole loads and saves through a ring of buffers: kernels of each on a stream of its own, DMA on one for all."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.host = torch.empty(blocks.num_bytes, dtype=torch.uint8, pin_memory=True)
        self.flat = torch.empty(blocks.num_bytes, dtype=torch.uint8, device=DEVICE)
        self._buffers = [torch.empty(BUFFER, dtype=torch.uint8, device=DEVICE) for _ in range(NUM_BUFFERS)]
        self._streams = [torch.cuda.Stream(priority=-2) for _ in range(NUM_BUFFERS)]
        self._lane = torch.cuda.Stream(priority=-1)
        self._copy = driver_copier().copy_one

    def rows(self, kernel: Kernel) -> torch.Tensor:
        """The host's."""
        blocks, size = self._blocks, self._blocks.row_bytes(kernel)
        return self.host[: blocks.count * size].view(blocks.count, size)

    def run(self, direction: Direction, kernel: Kernel) -> None:
        """Enqueue a load or a save of all blocks; the current stream waits for it."""
        blocks, size = self._blocks, self._blocks.row_bytes(kernel)
        host = self.rows(kernel)
        current = torch.cuda.current_stream()
        start = current.record_event()
        for stream in (self._lane, *self._streams):
            stream.wait_event(start)
        free: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        most = BUFFER // size
        for number, first in enumerate(range(0, blocks.count, most)):
            at, count = number % NUM_BUFFERS, min(most, blocks.count - first)
            stream, rows = self._streams[at], self._buffers[at][: count * size].view(count, size)
            taker = self._lane if direction is Direction.LOAD else stream
            if (event := free[at]) is not None:
                taker.wait_event(event)
            if direction is Direction.LOAD:
                self._copy_rows(rows, host[first : first + count])
                stream.wait_event(self._lane.record_event())
                blocks.unpack(kernel, rows, first, count, stream)
                free[at] = stream.record_event()
            else:
                blocks.pack(kernel, rows, first, count, stream)
                self._lane.wait_event(stream.record_event())
                self._copy_rows(host[first : first + count], rows)
                free[at] = self._lane.record_event()
        for stream in (self._lane, *self._streams):
            current.wait_event(stream.record_event())

    def large_copy(self, direction: Direction) -> None:
        """As many raw bytes in one piece, on the current stream."""
        target, source = (self.flat, self.host) if direction is Direction.LOAD else (self.host, self.flat)
        target.copy_(source, non_blocking=True)

    def _copy_rows(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """A copy for each row, as rows of a host pool are not neighbours."""
        for target, source in zip(targets, sources, strict=True):
            self._copy(target.data_ptr(), source.data_ptr(), target.numel(), self._lane.cuda_stream)


class Bench:
    """The parts."""

    def __init__(self, report: Report, options: argparse.Namespace) -> None:
        self._report, self._repeats, self._bytes = report, options.repeats, options.bytes
        if options.caches.is_file():
            self._caches = smollm2_caches.load(options.caches)
        else:
            print(f"{options.caches} is not there: normal numbers take the place of real caches")
            self._caches = torch.randn((30, 2, 512, 3, 64)).to(torch.bfloat16)
        self._is_real = options.caches.is_file()
        self._blocks: Blocks | None = None
        self._pipe: Pipeline | None = None

    @property
    def _all(self) -> tuple[Blocks, Pipeline]:
        if self._blocks is None or self._pipe is None:
            self._blocks = Blocks(self._caches, PIECE, REGIONS, self._bytes // (REGIONS * PIECE))
            self._pipe = Pipeline(self._blocks)
        return self._blocks, self._pipe

    def exactness(self) -> None:
        """Coded bytes are the reference's, and come back: of all patterns, real caches, noise, and odd lengths."""
        bits = torch.arange(1 << 16, dtype=torch.int32)
        order = torch.argsort((bits >> 7) & 255, stable=True)  # by exponents, 16 of which have 4,096 patterns
        patterns = bits[order].to(torch.int16).view(torch.uint8)
        flat = self._caches.contiguous().view(torch.uint8).flatten()
        noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
        normal = torch.randn(1 << 19).to(torch.bfloat16).view(torch.uint8)
        cases = [(patterns, 8192), (patterns, 2048), (noise, 4096), (noise, PIECE)]
        cases += list(product((flat[: 1 << 20], normal), (192, 2048, 2112, 4096, 6144, PIECE, 65536 + 4160)))
        worst = 0
        for data, size in cases:
            worst += self._differing(data[: data.numel() // size * size].view(-1, size)[:24].to(DEVICE))
        print(f"{worst} bytes differ")
        self._report.claim("bytes_that_differ", worst, 0, "bytes", "lower")

    def _differing(self, pieces: torch.Tensor) -> int:
        """How many bytes are not the reference's, or do not come back."""
        num_pieces, size = pieces.shape
        expected, fits = coded_rows.encode_reference(pieces)
        rows = torch.full_like(expected, 0xA5)
        ids = torch.randperm(num_pieces).to(DEVICE)
        verdicts = torch.zeros(num_pieces, dtype=torch.int32, device=DEVICE)
        code_pieces.encode_pieces(RegionTable.upload([pieces], [0]), ids, rows, verdicts, num_programs=3)
        back = torch.zeros_like(pieces)
        code_pieces.decode_pieces(RegionTable.upload([back], [0]), ids, rows, num_programs=3)
        wrong = int((rows != expected[ids]).sum()) + int(((verdicts == 0) != fits[ids]).sum())
        wrong += int((back != pieces)[fits].sum())
        # Rows of anything are written within their pieces.
        before, half = back.clone(), num_pieces // 2
        garbage = torch.randint(0, 256, rows.shape, dtype=torch.uint8, device=DEVICE)
        code_pieces.decode_pieces(RegionTable.upload([back], [0]), ids, garbage, count=half, num_programs=3)
        wrong += int((back != before)[ids[half:]].sum())
        torch.cuda.synchronize()
        if wrong:
            print(f"  {wrong} bytes of pieces of {size} differ, {int(fits.sum())} of {num_pieces} fit")
        return wrong

    def shares(self) -> None:
        """Stored share, and exceptions of SmolLM2's caches by layer, in pieces of 16 tokens and of an 8B model's."""
        for size in (6144, PIECE):
            share = coded_rows.coded_bytes(size) / size
            found = {name: exceptions_by_layer(self._caches[:, i], size) for i, name in enumerate(("keys", "values"))}
            refused = sum(int(refused) for _, refused in found.values())
            for name, (rates, _) in found.items():
                low, middle, high = (100 * float(np.quantile(rates, q)) for q in (0, 0.5, 1))
                print(f"{size:>6} B, {name}: exceptions by layer {low:.4f} / {middle:.4f} / {high:.4f} % of words")
                row = {"part": "shares", "piece_bytes": size, "of": name, "real": self._is_real, "rates": rates}
                self._report.rows.append(row)
            self._report.claim(f"stored_share_{size}", share, 0.77, "of 1", "lower")
            self._report.claim(f"refused_pieces_{size}", refused, 0, "pieces", "lower")

    def kernels(self) -> None:
        """GB/s of raw bytes on the device alone, by programs."""
        blocks, _ = self._all
        count = min(BUFFER // blocks.raw_bytes, blocks.count)
        rows = torch.zeros((count, blocks.raw_bytes), dtype=torch.uint8, device=DEVICE)
        firsts = range(0, blocks.count - count + 1, count)[:12]  # more than the GPU's caches hold

        def several(work: Callable[..., None], kernel: Kernel, own: torch.Tensor) -> None:
            for first in firsts:
                work(kernel, own, first, count)

        for kernel in (CODED, *OTHERS, *(Kernel(n, coded=False) for n in (4, 8, 16, 32))):
            own = rows[:, : blocks.row_bytes(kernel)]
            save, load = (
                len(firsts) * count * blocks.raw_bytes / 1e6
                / best_ms(lambda work=work, kernel=kernel, own=own: several(work, kernel, own), self._repeats)
                for work in (blocks.pack, blocks.unpack)
            )  # fmt: skip
            print(f"{kernel!s:>26}: encode {save:6.0f}, decode {load:6.0f} GB/s", flush=True)
            row = {"part": "kernels", "kernel": str(kernel), "encode": save, "decode": load}
            self._report.rows.append(row)
        assert not blocks.verdicts.any(), "blocks of real caches were refused"

    def whole(self) -> None:
        """Whole loads and saves with the GPU otherwise idle, as multiples of one large copy of as many raw bytes."""
        blocks, pipe = self._all
        self._verify(blocks, pipe)
        for way in (Direction.SAVE, Direction.LOAD):  # a load finds what a save has written
            link = best_ms(lambda way=way: pipe.large_copy(way), self._repeats)
            multiples: dict[Kernel, float] = {}
            for kernel in (RAW, CODED, *OTHERS):
                if way is Direction.LOAD:
                    pipe.run(Direction.SAVE, kernel)
                ms = best_ms(lambda way=way, kernel=kernel: pipe.run(way, kernel), self._repeats)
                multiples[kernel] = link / ms
                print(f"{way.value:>5} {kernel!s:>26}: {ms:.1f} ms, {link / ms:.3f} of the link", flush=True)
                row = {"part": "whole", "direction": way.value, "kernel": str(kernel), "ms": ms, "link_ms": link}
                self._report.rows.append(row)
            goal = 1.22 if way is Direction.LOAD else 1.2
            self._report.claim(f"{way.value}_multiple_of_link", multiples[CODED], goal, "of 1", "higher")

    def _verify(self, blocks: Blocks, pipe: Pipeline) -> None:
        before = blocks.cache[:, blocks.ids].clone()
        for kernel in (RAW, CODED):
            pipe.run(Direction.SAVE, kernel)
            blocks.cache.zero_()
            pipe.run(Direction.LOAD, kernel)
            torch.cuda.synchronize()
            assert torch.equal(blocks.cache[:, blocks.ids], before), f"{kernel}: bytes differ"
        assert not blocks.verdicts.any()

    def products(self) -> None:
        """What large products lose for each GB of raw bytes that is loaded or saved beside them."""
        blocks, pipe = self._all
        left = torch.randn((PRODUCT, PRODUCT), dtype=torch.bfloat16, device=DEVICE)
        side = torch.cuda.Stream()

        def products() -> None:
            for _ in range(PRODUCTS):
                torch.mm(left, left)

        for way in Direction:
            lost: dict[Kernel, float] = {}
            for kernel in (RAW, CODED, *OTHERS):
                pipe.run(Direction.SAVE, kernel)
                found = [self._beside(pipe, way, kernel, products, side) for _ in range(self._repeats + 1)][1:]
                alone, beside, copying, link = (median(column) for column in zip(*found, strict=True))
                lost[kernel] = (beside - alone) / (blocks.num_bytes / GB)
                print(
                    f"{way.value:>5} {kernel!s:>26}: products {beside / alone - 1:+.1%}, {lost[kernel]:.2f} ms a GB, "
                    f"copy at {link / copying:.3f} of the link in {copying:.0f} of {beside:.0f} ms",
                    flush=True,
                )
                row = {"part": "products", "direction": way.value, "kernel": str(kernel), "ms": found}
                self._report.rows.append(row | {"lost_ms_per_gb": lost[kernel], "columns": "alone beside copy link"})
            goal = 1.0 if way is Direction.LOAD else 1.5
            self._report.claim(f"products_lose_{way.value}", lost[CODED], goal, "ms per GB", "lower")

    def _beside(
        self,
        pipe: Pipeline,
        way: Direction,
        kernel: Kernel,
        products: Callable[[], None],
        side: torch.cuda.Stream,
    ) -> tuple[float, float, float, float]:
        """Milliseconds of the products alone and beside a copy, of that, and of a large copy."""
        link = device_ms(lambda: pipe.large_copy(way))
        alone = device_ms(products)
        device_ms(lambda: pipe.large_copy(way))  # as long a rest as in front of the others
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        products()
        end.record()
        side.wait_event(start)
        with torch.cuda.stream(side):
            begun.record()
            pipe.run(way, kernel)
            done.record()
        torch.cuda.synchronize()
        return alone, start.elapsed_time(end), begun.elapsed_time(done), link

    def pieces(self) -> None:
        """GB/s on the device alone of other pieces."""
        for size, regions in ((4096, 64), (6144, 60), (8192, 64), (65536, 32), (1 << 20, 4)):
            blocks = Blocks(self._caches, size, regions, max(1, BUFFER // (size * regions)))
            rows = torch.zeros((blocks.count, blocks.coded_bytes), dtype=torch.uint8, device=DEVICE)
            for programs in (16, 64, 132, 264):
                kernel, rates = Kernel(programs), []
                for work in (blocks.pack, blocks.unpack):
                    call = lambda work=work, kernel=kernel: work(kernel, rows, 0, blocks.count)  # noqa: E731, B023
                    rates.append(blocks.num_bytes / best_ms(call, self._repeats) / 1e6)
                print(f"{size >> 10:>6} KiB x {programs:>3}: encode {rates[0]:.0f}, decode {rates[1]:.0f} GB/s")
                row = {"part": "pieces", "piece_bytes": size, "programs": programs}
                self._report.rows.append(row | {"encode": rates[0], "decode": rates[1]})


def exceptions_by_layer(caches: torch.Tensor, size: int) -> tuple[list[float], int]:
    """Of each layer, exceptions for each word of four exponents; and how many pieces do not fit."""
    rates, refused = [], 0
    for layer in caches:
        flat = layer.contiguous().view(torch.uint8).flatten()
        pieces = flat[: flat.numel() // size * size].view(-1, size)
        coded, fits = coded_rows.encode_reference(pieces)
        refused += int((~fits).sum())
        total, read = 0, 0
        for part in coded_rows.segments_of(size):
            at = read + 3 * part // 4 + 4 * coded_rows.chunks_of(part)
            total += int(coded[:, at : at + 4].contiguous().view(torch.int32).sum())
            read += 3 * part // 4 + coded_rows.head_bytes(coded_rows.chunks_of(part))
        rates.append(total / (pieces.numel() / 8))
    return rates, refused


def device_ms(work: Callable[[], None]) -> float:
    """Milliseconds of work on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def best_ms(work: Callable[[], None], repeats: int) -> float:
    """The median, after a run that is not counted."""
    return median([device_ms(work) for _ in range(repeats + 1)][1:])


if __name__ == "__main__":
    sys.exit(main())
