"""How long a GPU works on something, as its own clock says."""

from __future__ import annotations

from collections.abc import Callable

import torch


def device_ms(work: Callable[[], None]) -> float:
    """Milliseconds of work on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
