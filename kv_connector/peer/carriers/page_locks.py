"""Page locking of memory that a device copies to and from, by the CUDA driver."""

from __future__ import annotations

import ctypes

from .cuda_ipc import Driver

_PORTABLE = 1
_CAPTURE_MODE_RELAXED = 2


class PageLocks(Driver):
    """Registers host memory with a device's primary context; one thread calls."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Page-lock memory; it must be unlocked before it is unmapped. Raises PeerError."""
        self.use()
        # An engine may capture a CUDA graph at the time, in a mode that forbids such calls to every thread that has
        # not opted out.
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._check(self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeCaptureMode")
        code = self._cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE)
        self._check(code, f"cuMemHostRegister of {num_bytes} bytes")

    def unlock(self, address: int) -> None:
        """Undo `lock`; no copy may be under way."""
        self.use()
        self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))
