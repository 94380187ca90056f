"""Copies for a few seconds: plain ones of page-locked memory, and ours, as an engine would do them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ..text import size_text
from .finding import Finding, ok, problem, warning
from .gpu import FoundGpu, Link

if TYPE_CHECKING:
    import torch

    from ...transfer.memory.host_pool import HostPool

LAYERS = 32
PIECE_BYTES = 32 << 10
"""Of a layer in a block of 16 tokens: 8 heads of 128 numbers of bf16, keys and values."""
_GPU_BLOCKS, _CPU_BLOCKS = 1024, 32
"""A gigabyte on a GPU: a copy of ours takes a millisecond or two to begin and to be known to have ended (256 MiB took
6.3 ms and a plain copy 4.8, H200, 2026-11-25), which is not to be taken for the link's rate."""
_SECONDS = 0.6  # of each of the four measurements
_READY_SECONDS = 2.0
_LEAST_OF_LINK = 0.7
"""Plain copies reach 0.85 of what the lanes can carry, or somewhat more."""
_LEAST_OF_PLAIN = 0.8
"""Ours reach 0.95 of plain copies, or somewhat more."""


@dataclass(slots=True)
class Copied:
    """`is_pinned`: whether CUDA has locked our host memory; None without a GPU."""

    is_pinned: bool | None = None
    findings: list[Finding] = field(default_factory=list)


def measure(found: FoundGpu) -> Copied:
    """Takes up to five seconds, and a gigabyte on each side."""
    import torch

    from ...errors import KVConnectorError

    try:
        return _measure(found)
    except (RuntimeError, OSError, KVConnectorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "see nvidia-smi for who has the memory" if found.device else "see the error"
        where = "GPU" if found.device is not None and torch.cuda.is_available() else "CPU"
        return Copied(False if found.device else None, [problem(f"copies on the {where}", reason, "they work", fix)])


def _measure(found: FoundGpu) -> Copied:
    import torch

    from ...transfer.memory.host_pool import HostPool

    device = found.device or torch.device("cpu")
    num_blocks = _GPU_BLOCKS if found.device else _CPU_BLOCKS
    host = HostPool(num_blocks, LAYERS * PIECE_BYTES, device=found.device)
    try:
        deadline = time.perf_counter() + _READY_SECONDS
        while host.num_ready_blocks < num_blocks and time.perf_counter() < deadline:
            time.sleep(0.01)
        is_ready = host.num_ready_blocks == num_blocks
        copied = Copied((is_ready and host.is_pinned) if found.device else None)
        if not is_ready:
            fix = "another process may have the machine's memory: see `free`"
            limit = f"{size_text(num_blocks * host.block_bytes)} in {_READY_SECONDS:.0f} s"
            copied.findings = [problem("page-locked memory", "not ready in time", limit, fix)]
            return copied
        if copied.is_pinned is False:
            fix = "raise `ulimit -l`, or give the container IPC_LOCK"
            copied.findings.append(problem("page-locked memory", "CUDA could not lock any", "locked", fix))
        with _one_thread():
            plain, ours = _plain(host, device), _ours(host, device)
        if found.device is None:
            value = (
                f"{min(plain):.2f} GB/s of plain copies, {min(ours):.2f} of ours in pieces of {PIECE_BYTES >> 10} KiB"
            )
            copied.findings.append(ok("memory of the CPU", value))
        else:
            copied.findings += [_against_link(plain, found.link), _against_plain(ours, plain)]
        return copied
    finally:
        host.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a CPU torch shares each copy out to as many threads as there are cores and waits for the last of them: where
    others use these cores, that measures who has them, and not the memory."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _against_link(plain: tuple[float, float], link: Link | None) -> Finding:
    value = f"{plain[0]:.1f} GB/s to the device, {plain[1]:.1f} to the host"
    if link is None or not link.gigabytes_per_second:
        return ok("plain copies of locked memory", value)
    least = _LEAST_OF_LINK * link.gigabytes_per_second
    limit = f"at least {least:.1f}, {_LEAST_OF_LINK:.0%} of PCIe {link.generation}.0 x{link.width}"
    if min(plain) >= least:
        return ok("plain copies of locked memory", value, limit)
    fix = "somebody else may be using the link; else see lspci -vv for a slot or switch that is slower than the GPU"
    return problem("plain copies of locked memory", value, limit, fix)


def _against_plain(ours: tuple[float, float], plain: tuple[float, float]) -> Finding:
    value = f"{ours[0]:.1f} GB/s to the device, {ours[1]:.1f} to the host, pieces of {PIECE_BYTES >> 10} KiB"
    limit = f"at least {_LEAST_OF_PLAIN:.0%} of plain copies"
    if all(own >= _LEAST_OF_PLAIN * other for own, other in zip(ours, plain, strict=True)):
        return ok("our copies", value, limit)
    fix = "see `kv-connector calibrate`, and set copy_path to what it shows to be fastest"
    return warning("our copies", value, limit, fix)


def _plain(host: HostPool, device: torch.device) -> tuple[float, float]:
    """GB/s to the device and to the host, all of it in copies that are as long as CUDA takes them."""
    import torch

    there = torch.empty_like(host.tensor, device=device)
    pieces = [slice(first, first + host.blocks_per_piece) for first in range(0, host.num_blocks, host.blocks_per_piece)]

    def load() -> None:
        for piece in pieces:
            there[piece].copy_(host.tensor[piece], non_blocking=True)

    def save() -> None:
        for piece in pieces:
            host.tensor[piece].copy_(there[piece], non_blocking=True)

    num_bytes = host.tensor.numel()
    return _rate(load, num_bytes, device), _rate(save, num_bytes, device)


def _ours(host: HostPool, device: torch.device) -> tuple[float, float]:
    """The same through the transfer engine, block by block in a random order."""
    import numpy as np
    import torch

    from ...config import Config
    from ...errors import TransferError
    from ...transfer.engine import TransferEngine
    from ...transfer.memory.host_form import raw_form
    from ...transfer.memory.layout import CacheLayout
    from ...types import CopyJob, Direction

    caches = {
        f"layer {number}": torch.zeros(host.num_blocks, PIECE_BYTES, dtype=torch.uint8, device=device)
        for number in range(LAYERS)
    }
    layout = CacheLayout.from_tensors(caches, host.num_blocks)
    engine = TransferEngine(raw_form(layout), host, Config(host_memory=host.tensor.numel()))
    rng = np.random.default_rng(0)

    def move(direction: Direction) -> None:
        here, there = (rng.permutation(host.num_blocks).astype(np.int64) for _ in range(2))
        job = CopyJob(0, direction, there, here)
        if direction is Direction.LOAD:
            engine.submit_load([job])
            engine.wait_all()
        else:
            engine.submit_save([job])
        if not all(done.ok for done in engine.drain()):
            raise TransferError("ours have failed: see the warnings in front of this")

    try:
        num_bytes = host.tensor.numel()
        return (
            _rate(lambda: move(Direction.LOAD), num_bytes, device),
            _rate(lambda: move(Direction.SAVE), num_bytes, device),
        )
    finally:
        engine.close()


def _rate(copy: Callable[[], Any], num_bytes: int, device: torch.device) -> float:
    """GB/s, the median of as many as fit into the time, one at least, behind one that nobody counts."""
    import torch

    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 2 or time.perf_counter() < end:
        begin = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return num_bytes / median(times[1:]) / 1e9
