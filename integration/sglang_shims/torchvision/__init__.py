"""The installed torchvision behind operators that a CPU build of torch lacks.

The wheel on PyPI is built for CUDA, and its own library of operators does not load beside a CPU build: importing it
fails, as it registers fake versions of operators that nobody has defined. No test calls them.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import torch

operators = torch.library.Library("torchvision", "FRAGMENT")
operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_HERE = Path(__file__).resolve().parents[1]
_spec = PathFinder.find_spec("torchvision", [path for path in sys.path if Path(path).resolve() != _HERE])
if _spec is None or _spec.loader is None:
    raise ModuleNotFoundError("torchvision is not installed: see `make sglang`")
sys.modules[__name__] = _module = module_from_spec(_spec)
_module.__dict__["operators"] = operators  # which are gone when it is
_spec.loader.exec_module(_module)
