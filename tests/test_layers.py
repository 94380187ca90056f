"""The table of parts in ARCHITECTURE.md against the source: who may import whom, and that lower layers stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "kv_connector"

THIRD_PARTY = {
    "torch",
    "triton",
    "numpy",
    "cuda",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "prometheus_client",
    "mooncake",
    "isal",
    "obstore",
    "botocore",
    "huggingface_hub",
    "matplotlib",
    "rich",
    "shtab",
    "pynvml",
    "opentelemetry",
}
# One thread and a clock that is passed in: a run is repeatable from a seed.
FORBIDDEN = {
    "threads": {"threading", "asyncio", "concurrent", "multiprocessing", "queue"},
    "clocks": {"time", "datetime"},
}


@dataclass(frozen=True)
class Row:
    """What one part may import beyond the standard library and itself. A dotted entry allows only that module."""

    imports: set[str]
    lazily: set[str]  # of these: only inside functions
    names: set[str]  # in addition, under `if TYPE_CHECKING`: costs nothing at run time
    never: set[str]  # modules of the standard library


def read_table(text: str) -> dict[str, Row]:
    """The table of parts in ARCHITECTURE.md; `layer 0` stands for the parts of that layer."""
    lines = [line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 7]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    layers = {name: int(row[1]) for row in rows for name in _quoted(row[0])}
    zero = {name for name, layer in layers.items() if layer == 0 and name not in ("__init__", "triton_kernels")}
    table = {}
    for names, _, imports, lazily, type_only, never in rows:
        banned = set().union(*(FORBIDDEN[word] for word in FORBIDDEN if word in never))
        for name in _quoted(names):
            may = _quoted(imports) | _quoted(lazily) | (zero if "layer 0" in imports else set())
            table[name] = Row(may - {name}, _quoted(lazily), _quoted(type_only), banned)
    return table


def _quoted(cell: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", cell))


TABLE = read_table((ROOT / "ARCHITECTURE.md").read_text())


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
    name, row = f"`{found.target}`", TABLE[part]
    if found.own and found.target.split(".")[0] == part:
        return None
    if not found.own:
        top = found.target.split(".")[0]
        if top == PACKAGE:
            return f"{name} by its absolute name: a vendored copy has another, write a relative import"
        if top in sys.stdlib_module_names:
            return f"{name}: `{part}` has one thread and its clock passed in" if top in row.never else None
    allowed = row.imports | (row.names if found.type_only else set())
    if not _matches(found.target, allowed - THIRD_PARTY if found.own else allowed & THIRD_PARTY):
        return f"{name}: `{part}` may import {', '.join(sorted(allowed)) or 'only the standard library'}"
    if _matches(found.target, row.lazily) and not (found.lazy or found.type_only):
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
            if part not in TABLE:
                out.append(f"{where}:1: `{part}` has no row in ARCHITECTURE.md: add one")
                continue
            for found in imports(ast.parse(file.read_text(), str(file)), inside):
                if fault := _fault(part, found):
                    out.append(f"{where}:{found.line}: imports {fault}")
    return out


def test_every_import_obeys_the_layers() -> None:
    faults = violations(ROOT)
    assert not faults, "\n" + "\n".join(faults)


def circles(root: Path) -> list[list[str]]:
    """Modules that import one another when they are loaded, as circles of dotted names."""
    graph: dict[str, set[str]] = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        parts = [PACKAGE, *file.relative_to(root / PACKAGE).with_suffix("").parts]
        name = ".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])
        graph[name] = {
            f.target for f in imports(ast.parse(file.read_text()), parts[:-1]) if f.own and not (f.lazy or f.type_only)
        }
    sorter = TopologicalSorter({name: found & graph.keys() - {name} for name, found in graph.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def test_no_module_imports_itself_through_others() -> None:
    assert circles(ROOT) == []


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
    ("kv_connector/scheduler/half.py", "import threading", "imports `threading`: `scheduler` has one thread"),
    ("kv_connector/scheduler/half.py", "from ..worker import WorkerHalf", "imports `worker`"),
    ("kv_connector/scheduler/half.py", "def f():\n    from ..transfer import paths", "imports `transfer`"),
    ("kv_connector/worker/half.py", "from tests.fakes import FakeEngine", "imports `tests.fakes`"),
    ("kv_connector/worker/half.py", "from ..scheduler import SchedulerHalf", "imports `scheduler`"),
    ("kv_connector/worker/half.py", "import integration.mini_engine", "imports `integration.mini_engine`"),
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
