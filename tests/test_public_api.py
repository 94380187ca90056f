"""The package's surface: few names, each imported on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import kv_connector

NAMES = {"Config", "build_scheduler", "build_worker", "KVConnectorScheduler", "KVConnectorWorker", "KVConnectorError"}


def test_the_surface_is_what_it_is_meant_to_be() -> None:
    assert set(kv_connector.__all__) == NAMES
    assert len(kv_connector.__all__) == len(NAMES) < 10
    assert set(dir(kv_connector)) == {*NAMES, "__version__"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(kv_connector, name)
    assert value.__name__ == name
    assert value.__doc__
    assert getattr(kv_connector, name) is value


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(kv_connector.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert {alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names} == NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'kv_connector' has no attribute 'Manager'"):
        kv_connector.Manager  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    assert kv_connector.__version__ == metadata.version("kv-connector")


def test_a_star_import_works(tmp_path: Path) -> None:
    code = "from kv_connector import *; print(Config(host_memory='1GiB').host_memory, build_worker.__name__)"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert child.stdout == f"{1 << 30} build_worker\n", child.stderr
