"""Who makes streams and device memory for copies: the driver, in one place each, and never torch.

What torch gives is the engine's as well: its allocator's memory may be discarded when the engine sleeps, or still be
used by a kernel of the stream that is current, and its streams are the same 32 for everybody. Only a GPU shows the harm
(`test_foreign_contexts.py`); that nothing asks can be seen anywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kv_connector

ROOT = Path(kv_connector.__file__).parent
FOLDERS = (ROOT / "transfer", ROOT / "peer", ROOT / "worker", ROOT.parent / "triton_kernels")
FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randint", "arange", "tensor", "empty_strided"}
LIKE = {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randint")}
CPU_ONLY = {"coded_rows.py"}
"""Modules that get no memory but the CPU's, where it is not tests that call: they take it where their arguments lie."""
METHODS = {"cuda", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "clone"}


def name_of(node: ast.expr) -> str:
    return ast.unparse(node)


def is_empty(call: ast.Call) -> bool:
    """It has no element: a view of somebody else's memory in the making."""
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def of_torch(call: ast.Call) -> bool:
    """Whether the call takes device memory, or a stream, from torch."""
    name = name_of(call.func)
    if name in ("torch.cuda.Stream", "torch.cuda.stream_pool", "torch.Stream"):
        return True
    if name.startswith("torch.") and name.removeprefix("torch.") in FACTORIES | LIKE:
        device = next((keyword.value for keyword in call.keywords if keyword.arg == "device"), None)
        is_cpu = isinstance(device, ast.Constant) and device.value == "cpu"
        return not is_cpu and not is_empty(call)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return method in METHODS or (method == "to" and any(k.arg == "device" for k in call.keywords))


def calls_of_torch(path: Path) -> Iterator[int]:
    """Lines of such calls; those that only run where the device is the CPU are left out."""
    tree = ast.parse(path.read_text())
    on_the_cpu = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and name_of(node.test) == "device.type == 'cpu'"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in on_the_cpu and of_torch(node):
            yield node.lineno


def test_copies_take_neither_streams_nor_device_memory_from_torch() -> None:
    found = [
        f"{path}:{line}"
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py"))
        if path.name not in CPU_ONLY
        for line in calls_of_torch(path)
    ]
    assert found == [], "make streams by make_stream, device memory by device_tensor"
