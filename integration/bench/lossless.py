"""Coded host blocks beside raw ones: the kernels, whole loads and saves, what they cost products, and what fits.

Every part runs by itself, so that one that fails leaves the others. Blocks are those of an 8B model, 64 pieces of
32 KiB, filled with SmolLM2's own caches (`integration.models.smollm2_caches` writes them); whole loads and saves take
the engine's staged path in both forms, in turn. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from kv_connector.triton_kernels import code_pieces, coded_rows
from kv_connector.triton_kernels.copy_pieces import RegionTable, gather_pieces, scatter_pieces

from integration.bench.device_time import device_ms
from integration.models import smollm2_caches
from integration.report import Report, hardware
from kv_connector.config import Config, HostFormName, PathName
from kv_connector.transfer.memory.host_form import make_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy, Refusals
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import Direction

REGIONS, PIECE = 64, 32 << 10  # 16 tokens of Llama-3.1-8B
PRODUCT, PRODUCTS = 8192, 40
BUFFER = 42 << 20  # of device memory, for kernels alone
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
    if not options.caches.exists():
        parser.error(f"no {options.caches}: python -m integration.models.smollm2_caches writes it where the model is")
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


class Copies:
    """Whole loads and saves of blocks through the engine's staged path, in one form on the host."""

    def __init__(self, blocks: Blocks, name: HostFormName) -> None:
        tensors = {str(region): view.view(torch.bfloat16) for region, view in enumerate(blocks.cache)}
        layout = CacheLayout.from_tensors(tensors, 2 * blocks.count)
        form = make_form(layout, name)
        self.name = name.value
        self._everything = range(len(layout.regions))
        self._device_ids = blocks.ids.cpu().numpy()
        self._host_ids = np.random.default_rng(0).permutation(blocks.count)
        self._host = HostPool(blocks.count, form.block_bytes, device=layout.device)
        self._host.wait_ready()
        self._path = make_path(form, self._host, Config(copy_path=PathName.STAGED, host_form=name))
        self._refusals: list[Refusals] = []

    def run(self, direction: Direction) -> None:
        """Enqueue a load or a save of all blocks behind the current stream, which waits for it."""
        stream = torch.cuda.current_stream()
        ids = self._device_ids, self._host_ids
        in_step = direction is Direction.LOAD
        self._path.copy(BlockCopy(direction, self._everything, *ids, stream, False, self._refusals, in_step))

    def check(self) -> None:
        """Once all of it has completed: every block has fitted."""
        assert not any(refused() for refused in self._refusals), "blocks of real caches were refused"
        self._refusals.clear()


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

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._caches, PIECE, REGIONS, self._bytes // (REGIONS * PIECE))

    @cached_property
    def _copies(self) -> tuple[Copies, ...]:
        return tuple(Copies(self._blocks, name) for name in (HostFormName.RAW, HostFormName.LOSSLESS))

    @cached_property
    def _flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As many bytes in one piece, on the device and on the host."""
        num_bytes = self._blocks.num_bytes
        device = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        return device, torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _large_copy(self, way: Direction) -> None:
        device, host = self._flat
        target, source = (device, host) if way is Direction.LOAD else (host, device)
        target.copy_(source, non_blocking=True)

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
        blocks = self._blocks
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
        self._verify()
        for way in (Direction.SAVE, Direction.LOAD):  # a load finds what a save has written
            found: dict[str, list[float]] = {"link": [], **{copies.name: [] for copies in self._copies}}
            for _ in range(self._repeats + 1):
                found["link"].append(device_ms(lambda way=way: self._large_copy(way)))
                for copies in self._copies:
                    found[copies.name].append(device_ms(lambda way=way, copies=copies: copies.run(way)))
                    copies.check()
            ms = {name: median(times[1:]) for name, times in found.items()}
            for name, own in ms.items():
                print(f"{way.value:>5} {name:>8}: {own:.1f} ms, {ms['link'] / own:.3f} of the link", flush=True)
            self._report.rows.append({"part": "whole", "direction": way.value, "ms": found})
            goal = 1.22 if way is Direction.LOAD else 1.2
            self._report.claim(f"{way.value}_multiple_of_link", ms["link"] / ms["lossless"], goal, "of 1", "higher")

    def _verify(self) -> None:
        blocks = self._blocks
        before = blocks.cache[:, blocks.ids].clone()
        for copies in self._copies:
            copies.run(Direction.SAVE)
            blocks.cache.zero_()
            copies.run(Direction.LOAD)
            torch.cuda.synchronize()
            copies.check()
            assert torch.equal(blocks.cache[:, blocks.ids], before), f"{copies.name}: bytes differ"

    def products(self) -> None:
        """What large products lose for each GB of raw bytes that is loaded or saved beside them."""
        left = torch.randn((PRODUCT, PRODUCT), dtype=torch.bfloat16, device=DEVICE)
        side = torch.cuda.Stream()

        def products() -> None:
            for _ in range(PRODUCTS):
                torch.mm(left, left)

        for way in Direction:
            for copies in self._copies:
                copies.run(Direction.SAVE)
                found = [self._beside(copies, way, products, side) for _ in range(self._repeats + 1)][1:]
                copies.check()
                alone, beside, copying, link = (median(column) for column in zip(*found, strict=True))
                lost = (beside - alone) / (self._blocks.num_bytes / GB)
                print(
                    f"{way.value:>5} {copies.name:>8}: products {beside / alone - 1:+.1%}, {lost:.2f} ms a GB, "
                    f"copy at {link / copying:.3f} of the link in {copying:.0f} of {beside:.0f} ms",
                    flush=True,
                )
                row = {"part": "products", "direction": way.value, "form": copies.name, "ms": found}
                self._report.rows.append(row | {"lost_ms_per_gb": lost, "columns": "alone beside copy link"})
            goal = 1.0 if way is Direction.LOAD else 1.5  # of the last form, which is the coded one
            self._report.claim(f"products_lose_{way.value}", lost, goal, "ms per GB", "lower")

    def _beside(
        self,
        copies: Copies,
        way: Direction,
        products: Callable[[], None],
        side: torch.cuda.Stream,
    ) -> tuple[float, float, float, float]:
        """Milliseconds of the products alone and beside a copy, of that, and of a large copy."""
        link = device_ms(lambda: self._large_copy(way))
        alone = device_ms(products)
        device_ms(lambda: self._large_copy(way))  # as long a rest as in front of the others
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        products()
        end.record()
        side.wait_event(start)
        with torch.cuda.stream(side):
            begun.record()
            copies.run(way)
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


def best_ms(work: Callable[[], None], repeats: int) -> float:
    """The median, after a run that is not counted."""
    return median([device_ms(work) for _ in range(repeats + 1)][1:])


if __name__ == "__main__":
    sys.exit(main())
