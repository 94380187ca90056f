"""Block ids are checked before a copy is submitted: a wrong one fails its own job and reaches no other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidBlockError
from ..types import CopyJob, Direction


def check_job(
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
