"""The import layers of ARCHITECTURE.md, read from the source: who may import whom, and that lower layers stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "kv_connector"

THIRD_PARTY = {"torch", "triton", "numpy", "cuda", "vllm", "prometheus_client", "mooncake", "matplotlib"}
LAYER_0 = {"types", "errors", "config", "metrics", "events"}

# What each part may import beyond the standard library and itself. A dotted entry allows only that module.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "types": {"errors"},
    "errors": {"types"},
    "config": {"types", "errors"},
    "metrics": {"types", "errors"},
    "events": {"types", "errors"},
    "triton_kernels": {"torch", "triton"},
    "index": {*LAYER_0, "numpy"},
    "transfer": {*LAYER_0, "torch", "numpy", "cuda", "triton_kernels", "matplotlib"},
    "base": {*LAYER_0},
    "storage": {*LAYER_0, "numpy", "mooncake"},
    "peer": {*LAYER_0, "numpy"},
    "jobs": {*LAYER_0, "numpy"},
    "hits": {*LAYER_0, "base", "index"},
    "handovers": {*LAYER_0, "base", "index", "jobs", "numpy"},
    "ranks": {*LAYER_0, "index"},
    "budget": set(),
    "saves": {*LAYER_0, "base", "budget", "index"},
    "loads": {*LAYER_0},
    "leases": {*LAYER_0, "base", "index", "jobs", "loads", "saves"},
    "steps": {*LAYER_0},
    "backups": {*LAYER_0, "index", "jobs"},
    "prefetches": {*LAYER_0, "base", "index", "jobs", "loads"},
    "storing": {*LAYER_0, "backups", "base", "index", "jobs", "loads", "prefetches", "numpy"},
    "endings": {*LAYER_0, "base", "index", "jobs", "handovers", "loads", "saves", "storing"},
    "scheduler": {
        *LAYER_0,
        "base",
        "budget",
        "endings",
        "handovers",
        "hits",
        "index",
        "jobs",
        "leases",
        "loads",
        "ranks",
        "saves",
        "steps",
        "storing",
        "numpy",
    },
    "peering": {*LAYER_0, "numpy", "peer", "transfer"},
    "worker": {*LAYER_0, "base", "peer", "peering", "storage", "transfer", "torch", "numpy"},
    "engines": {*LAYER_0, "base", "index", "build", "vllm", "torch", "prometheus_client"},
    "cli": {*LAYER_0, "storage", "transfer", "torch"},
    "build": {*LAYER_0, "base", "index", "peer", "storage", "transfer", "scheduler", "worker", "torch", "numpy"},
}
# In addition, under `if TYPE_CHECKING`: costs nothing at run time.
MAY_NAME: dict[str, set[str]] = {
    "__init__": {"base", "build", "config", "errors"},
    "types": {"numpy"},
    "base": {"torch"},
}
# Only inside functions, so that the scheduler's process never loads what moves bytes.
ONLY_LAZILY: dict[str, set[str]] = {
    "build": {"peer", "storage", "transfer", "worker", "torch"},
    "storage": {"mooncake"},  # not everybody has it
}
# One thread and a clock that is passed in: a run is repeatable from a seed.
THREADS = {"threading", "asyncio", "concurrent", "multiprocessing", "queue"}
CLOCKS = {"time", "datetime"}
MAY_NOT_IMPORT = {
    "index": THREADS | CLOCKS,
    "jobs": THREADS | CLOCKS,
    "ranks": THREADS | CLOCKS,
    "budget": THREADS | CLOCKS,
    "saves": THREADS | CLOCKS,
    "handovers": THREADS | CLOCKS,
    "hits": THREADS | CLOCKS,
    "loads": THREADS | CLOCKS,
    "leases": THREADS | CLOCKS,
    "endings": THREADS | CLOCKS,
    "steps": THREADS | CLOCKS,
    "backups": THREADS | CLOCKS,
    "prefetches": THREADS | CLOCKS,
    "storing": THREADS | CLOCKS,
    "scheduler": THREADS,
}


@dataclass(frozen=True)
class Import:
    """One imported module; `target` is dotted, relative to the package where `own`."""

    line: int
    target: str
    own: bool
    type_only: bool
    lazy: bool


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _targets(node: ast.Import | ast.ImportFrom, package: list[str]) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names)
    elif not node.level:
        yield node.module or "", False
    else:
        parents = package[: len(package) - node.level + 1]
        stem = parents + (node.module.split(".") if node.module else [])
        for alias in node.names:
            parts = stem if node.module else [*stem, alias.name]
            inside = len(parents) > 0 and parents[0] == PACKAGE
            yield ".".join(parts[1:] if inside else parts), inside


def imports(tree: ast.AST, package: list[str], type_only: bool = False, lazy: bool = False) -> Iterator[Import]:
    """Every import below `tree`, in a module of `package`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            for target, own in _targets(child, package):
                yield Import(child.lineno, target, own, type_only, lazy)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from imports(ast.Module(child.body, []), package, True, lazy)
            yield from imports(ast.Module(child.orelse, []), package, type_only, lazy)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(child, package, type_only, lazy or inside)


def _matches(target: str, entries: set[str]) -> bool:
    return any(target == entry or target.startswith(f"{entry}.") for entry in entries)


def _fault(part: str, found: Import) -> str | None:
    """What is wrong with this import in this part, or None."""
    name = f"`{found.target}`"
    if found.own and found.target.split(".")[0] == part:
        return None
    if not found.own:
        top = found.target.split(".")[0]
        if top == PACKAGE:
            return f"{name} by its absolute name: a vendored copy has another, write a relative import"
        if top in sys.stdlib_module_names:
            banned = top in MAY_NOT_IMPORT.get(part, set())
            return f"{name}: `{part}` has one thread and its clock passed in" if banned else None
    allowed = MAY_IMPORT[part] | (MAY_NAME.get(part, set()) if found.type_only else set())
    if not _matches(found.target, allowed - THIRD_PARTY if found.own else allowed & THIRD_PARTY):
        return f"{name}: `{part}` may import {', '.join(sorted(allowed)) or 'only the standard library'}"
    if _matches(found.target, ONLY_LAZILY.get(part, set())) and not (found.lazy or found.type_only):
        return f"{name} at module level: import it inside the function that needs it"
    return None


def violations(root: Path) -> list[str]:
    """Every import under `root` that the table forbids, as `file:line: imports ...`."""
    out: list[str] = []
    for folder, package in ((root / PACKAGE, [PACKAGE]), (root / "triton_kernels", [PACKAGE, "triton_kernels"])):
        for file in sorted(folder.rglob("*.py")):
            place = file.relative_to(folder)
            inside = [*package, *place.parts[:-1]]
            part = inside[1] if len(inside) > 1 else place.stem
            where = file.relative_to(root)
            if part not in MAY_IMPORT:
                out.append(f"{where}:1: `{part}` has no row in MAY_IMPORT: add one")
                continue
            for found in imports(ast.parse(file.read_text(), str(file)), inside):
                if fault := _fault(part, found):
                    out.append(f"{where}:{found.line}: imports {fault}")
    return out


def test_every_import_obeys_the_layers() -> None:
    faults = violations(ROOT)
    assert not faults, "\n" + "\n".join(faults)


BAD = [
    ("kv_connector/index/tree.py", "import torch", "imports `torch`: `index` may import"),
    ("kv_connector/index/tree.py", "from time import monotonic", "imports `time`: `index` has one thread"),
    ("kv_connector/index/tree.py", "def f():\n    import threading", "imports `threading`"),
    ("kv_connector/index/tree.py", "from ..transfer.engine import Engine", "imports `transfer.engine`"),
    ("kv_connector/index/tree.py", "from .. import worker", "imports `worker`"),
    ("kv_connector/index/tree.py", "from kv_connector.types import Tier", "imports `kv_connector.types` by its abs"),
    ("kv_connector/transfer/engine.py", "import triton_kernels", "imports `triton_kernels`"),
    ("kv_connector/transfer/engine.py", "from ..index import BlockPool", "imports `index`"),
    ("kv_connector/types.py", "import numpy", "imports `numpy`"),
    ("kv_connector/base.py", "import torch", "imports `torch`"),
    ("kv_connector/base.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "imports `torch`"),
    ("kv_connector/scheduler.py", "import threading", "imports `threading`: `scheduler` has one thread"),
    ("kv_connector/scheduler.py", "from .worker import WorkerHalf", "imports `worker`"),
    ("kv_connector/scheduler.py", "def f():\n    from .transfer import paths", "imports `transfer`"),
    ("kv_connector/worker.py", "from tests.fakes import FakeEngine", "imports `tests.fakes`"),
    ("kv_connector/worker.py", "from .scheduler import SchedulerHalf", "imports `scheduler`"),
    ("kv_connector/worker.py", "import integration.mini_engine", "imports `integration.mini_engine`"),
    ("kv_connector/build.py", "from .worker import WorkerHalf", "imports `worker` at module level"),
    ("kv_connector/__init__.py", "from .config import Config", "imports `config`"),
    ("kv_connector/engines_x.py", "import os", "`engines_x` has no row"),
    ("triton_kernels/copy.py", "from ..types import Tier", "imports `types`"),
    ("triton_kernels/copy.py", "import numpy", "imports `numpy`"),
]


@pytest.mark.parametrize(("file", "source", "message"), BAD)
def test_a_forbidden_import_is_named_with_its_place(tmp_path: Path, file: str, source: str, message: str) -> None:
    bad = tmp_path / file
    bad.parent.mkdir(parents=True)
    bad.write_text(f'"""Docstring."""\n\n{source}\n')
    (fault,) = violations(tmp_path)
    line = 1 if "no row" in message else 3 + source.count("\n")
    assert fault.startswith(f"{file}:{line}: ")
    assert message in fault


GOOD = [
    ("kv_connector/base.py", "if TYPE_CHECKING:\n    import torch\n    from .types import StepPlan"),
    ("kv_connector/types.py", "import typing\nif typing.TYPE_CHECKING:\n    import numpy as np"),
    ("kv_connector/build.py", "from .scheduler import SchedulerHalf\ndef f():\n    from .worker import WorkerHalf"),
    ("kv_connector/transfer/paths.py", "from ..triton_kernels.copy import pack\nfrom . import numa\nimport time"),
    ("kv_connector/index/tier.py", "from .pool import BlockPool\nfrom ..types import Tier\nimport numpy as np"),
    ("triton_kernels/copy.py", "import torch\nimport triton.language as tl\nfrom .words import WORD"),
]


@pytest.mark.parametrize(("file", "source"), GOOD)
def test_an_allowed_import_passes(tmp_path: Path, file: str, source: str) -> None:
    good = tmp_path / file
    good.parent.mkdir(parents=True)
    good.write_text(source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("module", ["base", "config", "events", "metrics", "types", "index", "scheduler", "build"])
def test_the_scheduler_side_loads_no_torch(module: str, tmp_path: Path) -> None:
    name = f"{PACKAGE}.{module}"
    code = f"import sys, {name}; print(sorted({{'torch', 'triton'}} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (child.returncode, child.stdout.strip()) == (0, "[]"), child.stderr
