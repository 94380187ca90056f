"""The scheduler half (layer 2): knows what is cached where, decides what is copied, moves no byte."""

from .half import SchedulerHalf

__all__ = ["SchedulerHalf"]
