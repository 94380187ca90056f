"""What of a start of vLLM is the same in every engine of a process is done by the first one only."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
from torch._inductor import compile_fx

_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_freeze = gc.freeze


def prepare_start() -> None:
    """Before each engine of this process.

    From a start to a stop vLLM collects garbage eight times, and walks through a million objects each time if all that
    is imported is among them: some seconds. Here they are set aside for good instead of from one start to its stop, as
    vLLM does it; what an engine has made is not, or it would never be freed.

    A CPU runs what vLLM has compiled for its sampler and embeddings as it is: C++ is compiled for seconds otherwise,
    for every shape and in every process.
    """
    gc.freeze = gc.unfreeze = _leave_as_it_is
    gc.collect()
    if not _engines:
        _freeze()
    if not torch.cuda.is_available():
        compile_fx.compile_fx = _run_as_it_is
        _register_kernels()


def started(llm: Any) -> None:
    """Remember an engine, until it is freed."""
    _engines.add(llm)


def _leave_as_it_is() -> None:
    pass


def _run_as_it_is(module: Any, inputs: Any, **_: Any) -> Any:
    return module.forward


@functools.cache
def _register_kernels() -> None:
    """In place of Triton's: newer versions look for those in all modules with each start."""
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), "register_triton_kernel_overrides"):  # of the object itself, any name is there
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = staticmethod(_leave_as_it_is)
