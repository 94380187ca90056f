"""The host tier's memory: one mapping of whole blocks, page-locked in the background where there is a GPU."""

from __future__ import annotations

import logging
import weakref

import torch

from ...errors import ConfigError
from ...machine import cgroup_memory, machine_memory
from . import numa
from .host_share import ALONE, HostShare
from .pinning import Pinner

logger = logging.getLogger("kv_connector.transfer")

PIN_PIECE_BYTES = 256 << 20
"""Host memory is registered in pieces of about this many bytes: 0.14 s each on an H200 host (2026-11-21)."""


class HostPool:
    """`num_blocks` host blocks of `block_bytes` in one mapping of exactly that size, which `share` may have several
    ranks map.

    tensor: uint8 of shape (num_blocks, block_bytes), on the CPU, zero at first.
    num_ready_blocks: blocks [0, num_ready_blocks) may be used; it only grows.
    is_pinned: every ready block is page-locked. It can turn False, once, where locking fails.
    blocks_per_piece: one copy may not cross a multiple of this many blocks: CUDA refuses a copy over two registrations.

    With `pin_memory` and a CUDA `device` a background thread locks the memory from block 0 on; otherwise all blocks are
    ready at once. With `numa_bind` that thread, and it alone, runs on the GPU's NUMA node, where the memory then lies;
    of ranks that map one memory each page lies with the first to come to it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        device: torch.device | None = None,
        pin_memory: bool = True,
        numa_bind: bool = True,
        pin_piece_bytes: int = PIN_PIECE_BYTES,
        share: HostShare = ALONE,
    ) -> None:
        """Reserve the memory. Raises ConfigError where the machine or the container has less, or for an impossible
        size."""
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"host pool of {num_blocks} blocks of {block_bytes} bytes: give at least one of each")
        num_bytes = num_blocks * block_bytes
        _check_machine(num_bytes)
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.blocks_per_piece = max(1, pin_piece_bytes // block_bytes)
        mapping = share.map(num_bytes)
        # The mapping goes with its last view, so that nobody who still holds one reads freed memory.
        with torch.inference_mode(False):  # engines register in that mode: see `geometry._view`
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._tensor: torch.Tensor | None = memory.view(num_blocks, block_bytes)
        self._pinner: Pinner | None = None
        self._num_ready_blocks = num_blocks
        self._is_pinned = pin_memory and device is not None and device.type == "cuda"
        if self._is_pinned:
            assert device is not None
            self._num_ready_blocks = 0
            index = torch.cuda.current_device() if device.index is None else device.index
            self._pinner = self._start_pinning(torch.device("cuda", index), numa_bind)
            # A pool that is dropped without `close` must be unregistered all the same: CUDA would go on using its old
            # pages for whatever the system maps at these addresses next. Not at exit, when all memory goes anyway.
            weakref.finalize(self, self._pinner.close).atexit = False

    @classmethod
    def sized(
        cls,
        host_memory: int,
        block_bytes: int,
        *,
        device: torch.device | None = None,
        pin_memory: bool = True,
        numa_bind: bool = True,
        share: HostShare = ALONE,
    ) -> HostPool:
        """The largest pool within `host_memory` bytes a rank that maps it. Raises ConfigError below one block."""
        if host_memory < block_bytes:
            raise ConfigError(
                f"host_memory={host_memory} bytes for this rank is less than one block of {block_bytes} bytes: "
                f"give at least {block_bytes} bytes a rank, or 0 to turn the host tier off"
            )
        num_blocks = host_memory * share.count // block_bytes
        return cls(num_blocks, block_bytes, device=device, pin_memory=pin_memory, numa_bind=numa_bind, share=share)

    @property
    def tensor(self) -> torch.Tensor:
        """All blocks: uint8 of shape (num_blocks, block_bytes). Raises ValueError after `close`."""
        if self._tensor is None:
            raise ValueError("the host pool is closed")
        return self._tensor

    @property
    def num_ready_blocks(self) -> int:
        """How many blocks, counted from block 0, may be used. Safe to read from any thread."""
        return self._num_ready_blocks

    @property
    def is_pinned(self) -> bool:
        """Whether every ready block is page-locked. Safe to read from any thread."""
        return self._is_pinned

    def wait_ready(self) -> None:
        """Block until every block is ready: for benchmarks and tests, not for service."""
        if self._pinner is not None:
            self._pinner.join()

    def close(self) -> None:
        """Stop locking, unlock, and drop the memory. Idempotent. No copy may be under way."""
        if self._pinner is not None:
            self._pinner.close()
            self._pinner = None
        self._is_pinned = False
        self._tensor = None

    def _start_pinning(self, device: torch.device, numa_bind: bool) -> Pinner:
        node = numa.gpu_node(device) if numa_bind else None
        progress = weakref.WeakMethod(self._progress)  # the thread must not keep the pool alive
        return Pinner(
            memory=self.tensor.flatten(),
            piece_bytes=self.blocks_per_piece * self.block_bytes,
            device=device,
            cpus=frozenset() if node is None else numa.node_cpus(node),
            on_progress=lambda *state: (method := progress()) and method(*state),
        )

    def _progress(self, bytes_done: int, failed: bool) -> None:
        if failed:
            self._is_pinned = False  # before the new blocks count: a reader never sees them as pinned
        self._num_ready_blocks = max(self._num_ready_blocks, bytes_done // self.block_bytes)


def _check_machine(num_bytes: int) -> None:
    total, free = machine_memory()
    if num_bytes > total:
        raise ConfigError(
            f"host_memory: {num_bytes} bytes are asked for and the machine has {total}: lower host_memory, "
            "leaving room for the engine's own memory"
        )
    limit, _ = cgroup_memory()
    if limit is not None and num_bytes > limit:
        raise ConfigError(
            f"host_memory: {num_bytes} bytes are asked for and the container may have {limit}: raise its memory limit "
            "to that and what the engine takes without it, or lower host_memory"
        )
    if num_bytes > free:
        logger.warning(
            "host_memory: %d bytes are asked for and %d are free here: the system may end the engine, or others, when "
            "they are used; lower host_memory, or end what else takes memory",
            num_bytes,
            free,
        )
