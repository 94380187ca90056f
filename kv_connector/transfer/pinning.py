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

from ..errors import TransferError
from . import numa

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_HOST_REGISTER_PORTABLE = 1

logger = logging.getLogger("kv_connector.transfer")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Pinner:
    """Registers `num_bytes` at `address` with CUDA in pieces of `piece_bytes`, in order, and tells of progress.

    `on_progress(bytes_done, failed)` is called on the thread after each piece, and once with `failed` where
    registering stopped; nothing follows that. `cpus` binds the thread, and so the memory, to their NUMA node.
    """

    def __init__(
        self,
        address: int,
        num_bytes: int,
        piece_bytes: int,
        device: torch.device,
        cpus: frozenset[int],
        on_progress: Callable[[int, bool], None],
    ) -> None:
        self._address = address
        self._num_bytes = num_bytes
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
        """Stop after the piece at hand, then unregister everything. Idempotent. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        while self._registered:
            _cudart().cudaHostUnregister(self._registered.pop())

    def _run(self) -> None:
        try:
            if self._cpus:
                numa.bind_thread(self._cpus)
            torch.cuda.set_device(self._device)
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
