"""Measures what copies take on this machine, in well under two seconds, and remembers it for later starts.

On the host pool's own memory, which is empty at start-up, and scratch memory on the device. Random places on both
sides, medians. A result is kept for the GPU, its driver, its link, this module's version and the length of a piece.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ...errors import ConfigError
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
from ..memory.host_pool import HostPool
from ..memory.layout import CacheLayout
from ..memory.numa import SYSFS, pci_address
from .curves import BUILT_IN, Curve, DirectionCosts, LinkCosts, decode

logger = logging.getLogger("kv_connector.transfer")

VERSION = 2
"""Counted up with every change of what is measured or of the paths: results of an older one are not used."""
SEGMENT_LENGTHS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Segments that DMA is measured with; short ones are bounded by the thread that submits them."""
REGIONS = 16  # pieces of a block that kernels are measured with
NUM_BYTES = 32 << 20
"""Of host memory and of scratch memory that copies are measured on."""
_REPEATS = 3
_READY_SECONDS = 1.5
"""How long a start waits for the first page-locked memory."""


def remembered_costs(layout: CacheLayout, host: HostPool) -> LinkCosts:
    """Those of an earlier start on such a machine, or measured now and remembered.

    Writes to the first blocks of `host`: for start-up, before they are used. A machine that cannot be measured is
    served with what is built in.
    """
    piece_bytes = max(region.piece_bytes for region in layout.regions)
    if host.num_blocks * host.block_bytes < NUM_BYTES:
        return BUILT_IN  # nobody waits for so little
    path = cache_folder() / f"link_costs_{_key(layout.device, piece_bytes)}.json"
    try:
        return decode(path.read_text(), str(path))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, ConfigError) as error:
        logger.warning("%s cannot be used and is measured anew: %s", path, error)
    return _measured_now(layout.device, host, piece_bytes, path)


def _measured_now(device: torch.device, host: HostPool, piece_bytes: int, path: Path) -> LinkCosts:
    begin = time.perf_counter()
    while host.num_ready_blocks * host.block_bytes < NUM_BYTES:
        if time.perf_counter() - begin > _READY_SECONDS:
            logger.warning("no host memory is ready after %.1f s: copies go by what is built in", _READY_SECONDS)
            return BUILT_IN
        time.sleep(0.01)
    try:
        costs = measure(device, host, (piece_bytes,))
    except Exception as error:  # noqa: BLE001 - a start does not fail for this
        logger.warning("copies could not be measured and go by what is built in: %s: %s", type(error).__name__, error)
        return BUILT_IN
    logger.info("measured what copies take in %.2f s; see kv-connector calibrate", time.perf_counter() - begin)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(costs.encode())
        temporary.chmod(0o600)
        temporary.replace(path)
    except OSError as error:
        logger.warning("what copies take is not remembered: %s", error)
    return costs


def measure(device: torch.device, host: HostPool, piece_lengths: Sequence[int]) -> LinkCosts:
    """Measure now: DMA at `SEGMENT_LENGTHS`, the kernels at `piece_lengths`, ascending.

    Overwrites the first `NUM_BYTES` of `host`. Raises ValueError where it has less that is ready or pieces are longer,
    and what CUDA raises.
    """
    if host.num_ready_blocks * host.block_bytes < NUM_BYTES or max(piece_lengths) > NUM_BYTES:
        raise ValueError(f"{NUM_BYTES} bytes of host memory are needed, and pieces of at most as many")
    bench = _Bench(device, host)
    found = {}
    with bench.lane.on_device():
        for direction in Direction:
            dma = _curve([(length, bench.dma(direction, length)) for length in SEGMENT_LENGTHS])
            packing = _curve([(length, bench.kernel(direction, length, over_link=False)) for length in piece_lengths])
            direct = _curve([(length, bench.kernel(direction, length, over_link=True)) for length in piece_lengths])
            found[direction] = DirectionCosts(dma, packing, direct)
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
        regions = min(REGIONS, NUM_BYTES // length)
        row_bytes = length * regions
        count = NUM_BYTES // row_bytes
        views = self._scratch[0][: count * row_bytes].view(regions, count, length)
        columns = device_tensor((4, regions), torch.int64, self._device)
        table = RegionTable.upload(list(views.unbind(0)), [i * length for i in range(regions)], columns)
        ids = device_tensor((count,), torch.int64, self._device)
        ids.copy_(torch.from_numpy(self._random.permutation(count)))
        rows = (self._host if over_link else self._scratch[1])[: count * row_bytes].view(count, row_bytes)
        load = direction is Direction.LOAD
        move = scatter_pieces if load else gather_pieces
        programs = (LINK_LOAD_PROGRAMS if load else LINK_SAVE_PROGRAMS) if over_link else STAGED_PROGRAMS

        def copy(number: int) -> None:
            flat_ids = ids[:number] if over_link else None
            move(table, ids, rows, flat_ids, count=number, num_programs=programs, stream=self._stream)

        return self._rate(copy, count, row_bytes)

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


def cache_folder() -> Path:
    """Where results are kept: in `XDG_CACHE_HOME`, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv_connector"


def _key(device: torch.device, piece_bytes: int) -> str:
    return hashlib.sha256(f"{_names(device)}|{piece_bytes}".encode()).hexdigest()[:16]


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
