"""The worker half (layer 2): moves one rank's bytes, decides nothing."""

from .half import WorkerHalf

__all__ = ["WorkerHalf"]
