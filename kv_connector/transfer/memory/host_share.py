"""Host memory that several ranks of a machine map, for a cache of which all of them hold the same bytes.

Under tensor parallelism each rank of a model with multi-head latent attention (MLA) keeps the whole cache. One copy of
it on the host serves them all: each rank saves its share of the blocks, and loads every block over its own link.

The memory is an anonymous file. Who has made it tells the others where it is, and they open it under `/proc`: nothing
has a name that somebody else could take, no mount limits its size, and nothing is left behind when the engine is
killed. Ranks that cannot see each other's files, on two machines or in two containers, keep a copy each.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...types import CopyJob, StorageJob

Exchange = Callable[[object], Sequence[object]]
"""Tells all ranks of a group a value, which can be pickled, and returns those of all, in the order of ranks. Each rank
calls it as often as the others, and waits for them."""

logger = logging.getLogger("kv_connector.transfer")


@dataclass(frozen=True, slots=True)
class HostShare:
    """A rank's part in memory that `count` ranks map, of which it is number `index`; by default it has its own.

    file: descriptor of the memory, for `map`, which is called once and closes it; -1 for memory of its own.
    """

    index: int = 0
    count: int = 1
    file: int = -1

    def map(self, num_bytes: int) -> mmap.mmap:
        """Memory of this size, zero at first: every rank names the same. Raises OSError where there is none."""
        if self.file < 0:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            os.ftruncate(self.file, num_bytes)
            return mmap.mmap(self.file, num_bytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(self.file)

    def own_saves(self, jobs: Sequence[CopyJob]) -> Sequence[CopyJob]:
        """The same jobs, with the blocks that this rank saves: every `count`-th of the host's. A job may have none."""
        if self.count == 1:
            return jobs
        own = [(job, job.host_ids % self.count == self.index) for job in jobs]
        return [replace(job, device_ids=job.device_ids[is_own], host_ids=job.host_ids[is_own]) for job, is_own in own]

    def carries_out(self, job: StorageJob) -> bool:
        """Whether this rank reads, writes or looks up what all of them share; the others have nothing to do."""
        return job.job_id % self.count == self.index


ALONE = HostShare()
"""A rank with memory of its own."""


class _Offer(NamedTuple):
    """Where a rank's file is to be found; `machine` tells processes apart that do not see each other's."""

    machine: tuple[str, str, int]
    process: int
    file: int
    inode: int


def share_host(exchange: Exchange) -> HostShare:
    """One memory for the ranks of `exchange` that are on this machine. Every one of them calls it, at the same time.

    Those that find that one of them cannot open it keep a copy each, and say so in the log.
    """
    own = _offer()
    offers = exchange(own)
    here = [rank for rank, offer in enumerate(offers) if isinstance(offer, _Offer) and offer.machine == own.machine]
    first, index = offers[here[0]], here.index(offers.index(own))
    assert isinstance(first, _Offer), "ranks are here whose offers are"
    file = _open(first) if index else os.dup(own.file)
    has_opened = exchange(file >= 0)
    os.close(own.file)  # nobody will open it any more
    if len(here) > 1 and all(has_opened[rank] for rank in here):
        return HostShare(index, len(here), file)
    logger.warning("host memory is not shared with the other %d ranks: each keeps a copy", len(offers) - 1)
    if file >= 0:
        os.close(file)
    return ALONE


def _offer() -> _Offer:
    file = os.memfd_create("kv_connector", os.MFD_CLOEXEC)
    namespace = os.readlink("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _Offer((boot, namespace, os.getuid()), os.getpid(), file, os.fstat(file).st_ino)


def _open(offer: _Offer) -> int:
    """A descriptor of the offered file; -1 where it is not to be had."""
    try:
        file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("the host memory of process %d cannot be opened: %s", offer.process, error)
        return -1
    if os.fstat(file).st_ino == offer.inode:
        return file
    os.close(file)
    return -1
