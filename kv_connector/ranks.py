"""What the ranks of an engine said last of themselves (layer 1): sizes and gauges that their reports carry."""

from __future__ import annotations

from .types import StepReport


class RankStates:
    """The latest report of each rank; before its first one a rank has nothing."""

    def __init__(self, world_size: int) -> None:
        self._latest = [StepReport(0, rank) for rank in range(world_size)]

    def take_in(self, report: StepReport) -> None:
        """The rank's newest report."""
        self._latest[report.rank] = report

    @property
    def num_host_blocks(self) -> int:
        """Host blocks that every rank has ready."""
        return min(report.num_host_blocks for report in self._latest)

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
