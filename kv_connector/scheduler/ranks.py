"""What the ranks of an engine said last of themselves: sizes and gauges, and the host blocks they have."""

from __future__ import annotations

from ..errors import InvalidBlockError
from ..index import LEAST_REMEMBERED, CacheTier
from ..types import StepReport


class RankStates:
    """The latest report of each rank; before its first one a rank has nothing. `host` grows as ranks have memory."""

    def __init__(self, world_size: int, host: CacheTier) -> None:
        self._latest = [StepReport(0, rank) for rank in range(world_size)]
        self._host = host
        self._limit: int | None = None
        self.group_blocks = 1
        """Blocks of a prefix that storage keeps as one: where ranks differ the largest, which is a multiple of all."""

    def take_in(self, report: StepReport) -> None:
        """The rank's newest report."""
        self._latest[report.rank] = report
        self.group_blocks = max(self.group_blocks, report.group_blocks)

    def limit_host(self, num_blocks: int | None) -> None:
        """Use at most so many host blocks from now on; None uses all that are ready. Raises InvalidBlockError, and
        changes nothing, for fewer than none."""
        if num_blocks is not None and num_blocks < 0:
            raise InvalidBlockError(f"a host of {num_blocks} blocks is impossible: give 0 or more, or None for all")
        self._limit = num_blocks
        self.fit_host()

    def fit_host(self) -> None:
        """Give the host tier as many blocks as every rank has ready and the operator allows."""
        capacity = min(report.num_host_blocks for report in self._latest)
        if self._limit is not None:
            capacity = min(capacity, self._limit)
        if capacity != self._host.pool.capacity:
            self._host.resize(capacity)
            # Twice as many blocks are known that are gone: who comes back later than that is new to the write policy.
            self._host.tree.max_remembered = max(LEAST_REMEMBERED, 2 * capacity)

    @property
    def reported_step(self) -> int:
        """The last step that every rank has reported."""
        return min(report.step for report in self._latest)

    @property
    def block_bytes(self) -> int:
        """Bytes of a host block over all ranks."""
        return sum(report.block_bytes for report in self._latest)

    def stats(self) -> dict[str, float]:
        """Gauges over all ranks, under names that `DOCUMENTATION` has."""
        return {
            "loading_bytes": sum(report.loading_bytes for report in self._latest),
            "saving_bytes": sum(report.saving_bytes for report in self._latest),
        }
