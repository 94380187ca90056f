"""The result of a run, in the form that every benchmark's has: claims, rows, and how often each composition was met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from integration.report import Report
from kv_connector.config import Backup, PeerRole, Prefetch

from .outside import DISK_FAULTS
from .peers import CARRIERS
from .world import Outcome

FLOORS = {
    "drafts planned ahead": 2000,
    "sync loads": 1000,
    "async loads": 1000,
    "guarded loads": 500,
    "announced loads": 500,
    "awaited loads": 500,
    "saves": 10000,
    "fences": 1000,
    "preempted": 1000,
    "preempted with a step under way": 500,
    "waited for pinned blocks": 500,
    "aborted with a step under way": 300,
    "aborted while loading": 20,
    "aborted while running": 300,
    "aborted while preempted": 20,
    "same id again": 500,
    "same id again while its load is under way": 50,
    "reset with loads under way": 100,
    "reset with saves under way": 500,
    "reset with steps under way": 500,
    "weights updated": 300,
    "slept": 100,
    "engine killed": 100,
    "load of the step failed": 50,
    "truncated behind a failed load": 10,
    "asynchronous load failed": 20,
    "engines that remember little": 100,
    "unpinned what was not pinned": 50,
    "session goes on": 500,
    "session goes on behind a reset": 50,
    "reset while a session waits for input": 20,
    "preempted while it is handed over": 100,
    "preempted behind a receive": 50,
    "handed over behind": 3000,
    "handed over at once": 1500,
    "handed over to nobody": 500,
    "handed over without params": 300,
    "params given twice": 500,
    "params to a dead engine": 40,
    "same id again across engines": 200,
    "send done": 2000,
    "send failed": 2000,
    "sends step by step": 3000,
    "receive done": 1000,
    "receive failed": 1000,
    "withdrawn transfers": 2000,
    "cancelled receives": 200,
    "nothing wanted of a transfer": 1000,
    "expired_transfers": 1000,
    "failed load in front of a planned send": 100,
    "aborted producer while waiting": 200,
    "aborted producer while running": 20,
    "aborted consumer while waiting": 100,
    "aborted consumer while loading": 50,
    "aborted consumer while running": 20,
    "reset with sends under way": 1000,
    "reset with receives under way": 300,
    "reset with storage jobs under way": 300,
    "engine killed with sends under way": 40,
    "engine killed with receives under way": 30,
    "engine killed with storage jobs under way": 100,
    "network slow": 100,
    "network slow writes": 100,
    "network cut": 200,
    "network freeze peers": 100,
    **{f"disk {fault}": 100 for fault in DISK_FAULTS},
    **{f"backups {backup.value}": 500 for backup in Backup},
    **{f"look_up {prefetch.value}": 1000 for prefetch in Prefetch},
    **{f"fetch {prefetch.value}": 30 for prefetch in Prefetch},
    "fetch done": 200,
    "fetch failed": 5,
    "back_up done": 2000,
    "back_up failed": 100,
    "cancelled fetches": 500,
    "storage_hit_tokens": 500,
    "peer_hit_tokens": 50000,
    **{f"worlds with {carrier}": 50 for carrier in CARRIERS},
    **{f"engines that are {role.value}": 100 for role in PeerRole},
    "engines with storage": 200,
    "engines with storage and peers": 100,
    "worlds asynchronous with drafts": 100,
    "worlds with ranks": 100,
    "worlds with pipelines": 30,
    "worlds with windows": 50,
    "worlds with write_back": 50,
    "worlds with write_through": 50,
    "worlds with write_through_selective": 50,
}
"""How often each must be met in a million steps: what never occurs proves nothing. Fewer steps, so much less."""
_KINDS = {"token": "wrong_tokens", "stuck": "stuck_requests", "leak": "leaks"}


def write(path: Path, outcomes: Sequence[Outcome], num_steps: int, met: Counter[str]) -> None:
    """The object of `simulation.json`; `num_steps` is how many were asked for."""
    report = Report("simulation")
    steps = sum(outcome.num_steps for outcome in outcomes)
    failed = Counter(outcome.violation.kind for outcome in outcomes if outcome.violation is not None)
    for kind, name in _KINDS.items():
        report.claim(name, failed[kind], 0, "worlds", "lower")
    others = sum(count for kind, count in failed.items() if kind not in _KINDS)
    report.claim("broken_invariants", others, 0, "worlds", "lower")
    report.claim("steps", steps, num_steps, "steps", "higher")
    for name, floor in FLOORS.items():
        report.claim(f"met: {name}", met[name], max(1, floor * num_steps // 1_000_000), "times", "higher")
    report.rows += [
        {"seeds": len(outcomes), "steps": steps, "requests": sum(outcome.num_requests for outcome in outcomes)},
        {"met": dict(sorted(met.items()))},
        *({"seed": o.seed, "violation": str(o.violation)} for o in outcomes if o.violation is not None),
    ]
    report.write(path)
