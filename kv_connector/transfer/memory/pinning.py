"""Page locking of one mapping, piece by piece, on a thread of its own.

Threading: `Pinner` owns one daemon thread, which alone registers. `close` stops it, then unregisters. Neither
`madvise` nor `cudaHostRegister` holds the GIL here, so service goes on meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...errors import TransferError
from ..cuda.allocations import index_of
from ..cuda.driver import prepare_thread
from . import numa

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_HOST_REGISTER_PORTABLE = 1

logger = logging.getLogger("kv_connector.transfer")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Pinner:
    """Registers `memory`, uint8 of shape (num_bytes,), with CUDA in pieces of `piece_bytes`, in order.

    It holds the memory until it is unregistered again: pages that CUDA knows must never be unmapped under it.

    `on_progress(bytes_done, failed)` is called on the thread after each piece, and once with `failed` where
    registering stopped; nothing follows that. `cpus` binds the thread, and so the memory, to their NUMA node.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        piece_bytes: int,
        device: torch.device,
        cpus: frozenset[int],
        on_progress: Callable[[int, bool], object],
    ) -> None:
        self._memory: torch.Tensor | None = memory
        self._address = memory.data_ptr()
        self._num_bytes = memory.numel()
        self._piece_bytes = piece_bytes
        self._device = device
        self._cpus = cpus
        self._on_progress = on_progress
        self._registered: list[int] = []
        self._stop = threading.Event()
        self._libc = ctypes.CDLL(None)
        self._thread = threading.Thread(target=self._run, name="kv-connector-pin", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until every piece is registered or registering has stopped."""
        self._thread.join()

    def close(self) -> None:
        """Stop after the piece at hand, wait for the device, then unregister everything. Idempotent."""
        self._stop.set()
        if threading.current_thread() is self._thread:
            return  # the garbage collector called from here: `_run` unregisters on its way out
        self._thread.join()
        self._unregister()

    def _unregister(self) -> None:
        if self._registered and torch.cuda.is_available():
            torch.cuda.synchronize(self._device)
        while self._registered:
            _cudart().cudaHostUnregister(self._registered.pop())
        self._memory = None

    def _run(self) -> None:
        self._register_all()
        if self._stop.is_set():
            self._unregister()

    def _register_all(self) -> None:
        try:
            if self._cpus:
                numa.bind_thread(self._cpus)
            prepare_thread(index_of(self._device))
            # Huge pages make locking faster; a child must not make the parent's locked pages copy-on-write.
            for advice in (_MADV_HUGEPAGE, _MADV_DONTFORK):
                self._advise(0, self._num_bytes, advice)
            for start in range(0, self._num_bytes, self._piece_bytes):
                if self._stop.is_set():
                    return
                self._register(start, min(self._piece_bytes, self._num_bytes - start))
        except Exception as error:  # noqa: BLE001 - a thread's top: whatever the driver raises, the pool goes on unpinned.
            logger.warning("host memory stays unpinned, copies will be slower: %s", error)
            self._on_progress(self._num_bytes, True)

    def _register(self, start: int, size: int) -> None:
        self._advise(start, size, _MADV_POPULATE_WRITE)  # kernels before 5.14 populate while registering
        code = _cudart().cudaHostRegister(self._address + start, size, _HOST_REGISTER_PORTABLE)
        if int(code) != 0:
            raise TransferError(
                f"cudaHostRegister of {size} bytes failed with CUDA error {int(code)}; "
                "raise `ulimit -l` or lower host_memory"
            )
        self._registered.append(self._address + start)
        self._on_progress(start + size, False)

    def _advise(self, start: int, size: int, advice: int) -> None:
        # Through ctypes because mmap.madvise keeps the GIL. Advice that a kernel does not know is no error.
        self._libc.madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(size), ctypes.c_int(advice))
