"""Host blocks that fetches under way are to fill."""

from __future__ import annotations

from ...types import StorageJob


class Fetches:
    """Knows the fetch that brings a host block, as long as it is waited for, and counts the blocks that fetches hold,
    until they have ended."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Host blocks of fetches that have not ended, among them those of abandoned ones."""
        self._job_of: dict[int, int] = {}  # by host block

    @property
    def bring_any(self) -> bool:
        """Whether any block is on its way."""
        return bool(self._job_of)

    def job_of(self, host_id: int) -> int | None:
        """The fetch that brings this host block."""
        return self._job_of.get(host_id)

    def begun(self, job: StorageJob) -> None:
        """The fetch was opened."""
        self.num_blocks += job.num_blocks
        self._job_of |= dict.fromkeys(job.host_ids.tolist(), job.job_id)

    def ended(self, job: StorageJob) -> None:
        """Every rank has reported the fetch."""
        self.num_blocks -= job.num_blocks
        for host_id in job.host_ids.tolist():
            self._job_of.pop(host_id, None)

    def abandon(self, job_id: int) -> list[int]:
        """The job is not waited for any more; returns its host blocks, which may be written to yet."""
        host_ids = [host_id for host_id, other in self._job_of.items() if other == job_id]
        for host_id in host_ids:
            del self._job_of[host_id]
        return host_ids
