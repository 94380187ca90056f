"""Config to halves (layer 3): the only place that knows which concrete parts an engine gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config
    from .index import PrefixTree
    from .scheduler import SchedulerHalf
    from .worker import WorkerHalf


def build_scheduler(
    config: Config, block_size: int, world_size: int = 1, tree: PrefixTree | None = None
) -> SchedulerHalf:
    """The scheduler half of one engine. `block_size` in tokens; `tree` where the engine keeps its blocks in ours."""
    from .scheduler import SchedulerHalf

    return SchedulerHalf(config, block_size, world_size, tree)


def build_worker(config: Config, rank: int = 0, world_size: int = 1) -> WorkerHalf:
    """The worker half of one rank; imports torch."""
    from .worker import WorkerHalf

    return WorkerHalf(config, rank, world_size)
