"""Traces of requests: recorded by the scheduler half, read, and replayed through the index classes.

No torch. `recorder` alone has a thread."""

from .host import POLICIES, HostTier, write_through_lru, write_through_selective
from .sweep import Replayed, sweep
from .trace import Trace, read_trace

__all__ = [
    "POLICIES",
    "HostTier",
    "Replayed",
    "Trace",
    "read_trace",
    "sweep",
    "write_through_lru",
    "write_through_selective",
]
