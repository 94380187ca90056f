"""How much Python runs: a count of bytecode instructions, the same on every machine, unlike the time they take."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_instructions(work: Callable[[], object]) -> int:
    """Instructions that `work` executes, in all functions that it calls; loops inside of C count nothing.

    Nor does what others have Python call when it collects garbage, whenever that is.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
