"""One turn of the demo's chats, the table of them, and what the tiers hold behind it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kv_connector.config import WritePolicy

from .engine import MiniEngine

NO_CACHE, DEVICE_ONLY = "no cache", "device cache"
ABOUT = {
    NO_CACHE: "Every prompt is computed from its first token.",
    DEVICE_ONLY: "What the device still holds is not computed again; nothing else is kept.",
    WritePolicy.ADAPTIVE.value: "Saved to the host when computed, unless what would have to go for it is worth more.",
    WritePolicy.WRITE_THROUGH.value: "Saved to the host when it is computed.",
    WritePolicy.WRITE_THROUGH_SELECTIVE.value: "Saved to the host once it has been asked for again.",
    WritePolicy.WRITE_BACK.value: "Saved to the host just before the device needs its room.",
}
"""What a block is done with, by way of caching."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One user's turn under one way of caching. Times in seconds."""

    way: str
    user: int
    turn: int
    prompt: tuple[int, ...]
    device_hit_tokens: int
    host_hit_tokens: int
    ttft: float
    answer: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """As the results have it: without the tokens themselves."""
        row = asdict(self)
        del row["answer"], row["prompt"]
        return row | {"prompt_tokens": len(self.prompt)}


def print_progress(text: str = "") -> None:
    """On a terminal, what is being waited for, in one line that the next one replaces; nothing elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)


def print_turn(turns: Sequence[Turn]) -> None:
    """The live table's lines for one turn: medians over the users."""
    base = median(turn.ttft for turn in turns if turn.way == NO_CACHE)
    for way in dict.fromkeys(turn.way for turn in turns):
        rows = [turn for turn in turns if turn.way == way]
        times = [1e3 * turn.ttft for turn in rows]
        prompt = median(len(turn.prompt) for turn in rows)
        device, host = median(t.device_hit_tokens for t in rows), median(t.host_hit_tokens for t in rows)
        spread = f"({min(times):.1f}..{max(times):.1f})"
        speedup = f"{base / median(turn.ttft for turn in rows):.1f} x" if way != NO_CACHE else ""
        number = f"{rows[0].turn + 1:4}" if way == NO_CACHE else ""
        print(
            f"{number:4}  {way:23} {prompt:7.0f}  {device:10.0f}  {host:8.0f}  {prompt - device - host:8.0f}  "
            f"{median(times):8.1f} {spread:18} {speedup:>8}",
            flush=True,
        )


def print_statistics(way: str, engine: MiniEngine) -> None:
    """What the connector counted."""
    if engine.connector is None:
        return
    stats = engine.connector.get_kv_connector_stats()
    print(
        f"{way}: saved {stats['saved_blocks']:.0f} blocks ({stats['saved_bytes'] / 1e6:.0f} MB; "
        f"{stats['saves_on_compute_blocks']:.0f} when computed, {stats['saves_on_hit_blocks']:.0f} on a hit, "
        f"{stats['saves_on_reuse_blocks']:.0f} before reuse), loaded {stats['loaded_blocks']:.0f} blocks "
        f"({stats['loaded_bytes'] / 1e6:.0f} MB)"
    )


def tiers_of(engine: MiniEngine, block_bytes: int) -> dict[str, dict[str, float]]:
    """By tier, bytes that are cached there, and how many there may be; of storage only what is there."""
    device = engine.scheduler.device
    tiers = {"device": {"bytes": device.num_copies * block_bytes, "capacity": device.pool.capacity * block_bytes}}
    if engine.connector is not None:
        stats = engine.connector.get_kv_connector_stats()
        cached, capacity = stats["host_cached_blocks"] * block_bytes, stats["host_capacity_blocks"] * block_bytes
        tiers["host"] = {"bytes": cached, "capacity": capacity}
        tiers["storage"] = {"bytes": stats.get("storage_stored_bytes", 0.0)}
    return tiers
