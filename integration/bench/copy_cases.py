"""What the benchmarks of copies move: a cache of scattered blocks, its host pool, and the ways between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kv_connector.config import Config, PathName
from kv_connector.transfer.cuda.copier import DriverCopier
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.choice import make_path
from kv_connector.transfer.paths.runs import RunsPath
from kv_connector.types import CopyJob, Direction

Int64s = NDArray[np.int64]
_LOOP_COPIES = 2000
"""As many calls of `copy_` as are timed: the rest would take as long each."""


class Way(Protocol):
    """One way of moving the blocks of a case."""

    num_bytes: int

    def copy(self, direction: Direction) -> None:
        """Enqueue the copy on the current stream."""

    def close(self) -> None:
        """Release what it holds."""


@dataclass(slots=True, eq=False)
class Case:
    """Blocks of equal pieces, twice as many as are moved on either side; `device_ids[i]` goes with `host_ids[i]`.

    `pieces` are what a copy has to move apart: uint8 of shape (num_blocks, piece_bytes), one for each region, or one
    for all where a block's regions are neighbours.
    """

    layout: CacheLayout
    pieces: list[torch.Tensor]
    host: HostPool
    device_ids: Int64s
    host_ids: Int64s
    flat_device: torch.Tensor
    flat_host: torch.Tensor

    @property
    def piece_bytes(self) -> int:
        """Length of a piece."""
        return self.pieces[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Moved in one run."""
        return len(self.device_ids) * raw_form(self.layout).moved_bytes

    def job(self, direction: Direction, job_id: int) -> CopyJob:
        """All blocks."""
        return CopyJob(job_id, direction, self.device_ids, self.host_ids)

    def large_copy(self, direction: Direction) -> None:
        """As many bytes in one piece, on the current stream: the link's limit."""
        if direction is Direction.LOAD:
            self.flat_device.copy_(self.flat_host, non_blocking=True)
        else:
            self.flat_host.copy_(self.flat_device, non_blocking=True)

    def verify(self, ways: dict[str, Way]) -> None:
        """Move random bytes by each way, both directions, and compare all of them. Raises AssertionError."""
        chosen = torch.tensor(self.host_ids)
        blocks = torch.tensor(self.device_ids).to(self.layout.device)
        noise = torch.empty_like(self.host.tensor, device=self.layout.device)
        for name, way in ways.items():
            if way.num_bytes < self.num_bytes:
                continue
            for direction in Direction:
                if direction is Direction.LOAD:
                    noise.random_(0, 256)  # on the GPU: the CPU would take seconds
                    size = self.host.blocks_per_piece  # no copy may cross a registration
                    for here, there in zip(self.host.tensor.split(size), noise.split(size), strict=True):
                        here.copy_(there)
                else:
                    for region in self.layout.regions:
                        region.view.random_(0, 256)
                on_streams(self, [lambda way=way, direction=direction: way.copy(direction)])
                there = self.host.tensor[chosen].to(self.layout.device)
                for region, part in zip(self.layout.regions, raw_form(self.layout).columns(there), strict=True):
                    assert torch.equal(region.view[blocks], part), f"{name} {direction.value}: bytes differ"

    def close(self) -> None:
        """Unlock and drop the memory."""
        self.host.close()


class PathWay:
    """A copy path: one that the engine may choose, or the driver's batch call, so many copies at a time. Loads are such
    as a step waits for: those in the background give more turns."""

    def __init__(self, case: Case, path: CopyPath) -> None:
        self.num_bytes = case.num_bytes
        self._case = case
        self._path = path

    def copy(self, direction: Direction) -> None:
        """See `Way`."""
        everything = range(len(self._case.layout.regions))
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        ids = self._case.device_ids, self._case.host_ids
        self._path.copy(BlockCopy(direction, everything, *ids, stream, in_step=direction is Direction.LOAD))

    def close(self) -> None:
        """See `Way`."""
        self._path.close()


class TimedPath:
    """Copies like another path, and notes when each copy was submitted, from and to, in seconds of
    `time.perf_counter`, and how long the threads that did so were busy in all."""

    def __init__(self, path: CopyPath) -> None:
        self._path = path
        self.submitted: list[tuple[float, float]] = []
        self.thread_ms = 0.0

    def copy(self, copy: BlockCopy) -> None:
        """As `CopyPath.copy`."""
        begin, busy = time.perf_counter(), time.thread_time()
        self._path.copy(copy)
        self.thread_ms += 1e3 * (time.thread_time() - busy)
        self.submitted.append((begin, time.perf_counter()))

    def slice_bytes(self, direction: Direction) -> int:
        """As `CopyPath.slice_bytes`."""
        return self._path.slice_bytes(direction)

    def close(self) -> None:
        """As `CopyPath.close`."""
        self._path.close()


class LoopWay:
    """`copy_` for every piece, as engines without a batch call do."""

    def __init__(self, case: Case) -> None:
        self._count = max(1, min(len(case.device_ids), _LOOP_COPIES // len(case.pieces)))
        self.num_bytes = self._count * raw_form(case.layout).moved_bytes
        self._case = case

    def copy(self, direction: Direction) -> None:
        """See `Way`."""
        case = self._case
        for device_id, host_id in zip(case.device_ids[: self._count], case.host_ids[: self._count], strict=True):
            row = case.host.tensor[host_id]
            for i, piece in enumerate(case.pieces):
                there, here = piece[device_id], row[i * case.piece_bytes : (i + 1) * case.piece_bytes]
                target, source = (there, here) if direction is Direction.LOAD else (here, there)
                target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """See `Way`."""


class VllmWay:
    """What vLLM's OffloadingConnector calls: one batch of addresses, a piece each."""

    def __init__(self, case: Case) -> None:
        from vllm import _custom_ops

        self.num_bytes = case.num_bytes
        self._swap = _custom_ops.swap_blocks_batch
        bases = np.array([piece.data_ptr() for piece in case.pieces])
        strides = np.array([piece.stride(0) for piece in case.pieces])
        offsets = np.arange(len(case.pieces)) * case.piece_bytes
        there = bases + case.device_ids[:, None] * strides
        here = case.host.tensor.data_ptr() + case.host_ids[:, None] * raw_form(case.layout).block_bytes + offsets
        self._device, self._host = (torch.from_numpy(side.ravel().astype(np.int64)) for side in (there, here))
        self._sizes = torch.full((len(self._host),), case.piece_bytes, dtype=torch.int64)

    def copy(self, direction: Direction) -> None:
        """See `Way`."""
        if direction is Direction.LOAD:
            self._swap(self._host, self._device, self._sizes, is_src_access_order_any=True)
        else:
            self._swap(self._device, self._host, self._sizes)

    def close(self) -> None:
        """See `Way`."""


def make_case(piece_bytes: int, num_regions: int, num_bytes: int, apart: bool = False) -> Case:
    """A cache in GPU memory (in host memory without a GPU) and a host pool, half of whose blocks move.

    Pieces from 1 MiB up are whole blocks, whose regions are neighbours, as in vLLM's cross-layer caches. `apart`: the
    regions of shorter ones are allocations of their own.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    joined = piece_bytes >= 1 << 20
    block_bytes = piece_bytes if joined else piece_bytes * num_regions
    count = max(1, num_bytes // block_bytes)
    if joined:
        cache = torch.zeros((2 * count, num_regions, piece_bytes // num_regions), dtype=torch.uint8, device=device)
        pieces, views = [cache.flatten(1)], list(cache.unbind(1))
    elif apart:
        pieces = views = [
            torch.zeros((2 * count, piece_bytes), dtype=torch.uint8, device=device) for _ in range(num_regions)
        ]
    else:
        cache = torch.zeros((num_regions, 2 * count, piece_bytes), dtype=torch.uint8, device=device)
        pieces = views = list(cache.unbind(0))
    layers = {f"layer {i}": view for i, view in enumerate(views)}
    layout = CacheLayout.from_tensors(layers, 2 * count, block_dims=dict.fromkeys(layers, 0))
    host = HostPool(2 * count, raw_form(layout).block_bytes, device=device)
    host.wait_ready()
    rng = np.random.default_rng(0)
    ids = [rng.permutation(2 * count)[:count].astype(np.int64) for _ in range(2)]
    for side in ids:
        side.setflags(write=False)
    moved = count * raw_form(layout).moved_bytes
    flat_host = torch.empty(moved, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return Case(layout, pieces, host, ids[0], ids[1], torch.empty(moved, dtype=torch.uint8, device=device), flat_host)


def ways_of(case: Case, names: Sequence[str]) -> dict[str, Way]:
    """The ways that this machine has, of those named; ours is always there. `batch16`: 16 copies in a call."""
    found: dict[str, Way] = {"ours": PathWay(case, _path(case, PathName.AUTO))}
    if case.layout.device.type == "cpu":
        return found | {"loop": LoopWay(case)}
    for name in names:
        if name in ("runs", "direct", "staged"):
            found[name] = PathWay(case, _path(case, PathName(name)))
        elif name.startswith("batch"):
            copier = DriverCopier(int(name.removeprefix("batch")))
            found[name] = PathWay(case, RunsPath(raw_form(case.layout), case.host, copier))
        elif name == "loop":
            found[name] = LoopWay(case)
        elif name == "vllm":
            try:
                found[name] = VllmWay(case)
            except (ImportError, AttributeError):
                print("no vLLM here: its swap is left out")
    return found


def _path(case: Case, name: PathName) -> CopyPath:
    return make_path(raw_form(case.layout), case.host, Config(copy_path=name))


def on_streams(case: Case, work: Sequence[Callable[[], None]], num_streams: int = 0) -> float:
    """Run each on a stream of its own, all at once, or on so many in turn; milliseconds until the last has ended."""
    if case.layout.device.type == "cpu":
        begin = time.perf_counter()
        for call in work:
            call()
        return 1e3 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    start, ends = torch.cuda.Event(enable_timing=True), []
    start.record()
    streams = _streams(num_streams or len(work))
    for stream, call in zip(cycle(streams), work, strict=False):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            call()
            end = torch.cuda.Event(enable_timing=True)
            end.record(stream)
            ends.append(end)
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) for end in ends)


def large_copy_ms(case: Case, direction: Direction) -> float:
    """Milliseconds of one large copy of as many bytes."""
    return on_streams(case, [lambda: case.large_copy(direction)])


def synchronize() -> None:
    """Nothing is under way on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_own_streams: list[torch.cuda.Stream] = []


def _streams(count: int) -> list[torch.cuda.Stream]:
    while len(_own_streams) < count:
        _own_streams.append(torch.cuda.Stream())
    return _own_streams[:count]
