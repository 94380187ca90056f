"""The blocks of a load, from the request's admission to the copy job (layer 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...base import DeviceBlocks, Request
from ...index import CacheTier, Lookup
from ...types import NO_BLOCK, CopyJob, Direction
from ..ledger import JobLedger
from ..saves.planner import BlockTable
from .choice import LoadMode, LoadPlanner


@dataclass(slots=True)
class LoadLease:
    """Blocks of an admitted request that are leased on both sides and not yet planned."""

    mode: LoadMode
    may_announce: bool = True
    device_ids: list[int] = field(default_factory=list)
    host_ids: list[int] = field(default_factory=list)


class LoadLeases:
    """Leases blocks for loads and opens their jobs; a job's lease ends with the job, in the scheduler half."""

    def __init__(self, lookup: Lookup, host: CacheTier, jobs: JobLedger, planner: LoadPlanner) -> None:
        self._lookup = lookup
        self._host = host
        self._jobs = jobs
        self._planner = planner

    def take(
        self,
        pool: DeviceBlocks,
        request: Request,
        tables: Sequence[BlockTable],
        first: int,
        num_blocks: int,
        mode: LoadMode,
        may_announce: bool = True,
    ) -> LoadLease:
        """Lease what a hit of `num_blocks` blocks from `first` on is made of. `may_announce`: the request waits for
        nothing else, so that it may go on when this load is about to end."""
        hit = self._lookup.hit(request.block_hashes, first, num_blocks)
        lease = LoadLease(mode, may_announce)
        for table, indices, nodes in zip(tables, hit.indices, hit.nodes, strict=True):
            host_ids = self._host.blocks_of(nodes)
            device_ids = table.block_ids[indices.start : indices.stop]
            assert len(host_ids) == len(device_ids), (
                f"{request.request_id} was promised {len(indices)} blocks, not {len(host_ids)}"
            )
            pairs = [pair for pair in zip(device_ids, host_ids, strict=True) if pair[0] != NO_BLOCK]
            lease.device_ids += [device_id for device_id, _ in pairs]
            lease.host_ids += [host_id for _, host_id in pairs]
        pool.touch(lease.device_ids)
        self._host.acquire(lease.host_ids)
        if mode is LoadMode.ASYNC:
            self._planner.reserve(lease.host_ids)
        return lease

    def drop(self, pool: DeviceBlocks, lease: LoadLease) -> None:
        """The request has lost its blocks before the load was planned."""
        pool.free_blocks(lease.device_ids)
        self._host.release(lease.host_ids)
        self._planner.release(lease.host_ids)

    def open(self, lease: LoadLease, request_id: str, used: frozenset[int]) -> CopyJob:
        """The job of a load that is planned now. `used`: device blocks that steps under way still use; in the
        background those come last."""
        if lease.mode is not LoadMode.ASYNC:
            return self._jobs.open(Direction.LOAD, lease.device_ids, lease.host_ids)
        pairs = sorted(zip(lease.device_ids, lease.host_ids, strict=True), key=lambda pair: pair[0] in used)
        device_ids, host_ids = zip(*pairs, strict=True)
        num_guarded = sum(device_id in used for device_id in device_ids)
        job = self._jobs.open(Direction.LOAD, device_ids, host_ids, request_id, num_guarded)
        self._planner.begin(job, lease.may_announce)
        return job
