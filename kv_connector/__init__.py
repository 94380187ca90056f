"""KV-cache offloading for LLM engines: blocks that the device evicts are loaded back instead of computed again.

Everything here is imported on first use, so that `import kv_connector` costs nothing: no torch, NumPy or Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import KVConnectorScheduler, KVConnectorWorker
    from .build import build_scheduler, build_worker
    from .config import Config
    from .errors import KVConnectorError

__version__ = "0.1.0"
__all__ = [
    "Config",
    "build_scheduler",
    "build_worker",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "KVConnectorError",
]

_HOME = {
    "Config": ".config",
    "build_scheduler": ".build",
    "build_worker": ".build",
    "KVConnectorScheduler": ".base",
    "KVConnectorWorker": ".base",
    "KVConnectorError": ".errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
