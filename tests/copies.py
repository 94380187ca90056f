"""Caches, pools, jobs and a reference copy, for the tests of the transfer layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kv_connector.config import Config
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy, CopyPath
from kv_connector.transfer.paths.choice import make_path
from kv_connector.transfer.paths.direct import DirectPath
from kv_connector.transfer.paths.runs import RunsPath
from kv_connector.transfer.paths.staged import StagedPath, min_staging_memory
from kv_connector.types import CopyJob, Direction

POISON = 0xC3
NUM_DEVICE = 13
NUM_HOST = 17
LOAD, SAVE = Direction.LOAD, Direction.SAVE


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def job(job_id: int, direction: Direction, device_ids: list[int], host_ids: list[int]) -> CopyJob:
    return CopyJob(job_id, direction, ids(*device_ids), ids(*host_ids))


class LockedPool(HostPool):
    """Says that it is page-locked, so that the direct path's logic runs on the CPU."""

    is_pinned = True  # type: ignore[assignment]


def copy_now(targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
    """A copier for memory of the CPU."""
    arrays = [(ctypes.c_int64 * count).from_address(address) for address in (targets, sources, sizes)]
    for target, source, size in zip(*arrays, strict=True):
        ctypes.memmove(target, source, size)


def make_pool(layout: CacheLayout, num_blocks: int = NUM_HOST) -> HostPool:
    block_bytes = raw_form(layout).block_bytes
    if layout.device.type == "cpu":
        pool: HostPool = HostPool.__new__(LockedPool)
        HostPool.__init__(pool, num_blocks, block_bytes, pin_memory=False)
        pool.blocks_per_piece = 4
    else:
        pool = HostPool(num_blocks, block_bytes, device=layout.device, pin_piece_bytes=4 * block_bytes)
        pool.wait_ready()
        assert pool.is_pinned
    pool.tensor.fill_(POISON)
    return pool


def make_named_path(name: str, layout: CacheLayout, pool: HostPool, staging_memory: int = 0) -> CopyPath:
    form, copier = raw_form(layout), copy_now if layout.device.type == "cpu" else None
    if name == "runs":
        return RunsPath(form, pool, copier)
    if name == "direct":
        return DirectPath(form, pool)
    if name == "staged":
        return StagedPath(form, pool, staging_memory or min_staging_memory(form) * 3, copier)
    return make_path(form, pool, Config())


PATHS = ["runs", "direct", "staged", "default"]


def bf16_apart() -> dict[str, Any]:
    return {f"{i}": torch.zeros(2, NUM_DEVICE, 4, 2, 8, dtype=torch.bfloat16) for i in range(3)}


def fp8_with_scales() -> dict[str, Any]:
    return {
        f"{i}": [torch.zeros(NUM_DEVICE, 4, 8, dtype=torch.float8_e4m3fn), torch.zeros(NUM_DEVICE, 4)] for i in range(3)
    }


def odd_bytes() -> dict[str, Any]:
    return {f"{i}": torch.zeros(NUM_DEVICE, 3 + i, 11, dtype=torch.uint8) for i in range(4)}


def padded_half() -> dict[str, Any]:
    return {f"{i}": torch.zeros(NUM_DEVICE, 4, 24, dtype=torch.float16)[:, :, :16] for i in range(2)}


def layers_inside_blocks() -> dict[str, Any]:
    whole = torch.zeros(NUM_DEVICE, 4, 1024, dtype=torch.uint8)
    return {f"{i}": whole[:, i] for i in range(4)}


CACHES = [bf16_apart, fp8_with_scales, odd_bytes, padded_half, layers_inside_blocks]


def filled(make: Callable[[], dict[str, Any]], device: torch.device) -> CacheLayout:
    """The layout of caches on `device` whose every byte of storage, padding included, is random."""
    generator = torch.Generator().manual_seed(7)
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            noise = torch.randint(0, 256, (storage.nbytes(),), dtype=torch.uint8, generator=generator)
            moved[storage.data_ptr()] = noise.to(device)
        memory = moved[storage.data_ptr()].view(tensor.dtype)
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    made = make()
    caches = {
        name: move(entry) if isinstance(entry, torch.Tensor) else [move(tensor) for tensor in entry]
        for name, entry in made.items()
    }
    return CacheLayout.from_tensors(caches, NUM_DEVICE)


def storages(layout: CacheLayout) -> list[torch.Tensor]:
    """All memory of the caches, padding included, on the CPU."""
    found = {}
    for region in layout.regions:
        storage = region.view.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=region.view.device).set_(storage)
    return [memory.cpu().clone() for memory in found.values()]


def expected_after(
    layout: CacheLayout, pool: HostPool, direction: Direction, regions: range, device_ids: Any, host_ids: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What plain indexing makes of clones: device views and host blocks."""
    views = [region.view.cpu().clone() for region in layout.regions]
    host = pool.tensor.clone()
    columns = raw_form(layout).columns(host)
    for index in regions:
        for device_id, host_id in zip(device_ids, host_ids, strict=True):
            piece = columns[index][host_id]
            if direction is SAVE:
                piece.copy_(views[index][device_id])
            else:
                views[index][device_id] = piece
    return views, host


@contextmanager
def side_stream(device: torch.device) -> Iterator[Any]:
    if device.type == "cpu":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    yield stream
    stream.synchronize()


def check_copy(
    path: CopyPath, layout: CacheLayout, pool: HostPool, direction: Direction, regions: range, pairs: Any
) -> None:
    device_ids, host_ids = (ids(*column) for column in zip(*pairs, strict=True))
    views, host = expected_after(layout, pool, direction, regions, device_ids, host_ids)
    padding = storages(layout) if direction is SAVE else None
    with side_stream(layout.device) as stream:
        path.copy(BlockCopy(direction, regions, device_ids, host_ids, stream))
    assert torch.equal(pool.tensor, host)
    for region, view in zip(layout.regions, views, strict=True):
        assert torch.equal(region.view.cpu(), view)
    if padding is not None:
        assert all(torch.equal(old, new) for old, new in zip(padding, storages(layout), strict=True))


PAIRS = [
    [(3, 5)],
    [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)],
    [(9, 8), (8, 7), (7, 6), (6, 5)],
    [(12, 3), (0, 16), (5, 4), (1, 0), (4, 15), (2, 9), (11, 10)],
    [(1, 9), (2, 8), (3, 7)],
]
