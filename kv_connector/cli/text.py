"""How values are written for people, and what every command's `add` is given."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TypeAlias

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def size_text(num_bytes: float) -> str:
    """Such as "1.5 GiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def time_text(time_ns: int) -> str:
    """Local time of nanoseconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table: columns as wide as their longest cell, those in `left` flush left and all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{cell:{'<' if number in left else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
