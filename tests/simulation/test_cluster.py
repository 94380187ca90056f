"""What a simulated world promises of itself: its seed decides it, and it composes what it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kv_connector.config import PeerRole
from tests.simulation.world import World, simulate

ROOT = Path(__file__).parents[2]
DIGESTS = "from tests.simulation.world import simulate; print([simulate(seed).digest for seed in (44, 53)])"
"""Of a cluster, and of an engine with storage."""


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    runs = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", DIGESTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        runs.append(run.stdout)
    assert runs[0] == runs[1]


def test_the_same_seed_is_the_same_run() -> None:
    first, second = simulate(44), simulate(44)
    assert (first.digest, first.met, first.num_requests) == (second.digest, second.met, second.num_requests)
    assert first.digest != simulate(3).digest


def test_worlds_are_of_every_kind() -> None:
    worlds = [World(seed) for seed in range(100)]
    sizes = {len(world.configs) for world in worlds}
    roles = {config.role for world in worlds for config in world.configs}
    assert sizes == {1, 2, 3, 4}
    assert roles == {None, *PeerRole}
    assert {world.outside.carrier for world in worlds if world.outside.has_peers} == {"staged", "nixl", "cuda_ipc"}
