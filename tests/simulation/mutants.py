"""Faults put back on purpose: does the simulator, or a test, notice?

A mutant (see `faults/`) is a small textual patch with the command that must fail once it is applied. Each is applied to
a copy of the tree of its own and taken to its command; one that passes has survived, and says that something is not
looked at. A command that fails without the mutant, too, proves nothing: it is unsound. One whose virtual environment is
not there is skipped.

`make mutants ARGS="--only NAME --json FILE"`; with no `--only` all of them. Exits 1 where one survives or is unsound.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.report import Report

from .faults import MUTANTS
from .faults.mutant import Mutant, tested, tests_of

ROOT = Path(__file__).parents[2]
COPIED = ("kv_connector", "triton_kernels", "tests", "integration", "conftest.py", "pyproject.toml", "ARCHITECTURE.md")
LIMIT_SECONDS = 300
CHECK_SECONDS = 1800
"""For a mutant, and for a check of all that catches some."""
AT_ONCE = 2
"""Mutants run beside each other, by one thread each."""


@dataclass(frozen=True)
class Run:
    """Whether the command passed, or failed by what it looked for (else it could not even begin, or hung), in how many
    seconds, and what it said."""

    passed: bool
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


def interpreter(environment: str) -> Path:
    """Python of a virtual environment of this checkout, or the one that runs this."""
    return ROOT / environment / "bin" / "python" if environment else Path(sys.executable)


def run(command: Sequence[str], environment: str, mutant: Mutant | None = None, seconds: float = LIMIT_SECONDS) -> Run:
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
        variables = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [str(interpreter(environment)), *command],
                cwd=tree,
                env=variables,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Run(False, False, time.monotonic() - began, "no answer in time")
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith(("seed ", "FAILED", "E "))), "")
        # A run that could not even begin has caught nothing.
        has_failed = ended.returncode == 1 and bool(said)
        said = said or (ended.stderr.strip() or "passes").splitlines()[-1]
        return Run(ended.returncode == 0, has_failed, time.monotonic() - began, said)


class Commands:
    """Which commands pass without a mutant: tests of an environment are run all at once, and one by one only where some
    of them fail; each once, whoever asks first."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self._mutants = mutants
        self._lock = threading.Lock()
        self._passed: dict[tuple[tuple[str, ...], str], Future[bool]] = {}

    def passes(self, mutant: Mutant) -> bool:
        """Whether the mutant's command passes without it. Waits where somebody else is about to find out."""
        command, environment = mutant.command, mutant.environment
        others = [other.command for other in self._mutants if other.environment == environment]
        names = [name for other in others for name in tests_of(other)]
        if tests_of(command) and self._passes(tested(*dict.fromkeys(names)), environment):
            return True
        return self._passes(command, environment)

    def _passes(self, command: tuple[str, ...], environment: str) -> bool:
        with self._lock:
            is_first = (command, environment) not in self._passed
            future = self._passed.setdefault((command, environment), Future())
        if is_first:
            try:
                future.set_result(run(command, environment, seconds=CHECK_SECONDS).passed)
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()


def judge(mutant: Mutant, commands: Commands | None) -> dict[str, object]:
    """A row of the result; `commands` find out whether what fails passes without the mutant."""
    row: dict[str, object] = {"name": mutant.name, "title": mutant.title, "command": " ".join(mutant.command)}
    if not interpreter(mutant.environment).exists():
        return row | {"verdict": "skipped", "seconds": 0.0, "said": f"needs {mutant.environment}"}
    found = run(mutant.command, mutant.environment, mutant)
    verdict = "caught" if found.failed else "survived"
    if found.failed and commands is not None and not commands.passes(mutant):
        verdict = "unsound"
    return row | {"verdict": verdict, "seconds": round(found.seconds, 1), "said": found.said}


def main(mutants: Sequence[Mutant] = MUTANTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="name of a mutant; may be given again")
    parser.add_argument("--unchecked", action="store_true", help="take for granted that commands pass without mutants")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="so many run beside each other")
    parser.add_argument("--list", action="store_true", help="print names and titles")
    parser.add_argument("--json", type=Path, help="write the result there")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{mutant.name:32} {mutant.title}" for mutant in mutants))
        return 0
    chosen = [mutant for mutant in mutants if not arguments.only or mutant.name in arguments.only]
    commands = None if arguments.unchecked else Commands(chosen)
    rows = []
    with ThreadPoolExecutor(arguments.at_once) as threads:
        for future in as_completed([threads.submit(judge, mutant, commands) for mutant in chosen]):
            row = future.result()
            rows.append(row)
            print(f"{row['verdict']:9} {row['seconds']:6.1f} s  {row['name']}: {row['title']}")
            print(f"{'':20}{str(row['said'])[:160]}", flush=True)
    verdicts = Counter(row["verdict"] for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    if arguments.json is not None:
        order = [mutant.name for mutant in chosen]
        rows.sort(key=lambda row: order.index(str(row["name"])))
        _write(arguments.json, rows, verdicts)
    return 1 if verdicts["survived"] or verdicts["unsound"] else 0


def _write(path: Path, rows: Sequence[dict[str, Any]], verdicts: Counter[object]) -> None:
    report = Report("mutants", list(rows))
    report.claim("mutants_caught", verdicts["caught"], len(rows), "mutants", "higher")
    for verdict in ("survived", "unsound", "skipped"):
        report.claim(f"mutants_{verdict}", verdicts[verdict], 0, "mutants", "lower")
    report.write(path)


if __name__ == "__main__":
    sys.exit(main())
