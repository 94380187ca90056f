"""Measures how long copies take on this machine, in well under two seconds, and remembers it for later starts.

On page-locked memory of its own, and scratch memory on the device. Random places on both sides, medians. A result is
kept for the GPU, its driver, its link, this module's version, and the length of a piece and of one that is coded.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ...errors import ConfigError
from ...triton_kernels.code_pieces import decode_pieces, encode_pieces
from ...triton_kernels.coded_rows import coded_bytes
from ...triton_kernels.copy_pieces import (
    LINK_LOAD_PROGRAMS,
    LINK_SAVE_PROGRAMS,
    STAGED_PROGRAMS,
    RegionTable,
    gather_pieces,
    scatter_pieces,
)
from ...types import Direction
from ..cuda.allocations import device_tensor
from ..cuda.copier import driver_copier
from ..cuda.streams import Priority, make_lane
from ..memory.host_form import BLOCK_ALIGN, HostForm
from ..memory.host_pool import HostPool
from ..memory.numa import SYSFS, pci_address
from .curves import BUILT_IN, NUM_BYTES, Curve, DirectionCosts, LinkCosts, decode
from .remembered import recall, remember

logger = logging.getLogger("kv_connector.transfer")

VERSION = 3
"""Counted up with every change of what is measured or of the paths: results of an older one are not used."""
SEGMENT_LENGTHS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Segments that DMA is measured with; short ones are bounded by the thread that submits them."""
REGIONS = 16  # pieces of a block that kernels are measured with
_NUMBERS = 1 << 16  # that are drawn, again and again, for what is coded
_REPEATS = 3
_READY_SECONDS = 1.5
"""How long a start waits for page-locked memory."""


def remembered_costs(form: HostForm, numa_bind: bool) -> LinkCosts:
    """Those of an earlier start on such a machine for blocks like these, or measured now and remembered.

    `numa_bind`: as the host pool. A machine that cannot be measured is served with what is built in.
    """
    regions = form.layout.regions
    piece_bytes = max(region.piece_bytes for region in regions)
    coded = [region.piece_bytes for region, is_coded in zip(regions, form.is_coded, strict=True) if is_coded]
    pieces, coded_pieces = (piece_bytes,), (max(coded),) if coded else ()
    name = f"link_costs_{_key(form.layout.device, (*pieces, *coded_pieces))}.json"
    try:
        if (text := recall(name)) is not None:
            return decode(text, name)
    except ConfigError as error:
        logger.warning("%s cannot be used and is measured anew: %s", name, error)
    begin = time.perf_counter()
    costs = _measured_now(form.layout.device, numa_bind, pieces, coded_pieces)
    if costs is not BUILT_IN:
        logger.info("measured what copies take in %.2f s; see kv-connector calibrate", time.perf_counter() - begin)
        remember(name, costs.encode())
    return costs


def _measured_now(
    device: torch.device, numa_bind: bool, pieces: Sequence[int], coded_pieces: Sequence[int]
) -> LinkCosts:
    host = HostPool(NUM_BYTES // BLOCK_ALIGN, BLOCK_ALIGN, device=device, numa_bind=numa_bind)
    try:
        begin = time.perf_counter()
        while host.num_ready_blocks < host.num_blocks:
            if time.perf_counter() - begin > _READY_SECONDS:
                raise TimeoutError(f"no host memory is ready after {_READY_SECONDS} s")
            time.sleep(0.01)
        if not host.is_pinned:
            raise MemoryError("host memory cannot be page-locked: raise `ulimit -l`")
        return measure(device, host, pieces, coded_pieces)
    except Exception as error:  # noqa: BLE001 - a start does not fail for this
        logger.warning("copies could not be measured, built-in figures are used: %s: %s", type(error).__name__, error)
        return BUILT_IN
    finally:
        host.close()


def measure(
    device: torch.device, host: HostPool, piece_lengths: Sequence[int], coded_lengths: Sequence[int] = ()
) -> LinkCosts:
    """Measure now: DMA at `SEGMENT_LENGTHS`, the kernels at `piece_lengths`, ascending, and the coder at
    `coded_lengths`, of those that can be coded; without any it is as built in.

    Overwrites the first `NUM_BYTES` of `host`. Raises ValueError where it has less that is ready or pieces are longer,
    and what CUDA raises.
    """
    if host.num_ready_blocks * host.block_bytes < NUM_BYTES or max(*piece_lengths, *coded_lengths, 0) > NUM_BYTES:
        ready, longest = host.num_ready_blocks * host.block_bytes, max(*piece_lengths, *coded_lengths, 0)
        raise ValueError(
            f"{ready} bytes of host memory are ready and pieces have up to {longest}: give a pool of at least "
            f"{NUM_BYTES}, and pieces of at most as many"
        )
    bench = _Bench(device, host)
    found = {}
    with bench.lane.on_device():
        for direction in Direction:
            dma = _curve([(length, bench.dma(direction, length)) for length in SEGMENT_LENGTHS])
            packing = _curve([(length, bench.kernel(direction, length, over_link=False)) for length in piece_lengths])
            direct = _curve([(length, bench.kernel(direction, length, over_link=True)) for length in piece_lengths])
            coding = [(coded_bytes(length), bench.coder(direction, length)) for length in coded_lengths]
            coding_curve = _curve(coding) if coding else BUILT_IN.of(direction).coding
            found[direction] = DirectionCosts(dma, packing, direct, coding_curve)
    return LinkCosts(found[Direction.LOAD], found[Direction.SAVE], f"measured on {_names(device)}")


def _curve(points: Sequence[tuple[int, tuple[float, float]]]) -> Curve:
    starts = [start for _, (_, start) in points]
    return Curve(tuple(length for length, _ in points), tuple(rate for _, (rate, _) in points), median(starts))


class _Bench:
    """Scratch memory, and copies over it. All of `measure` runs on one stream of its own."""

    def __init__(self, device: torch.device, host: HostPool) -> None:
        self._device = device
        self._host = host.tensor.view(-1)[:NUM_BYTES]
        self._scratch = device_tensor((2, NUM_BYTES), torch.uint8, device)
        self.lane = make_lane(device, Priority.MEASURE, timing=True)
        self._stream = self.lane.stream
        self._random = np.random.default_rng(0)

    def dma(self, direction: Direction, length: int) -> tuple[float, float]:
        """GB/s in segments of `length`, and microseconds that a copy of one segment takes beyond its bytes."""
        count = min(NUM_BYTES // length, 2048)  # a call of the driver
        places = (self._random.permutation(NUM_BYTES // length)[:count] * length for _ in range(2))
        there, here = (place.astype(np.int64) for place in places)
        there, here = there + self._scratch.data_ptr(), here + self._host.data_ptr()
        sizes = np.full(count, length, dtype=np.int64)
        targets, sources = (there, here) if direction is Direction.LOAD else (here, there)
        arrays = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
        copier, handle = driver_copier(), self.lane.handle
        return self._rate(lambda number: copier(*arrays, number, True, handle), count, length)

    def kernel(self, direction: Direction, length: int, over_link: bool) -> tuple[float, float]:
        """The same of blocks of up to `REGIONS` pieces of `length`, to rows on the device or in host memory."""
        table, ids, row_bytes = self._blocks(length, length)
        count = len(ids)
        rows = (self._host if over_link else self._scratch[1])[: count * row_bytes].view(count, row_bytes)
        load = direction is Direction.LOAD
        move = scatter_pieces if load else gather_pieces
        programs = (LINK_LOAD_PROGRAMS if load else LINK_SAVE_PROGRAMS) if over_link else STAGED_PROGRAMS

        def copy(number: int) -> None:
            flat_ids = ids[:number] if over_link else None
            move(table, ids, rows, flat_ids, count=number, num_programs=programs, stream=self._stream)

        return self._rate(copy, count, row_bytes)

    def coder(self, direction: Direction, length: int) -> tuple[float, float]:
        """As `kernel`, of pieces that are coded on the device: of numbers spread like those of a cache, since what does
        not fit costs something else. Bytes are coded ones."""
        numbers = torch.from_numpy(self._random.standard_normal(_NUMBERS, np.float32)).to(torch.bfloat16)
        self._host.view(torch.bfloat16).view(-1, _NUMBERS).copy_(numbers)
        self._scratch[0].copy_(self._host)  # done on return; a kernel of torch's would take the engine's memory
        table, ids, row_bytes = self._blocks(length, coded_bytes(length))
        count = len(ids)
        rows = self._scratch[1][: count * row_bytes].view(count, row_bytes)
        verdicts = device_tensor((count,), torch.int64, self._device).view(torch.int32)

        def encode(number: int) -> None:
            encode_pieces(table, ids, rows, verdicts, count=number, stream=self._stream)

        def decode(number: int) -> None:
            decode_pieces(table, ids, rows, count=number, stream=self._stream)

        encode(count)  # what there is to decode
        return self._rate(decode if direction is Direction.LOAD else encode, count, row_bytes)

    def _blocks(self, length: int, row_piece: int) -> tuple[RegionTable, torch.Tensor, int]:
        """Up to `REGIONS` pieces of `length` a block over the scratch memory, a random order of all blocks, and the
        bytes of a row, where a piece has `row_piece`."""
        regions = min(REGIONS, NUM_BYTES // length)
        count = NUM_BYTES // (length * regions)
        views = self._scratch[0][: count * regions * length].view(regions, count, length)
        columns = device_tensor((4, regions), torch.int64, self._device)
        table = RegionTable.upload(list(views.unbind(0)), [i * row_piece for i in range(regions)], columns)
        ids = device_tensor((count,), torch.int64, self._device)
        ids.copy_(torch.from_numpy(self._random.permutation(count)))
        return table, ids, row_piece * regions

    def _rate(self, copy: Callable[[int], None], count: int, length: int) -> tuple[float, float]:
        """Of `copy(count)`, which moves `count * length` bytes, and of `copy(1)`."""
        large, small = self._microseconds(copy, count), self._microseconds(copy, 1)
        if count == 1:
            return length / large / 1e3, 0.0
        rate = (count - 1) * length / max(large - small, large / 2) / 1e3
        return rate, max(0.0, small - length / rate / 1e3)

    def _microseconds(self, copy: Callable[[int], None], count: int) -> float:
        times: list[float] = []
        for _ in range(_REPEATS + 1):
            start = self.lane.mark(self._stream)
            copy(count)
            end = self.lane.mark(self._stream)
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
            self.lane.recycle([start, end])
        return median(times[1:])


def _key(device: torch.device, pieces: Sequence[int]) -> str:
    return hashlib.sha256(f"{_names(device)}|{pieces}".encode()).hexdigest()[:16]


def _names(device: torch.device) -> str:
    folder = SYSFS / "bus/pci/devices" / pci_address(device)
    link = " x".join(_read(folder / name) for name in ("max_link_speed", "max_link_width"))
    driver = _read(SYSFS / "module/nvidia/version")
    return f"{torch.cuda.get_device_name(device)}, link {link}, driver {driver}, version {VERSION}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
