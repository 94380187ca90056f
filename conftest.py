"""For every test, in tests/ and in integration/tests/: what the machine can run, and where imports come from."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

# Test models are tiny: a second thread only waits, and costs tenfold where the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = str(Path(__file__).parent)
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so set before any is imported


class _RootFinder(FileFinder):
    """The repository root without `triton_kernels`: that name is another project's, ours is inside kv_connector."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if fullname == "triton_kernels" else super().find_spec(fullname, target)


# On the path for `integration` and `tests`, also in processes that a test spawns.
if ROOT not in sys.path:
    sys.path.append(ROOT)
sys.path_importer_cache[ROOT] = _RootFinder(ROOT, (SourceFileLoader, SOURCE_SUFFIXES))


def _missing(item: pytest.Item) -> str | None:
    """Why this machine cannot run the test, or None."""
    num_devices = torch.cuda.device_count() if HAS_CUDA else 0
    if item.get_closest_marker("multi_gpu") and num_devices < 2:
        return f"multi_gpu: needs 2 CUDA devices, this machine has {num_devices}"
    if item.get_closest_marker("gpu") and not num_devices:
        return "gpu: needs a CUDA device, torch sees none here"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _missing(item):
            item.add_marker(pytest.mark.skip(reason=reason))


_status = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that has used NIXL 1.5.1's wheel dies when it exits, in a destructor of the libnl that comes with it
    (`rtnl_tc_unregister`), whatever was closed before: this one leaves without running destructors."""
    from integration.servers import SHARED  # the root was not on the path when this file was read

    SHARED.close()
    if any(name in sys.modules for name in ("nixl_cu12", "nixl_cu13")) and _status in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_status])
