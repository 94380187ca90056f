"""Faults put back on purpose: does the simulator, or a test, notice?

A mutant is a small textual patch with the command that must fail once it is applied. Each is applied to a copy of the
tree of its own and taken to its command; one that passes has survived, and says that something is not looked at. A
command that fails without the mutant, too, proves nothing: it is unsound.

`make mutants ARGS="--only NAME --json FILE"`; with no `--only` all of them. Exits 1 where one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from . import report

ROOT = Path(__file__).parents[2]
COPIED = ("kv_connector", "triton_kernels", "tests", "integration", "conftest.py", "pyproject.toml", "ARCHITECTURE.md")
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Patch:
    """`old` occurs exactly once in `file` and becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """`command` fails with the fault and passes without it: arguments of Python."""

    name: str
    title: str
    patches: tuple[Patch, ...]
    command: tuple[str, ...]


def simulated(seed: int, worlds: int = 1) -> tuple[str, ...]:
    """Worlds of which one must fail; what fails is not shortened."""
    steps = ("--steps", str(1 << 40))
    return ("-m", "tests.simulation", "--seed", str(seed), "--worlds", str(worlds), *steps, "--shrink-seconds", "0")


def tested(*names: str) -> tuple[str, ...]:
    """Tests of which one must fail."""
    return ("-m", "pytest", "-q", "-x", *names)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "fence-forgotten",
        "the step behind an idle engine's copies does not wait for them",
        (Patch("kv_connector/worker.py", "self._engine.fence()", "pass"),),
        simulated(1, 60),
    ),
    Mutant(
        "guard-forgotten",
        "a background load does not wait for steps that still use its blocks",
        (
            Patch(
                "kv_connector/leases.py",
                "num_guarded = sum(device_id in used for device_id in device_ids)",
                "num_guarded = 0",
            ),
        ),
        simulated(1, 60),
    ),
    Mutant(
        "awaited-forgotten",
        "a step does not wait for the announced loads that it reads",
        (Patch("kv_connector/loads.py", "            if load.is_noted:\n", "            if False:\n"),),
        simulated(1, 60),
    ),
    Mutant(
        "saves-trusted",
        "what was computed behind a failed load is kept",
        (Patch("kv_connector/jobs.py", "entry.failed = True", "entry.failed = entry.failed"),),
        simulated(1, 200),
    ),
    Mutant(
        "save-unordered",
        "a save does not wait for the forward pass that computes its blocks",
        (Patch("kv_connector/transfer/lines.py", "self.lane.follow(submission.position)", "pass"),),
        simulated(1, 60),
    ),
    Mutant(
        "pin-forgotten",
        "blocks of a save are not pinned in the engine's pool",
        (Patch("kv_connector/scheduler.py", "        self._pool.touch(device_ids)\n", ""),),
        simulated(1, 20),
    ),
)


@dataclass(frozen=True)
class Run:
    """Whether the command failed, in how many seconds, and what it said."""

    failed: bool
    seconds: float
    said: str


def apply(mutant: Mutant, tree: Path) -> None:
    """Patch a copy of the tree. Raises ValueError where a patch does not fit exactly once."""
    for patch in mutant.patches:
        path = tree / patch.file
        text = path.read_text()
        if (count := text.count(patch.old)) != 1:
            raise ValueError(f"{mutant.name}: {patch.file} has {count} times {patch.old!r}: it must have it once")
        path.write_text(text.replace(patch.old, patch.new))


def run(command: Sequence[str], mutant: Mutant | None = None) -> Run:
    """The command in a copy of the tree, with the mutant or as it is."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / name)
        if mutant is not None:
            apply(mutant, tree)
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [sys.executable, *command],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Run(False, time.monotonic() - began, "no answer in time")
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith(("seed ", "FAILED", "E "))), "")
        # A run that could not even begin has caught nothing.
        has_failed = ended.returncode == 1 and bool(said)
        said = said or (ended.stderr.strip() or "passes").splitlines()[-1]
        return Run(has_failed, time.monotonic() - began, said)


def main(mutants: Sequence[Mutant] = MUTANTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="name of a mutant; may be given again")
    parser.add_argument("--unchecked", action="store_true", help="take for granted that commands pass without mutants")
    parser.add_argument("--list", action="store_true", help="print names and titles")
    parser.add_argument("--json", type=Path, help="write the result there")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{mutant.name:24} {mutant.title}" for mutant in mutants))
        return 0
    chosen = [mutant for mutant in mutants if not arguments.only or mutant.name in arguments.only]
    rows = []
    sound: dict[tuple[str, ...], Run] = {}
    for mutant in chosen:
        if not arguments.unchecked and mutant.command not in sound:
            sound[mutant.command] = run(mutant.command)
        found, before = run(mutant.command, mutant), sound.get(mutant.command)
        is_caught = found.failed and not (before is not None and before.failed)
        verdict = "caught" if is_caught else "UNSOUND" if found.failed else "SURVIVED"
        rows.append({"name": mutant.name, "title": mutant.title, "caught": is_caught, "seconds": found.seconds})
        print(f"{verdict:9} {found.seconds:6.1f} s  {mutant.name}: {mutant.title}")
        print(f"{'':20}{found.said[:160]}", flush=True)
    num_caught = sum(bool(row["caught"]) for row in rows)
    print(f"{num_caught} of {len(rows)} caught")
    if arguments.json is not None:
        report.write(arguments.json, _result(rows, num_caught, arguments.only))
    return 0 if num_caught == len(rows) else 1


def _result(rows: Sequence[dict[str, object]], num_caught: int, only: Sequence[str]) -> dict[str, object]:
    return {
        "name": "mutants",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": report.commit(),
        "arguments": {"only": list(only)},
        "hardware": report.hardware(),
        "software": report.software(),
        "rows": list(rows),
        "claims": {
            "mutants_caught": report.claim(num_caught, len(rows), "mutants", "higher"),
            "mutants_total": report.claim(len(rows), 1, "mutants", "higher"),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
