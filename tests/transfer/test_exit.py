"""A process that has copied ends as any other, whatever still holds what copies use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import gc, sys
import numpy as np, torch
from kv_connector.config import Config
from kv_connector.types import CopyJob, Direction, StepPlan
from kv_connector.worker import WorkerHalf

caches = {f"layers.{i}": torch.zeros((64, 16, 4096), dtype=torch.uint8, device="cuda:0") for i in range(4)}
worker = WorkerHalf(Config(host_memory=64 << 20))
worker.register_kv_caches(caches, 64)
for number, direction in enumerate(Direction, 1):
    job = CopyJob(number, direction, np.arange(8), np.arange(8))
    loads = (job,) if direction is Direction.LOAD else ()
    worker.bind_connector_metadata(StepPlan(number, loads, () if loads else (job,)))
    worker.start_load_kv()
    worker.wait_for_save()
    torch.cuda.synchronize()
gc.disable()
if sys.argv[1] == "closed":
    worker.shutdown()
elif sys.argv[1] == "closed and kept":
    worker.shutdown()
    sys.modules["kept"] = worker
elif sys.argv[1] == "dropped":
    del worker
"""


@pytest.mark.parametrize("how", ["closed", "closed and kept", "dropped", "kept"])
def test_a_process_that_has_copied_ends_well(how: str) -> None:
    environment = os.environ | {"PYTHONMALLOC": "debug"}  # what reads freed memory crashes each time
    command = [sys.executable, "-P", "-c", PROGRAM, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
