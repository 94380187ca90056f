"""How much memory this process may have (layer 0)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # kernels write unlimited as a number above any machine


def machine_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Bytes that the machine has, and those of them that are free or would be made free; all where it does not say."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in read_text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return total, min(total, int(value.split()[0]) << 10)
    return total, total


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int | None, int]:
    """The least limit of this process's cgroup and those above it, None for none, and the bytes used there."""
    found: list[tuple[int, int]] = []
    for line in read_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _limits(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _limits(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(found) if found else (None, 0)


def _limits(root: Path, path: str, limit: str, used: str) -> Iterator[tuple[int, int]]:
    """Of a cgroup and all above it, as far as they can be seen: within a container the root is its own."""
    folder = root / path.lstrip("/")
    for place in (folder, *folder.parents):
        text = read_text(place / limit).strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            current = read_text(place / used).strip()
            yield int(text), int(current) if current.isdigit() else 0
        if place == root:
            return


def read_text(path: Path) -> str:
    """Of a file that the system has, "" where it has none."""
    try:
        return path.read_text()
    except OSError:
        return ""
