"""What `sglang_model` is made of: ranks that meet, pages of a tree, requests, and what is raised."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Wrong(AssertionError):
    """A promise was broken."""


class Meeting:
    """Stands for a process group of threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)


class ThreadRanks:
    """As `Ranks`, of threads."""

    def __init__(self, group: tuple[Meeting, int]) -> None:
        self._meeting, self.rank = group
        self.count = self._meeting.count

    def exchange(self, value: object) -> Sequence[Any]:
        meeting = self._meeting
        meeting.values[self.rank] = value
        meeting.barrier.wait()
        values = list(meeting.values)
        meeting.barrier.wait()
        return values


@dataclass(eq=False)
class Node:
    """A page of the tree. Whoever uses it has locked it and all in front of it."""

    key: str
    page: int
    parent: Node | None
    num_children: int = 0
    num_locks: int = 0
    used: int = 0

    def lock(self, by: int = 1) -> None:
        node: Node | None = self
        while node is not None:
            node.num_locks += by
            assert node.num_locks >= 0
            node = node.parent


@dataclass(eq=False)
class Request:
    rid: str
    keys: list[str]  # of its pages; behind them it has one that is not full, to which decode steps write
    num_steps: int
    pages: list[int] = field(default_factory=list)
    tail: int = 0
    num_known: int = 0  # of its pages when it was admitted: hits, and loaded
    num_owned_by_tree: int = 0
    locked: Node | None = None
    is_over: bool = False
    has_failed: bool = False
    wrong: str = ""
