"""Print what vLLM calls on a connector, as JSON, from its source: for versions that have no build for this machine.

python -m integration.vllm_surface vllm-0.33.0-....whl > integration/tests/vllm_surface_0.33.0.json
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile

_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


def surface(source: str) -> dict[str, list[str]]:
    """The public methods of `KVConnectorBase_V1`, and the parameters of each, `self` or `cls` left out."""
    tree = ast.parse(source)
    (base,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVConnectorBase_V1")
    methods = [node for node in base.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {method.name: _parameters(method) for method in methods}


def _parameters(method: ast.FunctionDef) -> list[str]:
    is_static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in method.decorator_list)
    return [argument.arg for argument in method.args.args][0 if is_static else 1 :]


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        print(json.dumps(surface(wheel.read(_BASE).decode()), indent=1))
