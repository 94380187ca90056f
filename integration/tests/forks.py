"""Engines' processes, forked from one that has imported the engine: that takes seconds in each that is spawned. Not for
GPUs, which may be in use by the import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any
from unittest.mock import patch

import torch

_IMPORTS_OF_SGLANG = [
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "integration.sglang_watched",
]
_IMPORTS_OF_VLLM = [
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "kv_connector.engines.vllm",
    "integration.tests.vllm_engines",
    "integration.tests.vllm_preloaded",
]


def _start_fork_server(imports: Sequence[str]) -> None:
    """Once; it has the environment of now, and ends with this process."""
    multiprocessing.set_forkserver_preload(list(imports))
    forkserver.ensure_running()


@contextmanager
def forking_sglang() -> Iterator[None]:
    """SGLang's engines that are started meanwhile have forks for processes."""
    from sglang.srt.entrypoints.engine import Engine

    multiprocessing.set_start_method("forkserver", force=True)
    _start_fork_server(_IMPORTS_OF_SGLANG)
    with (
        patch.object(multiprocessing, "set_start_method"),  # SGLang would have them spawned
        patch.object(Engine, "run_scheduler_process_func", _InThisEnvironment(Engine.run_scheduler_process_func)),
        patch.object(Engine, "run_detokenizer_process_func", _InThisEnvironment(Engine.run_detokenizer_process_func)),
    ):
        yield


@contextmanager
def forking_vllm() -> Iterator[None]:
    """Engines of vLLM in processes of their own, and ranks, that are started meanwhile are forks."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    _start_fork_server(_IMPORTS_OF_VLLM)
    with (
        patch.object(utils, "get_mp_context", ForkingVllm),
        patch.object(multiproc_executor, "get_mp_context", ForkingVllm),
    ):
        yield


def vllm_context() -> BaseContext:
    """For processes of tests that start vLLM's engines: forks, but where there are GPUs."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    _start_fork_server(_IMPORTS_OF_VLLM)
    return ForkingVllm()


class _VllmProcess(ForkServerProcess):
    """With the environment of the process that starts it."""

    def __init__(self, target: Callable[..., Any], **options: Any) -> None:
        super().__init__(target=_InThisEnvironment(target), **options)


class ForkingVllm(ForkServerContext):
    Process = _VllmProcess  # type: ignore[assignment]


@dataclass(frozen=True)
class _InThisEnvironment:
    """Is the function in the process that it is sent to, which then has the environment of the one that sends it."""

    function: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_environment, (dict(os.environ), self.function)


def _with_environment(variables: dict[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
    os.environ.clear()
    os.environ.update(variables)
    return function
