"""How much memory this process may have, and may lock."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ...machine import cgroup_memory, machine_memory
from ..text import size_text
from .finding import Finding, ok, problem, warning

LEAST_SHM = 1 << 30
"""What NCCL, UCX and engines of several ranks have use for; Docker gives 64 MiB."""
_SPARE = 0.9
"""The share of a machine's memory, or of a container's, that a host pool may take: engine and kernel need the rest."""


def look(host_memory: int, is_pinned: bool | None) -> Iterator[Finding]:
    """`host_memory`: bytes that an engine will have, 0 if not given. `is_pinned`: whether CUDA has locked
    memory of ours just now; None without a GPU."""
    total, free = machine_memory()
    fix = f"give host_memory at most {size_text(_SPARE * free)}, or end what else takes memory here"
    yield _room("memory of the machine", total, host_memory, fix, total - free)
    limit, used = cgroup_memory()
    if limit is None:
        yield ok("memory of the container (cgroup)", "unlimited")
    else:
        fix = "raise the container's memory limit (docker --memory, resources.limits.memory), or lower host_memory"
        yield _room("memory of the container (cgroup)", limit, host_memory, fix, used)
    yield locked_memory(host_memory, is_pinned)
    yield shared_memory(Path("/dev/shm"))


def _room(name: str, total: int, host_memory: int, fix: str, used: int = 0) -> Finding:
    value = size_text(total) + (f", {size_text(used)} of it used" if used else "")
    if not host_memory:
        return ok(name, value)
    limit = f"{size_text(host_memory)} of host_memory within {_SPARE:.0%} of what is free"
    return ok(name, value, limit) if host_memory <= _SPARE * (total - used) else problem(name, value, limit, fix)


def locked_memory(host_memory: int, is_pinned: bool | None) -> Finding:
    """The limit that `ulimit -l` shows, and whether it holds for this process: it is tried."""
    name = "locked memory (ulimit -l)"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok(name, "unlimited")
    needed = f"unlimited, or at least host_memory{f' ({size_text(host_memory)})' if host_memory else ''}"
    if host_memory and soft >= host_memory:
        return ok(name, size_text(soft), needed)
    if _is_above_the_limit():
        return ok(
            name, f"{size_text(soft)}, which does not hold here: this process may lock more (CAP_IPC_LOCK)", needed
        )
    fix = (
        "raise it: `ulimit -l unlimited`, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of a systemd unit, or "
        "give the container the capability IPC_LOCK"
    )
    if is_pinned is None:
        return warning(name, f"{size_text(soft)}; nothing is locked without a GPU", needed, fix)
    if is_pinned:
        return warning(name, f"{size_text(soft)}; CUDA locks more all the same, RDMA would not", needed, fix)
    return problem(name, f"{size_text(soft)}, and CUDA could not lock host memory: copies are slow", needed, fix)


def _is_above_the_limit() -> bool:
    """Whether the limit does not hold for this process, as a capability lifts it: a page is locked under one of 0. More
    than the limit may be more than there is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
        try:
            page = (ctypes.c_char * mmap.PAGESIZE).from_buffer(memory)
            address, length = ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_size_t(mmap.PAGESIZE)
            is_locked: bool = libc.mlock(address, length) == 0
            del page  # unmapping unlocks it
        finally:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    return is_locked


def shared_memory(folder: Path) -> Finding:
    """Of the file system that engines, NCCL and UCX share memory on; ours does not lie there."""
    name = f"shared memory ({folder})"
    fix = "docker run --ipc=host or --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    limit = f"at least {size_text(LEAST_SHM)} for engines of several ranks"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return warning(name, f"not there: {error.strerror}", limit, fix)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    value = f"{size_text(size)}, {size_text(free)} free"
    return ok(name, value, limit) if free >= LEAST_SHM else warning(name, value, limit, fix)
