"""Results of benchmarks: where they are, what each is of, and how many of its goals hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "integration" / "bench" / "results"

Row = Mapping[str, Any]
Result = Mapping[str, Any]
Claims = Mapping[str, Row]


def read(name: str) -> dict[str, Any]:
    """One of the results, with the name of its file."""
    path = RESULTS / f"{name}.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content | {"file": path.name}


def rows_of(part: str, *results: Result) -> list[Row]:
    """Those of one kind, of all results."""
    return [row for result in results for row in result["rows"] if row["part"] == part]


def named(result: Result) -> str:
    """The file, when it was measured, of which code, on what."""
    return f"`{result['file']}`, {origin(result)}, {result['hardware']['gpu']}"


def origin(result: Result) -> str:
    """When, and of which code."""
    commit = result.get("commit")  # older results have none
    return f"{result['date'][:10]}, commit {commit[:7]}{'+' * commit.endswith('+')}" if commit else result["date"][:10]


def held(claims: Claims) -> str:
    """How many goals hold."""
    return f"{sum(claim['holds'] for claim in claims.values())} of {len(claims)} goals hold"


def held_or_bold(claims: Claims) -> str:
    """How many goals hold, above a table that has the others in bold."""
    return f"{held(claims)}, bold figures miss theirs."


def held_and_missed(claims: Claims) -> str:
    """How many goals hold, and each that does not."""
    missed = [
        f"`{name}` (**{claim['value']:.3g}**, goal {claim['goal']:g})"
        for name, claim in claims.items()
        if not claim["holds"]
    ]
    return f"{held(claims)}; missed: {', '.join(missed)}." if missed else f"{held(claims)}."
