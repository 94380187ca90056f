"""Config to halves (layer 3): the only place that knows which concrete parts an engine gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .scheduler import SchedulerHalf
    from .worker import WorkerHalf


def build_scheduler(config: Config, block_size: int, world_size: int = 1, **options: Any) -> SchedulerHalf:
    """The scheduler half of one engine. `block_size` in tokens; `options` as for `SchedulerHalf`."""
    from .scheduler import SchedulerHalf

    return SchedulerHalf(config, block_size, world_size, **options)


def build_worker(config: Config, rank: int = 0, world_size: int = 1, **options: Any) -> WorkerHalf:
    """The worker half of one rank; `options` as for `WorkerHalf`. Imports torch."""
    from .worker import WorkerHalf

    return WorkerHalf(config, rank, world_size, **options)
