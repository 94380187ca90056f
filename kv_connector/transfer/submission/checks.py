"""Block ids are checked before a copy is submitted: a wrong one fails its own job and reaches no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidBlockError
from ...types import CopyJob, Direction
from ..paths.base import Int64s

logger = logging.getLogger("kv_connector.transfer")

_NO_IDS = np.zeros(0, dtype=np.int64)


def merged_ids(
    jobs: Sequence[CopyJob], direction: Direction, num_device_blocks: int, num_host_blocks: int
) -> tuple[Int64s, Int64s] | None:
    """Device and host block ids of all jobs, one behind the other and read-only; None if any job has to be refused.

    A few calls for all jobs together, as a step has one for each request. `right_jobs` says which are wrong, and how.
    """
    for job in jobs:
        device, host = job.device_ids, job.host_ids
        if not (isinstance(device, np.ndarray) and isinstance(host, np.ndarray) and job.direction is direction):
            return None
        if not (device.dtype == host.dtype == np.int64 and device.ndim == 1 and device.shape == host.shape):
            return None
    if not jobs:
        return _NO_IDS, _NO_IDS
    # One copy for both sides, which nobody can write to.
    ids = np.concatenate([*(job.device_ids for job in jobs), *(job.host_ids for job in jobs)])
    ids.setflags(write=False)
    count = len(ids) // 2
    device_ids, host_ids = ids[:count], ids[count:]
    if count:
        unsigned = ids.view(np.uint64)  # a negative one is a large one there
        largest = np.maximum.reduce(unsigned[:count]), np.maximum.reduce(unsigned[count:])
        if largest[0] >= num_device_blocks or largest[1] >= num_host_blocks:
            return None
    # Sorted, not marked in a table of all blocks: that would cost every step in proportion to the pool.
    targets = np.sort(device_ids if direction is Direction.LOAD else host_ids)
    return None if np.count_nonzero(targets[1:] == targets[:-1]) else (device_ids, host_ids)


def right_jobs(
    jobs: Sequence[CopyJob], direction: Direction, num_device_blocks: int, num_host_blocks: int
) -> list[CopyJob]:
    """The jobs that can be copied together, in order; a warning is logged for each of the others."""
    taken = np.zeros(num_device_blocks if direction is Direction.LOAD else num_host_blocks, dtype=np.bool_)
    right = []
    for job in jobs:
        try:
            _check_job(job, direction, num_device_blocks, num_host_blocks, taken)
        except InvalidBlockError as error:
            logger.warning("%s job %d failed: %s", direction.value, job.job_id, error)
        else:
            right.append(job)
    return right


def _check_job(
    job: CopyJob, direction: Direction, num_device_blocks: int, num_host_blocks: int, taken: NDArray[np.bool_]
) -> None:
    """Raise InvalidBlockError, naming the value, unless the job can be copied; else mark its destinations in `taken`.

    `taken[b]` says that an earlier job of the same submission writes destination block b.
    """
    if job.direction is not direction:
        raise InvalidBlockError(f"it is a {job.direction.value}, submitted as a {direction.value}")
    _check_ids("device_ids", job.device_ids, num_device_blocks)
    _check_ids("host_ids", job.host_ids, num_host_blocks)
    if len(job.device_ids) != len(job.host_ids):
        raise InvalidBlockError(f"{len(job.device_ids)} device_ids do not pair with {len(job.host_ids)} host_ids")
    name, targets = ("device_ids", job.device_ids) if direction is Direction.LOAD else ("host_ids", job.host_ids)
    distinct, counts = np.unique(targets, return_counts=True)
    if len(distinct) < len(targets):
        raise InvalidBlockError(f"{name} names destination block {distinct[counts > 1][0]} twice")
    if taken[targets].any():
        raise InvalidBlockError(f"{name} names block {targets[taken[targets]][0]}, which an earlier job writes")
    taken[targets] = True


def _check_ids(name: str, ids: NDArray[np.int64], limit: int) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        found = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidBlockError(f"{name} is {found}: give a NumPy array of int64 with one dimension")
    wrong = ids[(ids < 0) | (ids >= limit)]
    if len(wrong):
        raise InvalidBlockError(f"{name} names block {wrong[0]}, outside of the {limit} blocks that are there")
