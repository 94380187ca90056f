"""What `doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """A problem keeps something from working, or from working as fast as it should; a warning may."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was seen, what it should be, and what to do where it is not."""

    name: str
    status: Status
    value: str
    limit: str = ""
    fix: str = ""


def ok(name: str, value: str, limit: str = "") -> Finding:
    """All is well."""
    return Finding(name, Status.OK, value, limit)


def warning(name: str, value: str, limit: str, fix: str) -> Finding:
    """Something may not work, or be slow."""
    return Finding(name, Status.WARNING, value, limit, fix)


def problem(name: str, value: str, limit: str, fix: str) -> Finding:
    """Something does not work, or is slow."""
    return Finding(name, Status.PROBLEM, value, limit, fix)
