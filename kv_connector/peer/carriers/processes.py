"""Whether a peer's process has ended, where this machine's kernel can say so: both run here, and see the same PIDs.

What a connection says of a process (it was refused, or reset) is no proof: whoever is in between can say so, too.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 19  # of /proc/PID/stat, behind the name in parentheses: when the process was started (proc(5), 22)


def own_process() -> dict[str, Any]:
    """What this process tells peers of itself: its PID, and where and when that is its own."""
    try:
        return {"boot": _BOOT.read_text().strip(), "namespace": _namespace(), **_numbered(os.getpid())}
    except OSError:
        return {}  # without /proc nobody can know


class PeerProcess:
    """A peer's process, from what it has told of itself over an authenticated link that is open."""

    def __init__(self, told: object) -> None:
        """Anything may be told; who is not here, or says nothing of use, is never known to have ended."""
        self._poll = select.poll()
        if not isinstance(told, Mapping) or type(told.get("pid")) is not int:
            return
        try:
            fd = os.pidfd_open(told["pid"])
            weakref.finalize(self, os.close, fd)
            here = {"boot": _BOOT.read_text().strip(), "namespace": _namespace(), **_numbered(told["pid"])}
        except (OSError, OverflowError):
            return
        if here == told:
            self._poll.register(fd, select.POLLIN)

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return bool(self._poll.poll(0))


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _numbered(pid: int) -> dict[str, int]:
    """A PID, and when its process was started, in ticks: PIDs come again."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {"pid": pid, "start": int(fields[_START_FIELD])}
