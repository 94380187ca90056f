"""Enqueues a compiled Triton kernel through the driver's own call.

Triton's launcher makes metadata for hooks, converts every argument by its type, and releases the GIL, for which it then
waits again while another thread is busy: several times what the driver's call takes. That counts where a kernel is
launched for every few megabytes.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from triton import knobs

Arguments = list[ctypes.c_int64 | int]
Launch = Callable[[int, int, Arguments], None]
"""`launch(num_programs, stream_handle, arguments)` enqueues a kernel; arguments are addresses and counts, no
constants."""
_MOST_ARGUMENTS = 24


class _Arguments(threading.local):
    """What the driver reads arguments from, eight bytes for each, of which it takes as many as the parameter has. Unset
    ones stay zero: Triton's kernels have pointers to scratch memory at the end."""

    def __init__(self) -> None:
        self.values = (ctypes.c_int64 * _MOST_ARGUMENTS)()
        first = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * _MOST_ARGUMENTS)(*range(first, first + 8 * _MOST_ARGUMENTS, 8))
        self.address = ctypes.addressof(self._pointers)


_arguments = _Arguments()


def launch_of(kernel: Any, constants: tuple[Any, ...]) -> Launch:
    """The launch of a compiled kernel, which `kernel_function[grid](...)` returned; may be called from any thread.
    `constants` are those that follow the arguments. A launch enqueues, and raises RuntimeError where the driver refuses
    it.

    Through the driver where the kernel has the parameters that we know of, and by Triton otherwise.
    """

    def by_triton(num_programs: int, stream: int, arguments: Arguments) -> None:
        kernel[(num_programs, 1, 1)](*arguments, *constants, stream=stream)

    if not _has_known_parameters(kernel):
        return by_triton
    enqueue = _driver().cuLaunchKernel
    enqueue.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function, shared = kernel.function, kernel.metadata.shared
    threads = 32 * kernel.metadata.num_warps

    def by_driver(num_programs: int, stream: int, arguments: Arguments) -> None:
        own = _arguments
        own.values[: len(arguments)] = arguments
        code = enqueue(function, num_programs, 1, 1, threads, 1, 1, shared, stream, own.address, None)
        if code != 0:
            raise RuntimeError(f"cuLaunchKernel of {kernel.name} failed with CUDA error {code}")

    return by_driver


def is_observed() -> bool:
    """Whether a launch hook is set, such as a profiler's: only Triton's own launcher calls it."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@cache
def _driver() -> ctypes.PyDLL:
    """PyDLL keeps the GIL during calls: a launch takes a few microseconds."""
    return ctypes.PyDLL("libcuda.so.1")


def _has_known_parameters(kernel: Any) -> bool:
    """Whether its parameters are the arguments of its signature, and at most pointers to scratch memory that it does
    not use."""
    meta = kernel.metadata
    if any(getattr(meta, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
        return False
    if getattr(meta, "num_ctas", 1) != 1 or getattr(meta, "launch_cooperative_grid", False):
        return False
    types = [str(type_) for type_ in kernel.src.signature.values() if type_ != "constexpr"]
    expected = [64 if type_.startswith("*") else int(type_.lstrip("iu")) for type_ in types]
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", kernel.asm.get("ptx", ""))
    found = [int(bits) for bits in re.findall(r"\.param\s+\.[a-z](\d+)", entry.group(1) if entry else "")]
    scratch = found[len(expected) :]
    return found[: len(expected)] == expected and len(scratch) <= 2 and set(scratch) <= {64}
