"""Host memory that several ranks of a machine map, for a cache of which all of them hold the same bytes.

Under tensor parallelism each rank of a model with multi-head latent attention (MLA) keeps the whole cache. One copy of
it on the host serves them all: each rank saves its share of the blocks, and loads every block over its own link.

The memory is an anonymous file. Who has made it tells the others where it is, and they open it under `/proc`: nothing
has a name that somebody else could take, no mount limits its size, nobody can change its size, and nothing is left
behind when the engine is killed. Ranks that cannot see each other's files, on two machines or in two containers, keep a
copy each.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError
from ...types import CopyJob

Exchange = Callable[[object], Sequence[object]]
"""Tells all ranks of a group a value, which can be pickled, and returns those of all, in the order of ranks. Each rank
calls it as often as the others, and waits for them."""

logger = logging.getLogger("kv_connector.transfer")


@dataclass(frozen=True, slots=True)
class HostShare:
    """A rank's part in memory that `count` ranks map, of which it is number `index`; by default it has its own.

    file: descriptor of the memory, for `map`, which is called once and closes it (the mapping has one of its own); -1
    for memory of its own.
    """

    index: int = 0
    count: int = 1
    file: int = -1

    def map(self, num_bytes: int) -> mmap.mmap:
        """Memory of this size, which every rank names the same. Raises ConfigError where there is none."""
        if self.file < 0:
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            os.ftruncate(self.file, num_bytes)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return mmap.mmap(self.file, num_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ConfigError(
                f"{num_bytes} bytes of host memory that ranks share cannot be had: {error}; ranks that have taken "
                "another size do not cache the same; else lower host_memory, or raise the limit of files (`ulimit -f`)"
            ) from error
        finally:
            os.close(self.file)

    def own_saves(self, jobs: Sequence[CopyJob]) -> Sequence[CopyJob]:
        """The same jobs, with the blocks that this rank saves: every `count`-th of the host's. A job may have none."""
        if self.count == 1:
            return jobs
        own = [(job, job.host_ids % self.count == self.index) for job in jobs]
        return [replace(job, device_ids=job.device_ids[is_own], host_ids=job.host_ids[is_own]) for job, is_own in own]

    @property
    def uses_storage(self) -> bool:
        """Whether this rank opens storage and does its jobs: the first one does for all, since what a process has
        looked up is what it knows how to read."""
        return self.index == 0


ALONE = HostShare()
"""A rank with memory of its own."""
_MARK_BYTES = 16


class _Offer(NamedTuple):
    """Where a rank's file is to be found; `machine` tells processes apart that do not see each other's. `mark` is what
    the file begins with, until the ranks have found it."""

    machine: tuple[str, str, int]
    process: int
    file: int
    mark: bytes


def share_host(exchange: Exchange) -> HostShare:
    """One memory for the ranks of `exchange` that are on this machine. Every one of them calls it, at the same time.

    Where one of them cannot have it they keep a copy each, which the log says.
    """
    own = _offer()
    offers = exchange(own)
    here = _together(own, offers)
    file = _open(here[0]) if here else -1
    has_opened = exchange((own, file >= 0))
    if own is not None:
        os.close(own.file)  # nobody will open it any more
    if own is not None and len(here) > 1 and all((offer, True) in has_opened for offer in here):
        index = here.index(own)
        if index == 0:
            os.pwrite(file, bytes(_MARK_BYTES), 0)
        return HostShare(index, len(here), file)
    logger.warning("host memory is not shared with the other %d ranks: each keeps a copy", len(offers) - 1)
    if file >= 0:
        os.close(file)
    return ALONE


def _offer() -> _Offer | None:
    """A file of this process, which is its own until others have opened it; None where there is none to be had."""
    mark, file = secrets.token_bytes(_MARK_BYTES), -1
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        file = os.memfd_create("kv_connector", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.pwrite(file, mark, 0)
    except OSError as error:
        logger.warning("host memory cannot be shared: %s", error)
        if file >= 0:
            os.close(file)
        return None
    return _Offer((boot, namespace, os.getuid()), os.getpid(), file, mark)


def _together(own: _Offer | None, offers: Sequence[object]) -> list[_Offer]:
    """The offers of this machine, this rank's own among them; none where a rank has none to make."""
    found = [offer for offer in offers if isinstance(offer, _Offer)]
    if own is None or len(found) < len(offers):
        return []
    return [offer for offer in found if offer.machine == own.machine]


def _open(offer: _Offer) -> int:
    """A descriptor of the offered file; -1 where it is not to be had."""
    file = -1
    try:
        file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
        is_marked = os.pread(file, _MARK_BYTES, 0) == offer.mark
    except OSError as error:  # of the latter where the process is another one by now, and this no file
        logger.warning("the host memory of process %d cannot be opened: %s", offer.process, error)
        is_marked = False
    if is_marked or file < 0:
        return file
    os.close(file)
    return -1
