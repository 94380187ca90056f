"""Which results are of the package's code as it is now: `make bench-check`.

A result names the commit that it measured. It is `current` where the package and its kernels have not changed since,
and `old` where they have, where files had been changed beside that commit (`+`), or where the commit is not known.
Benchmarks, tests and documents may have changed. Pictures and traces are as old as the result of their name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from integration.figures.results import RESULTS, ROOT

CODE = ("kv_connector", "triton_kernels")


@dataclass(frozen=True, slots=True)
class Age:
    """Of one result. `why` is empty where it is current."""

    result: str
    date: str
    commit: str | None
    why: str


def ages(results: Path = RESULTS, root: Path = ROOT) -> Iterator[Age]:
    """Of every JSON file below `results`, the old ones first. `root` is a checkout."""
    found = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        commit = content.get("commit")  # what `kv-connector calibrate` writes has neither commit nor date
        found.append(Age(path.name, content.get("date", "")[:10], commit, why_old(commit, root)))
    yield from sorted(found, key=lambda age: not age.why)


def why_old(commit: str | None, root: Path) -> str:
    """Why a result of this commit is not of the package's code in HEAD; empty where it is."""
    if not commit:
        return "names no commit"
    if commit.endswith("+"):
        return "files had been changed"
    found = subprocess.run(
        ["git", "-C", str(root), "diff", "--quiet", commit, "HEAD", "--", *CODE], capture_output=True
    )
    return {0: "", 1: "the code has changed since"}.get(found.returncode, "the commit is not in this repository")


def main() -> int:
    every = list(ages())
    for age in every:
        commit = (age.commit or "")[:7]
        print(f"{'old' if age.why else 'current':8} {age.date:10}  {commit:7}  {age.result:44} {age.why}".rstrip())
    print(f"{sum(not age.why for age in every)} of {len(every)} results are of the package's code as it is now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
