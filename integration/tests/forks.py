"""Engines' processes, forked from one that has imported the engine: that takes seconds in each that is spawned. Not for
GPUs, which may be in use by the import."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from integration.bench import engines

_IMPORTS_OF_SGLANG = [
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    # What these and we import when it is needed: a second of each engine's start.
    "sglang.srt.function_call.function_call_parser",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "torch.utils.cpp_extension",
    "integration.sglang_watched",
    "kv_connector.build",
    "kv_connector.scheduler",
    "kv_connector.transfer.form_choice",
    "kv_connector.transfer.paths.choice",
    "kv_connector.worker",
]
_IMPORTS_OF_VLLM = [
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "kv_connector.engines.vllm",
    "integration.tests.vllm_engines",
    "integration.tests.vllm_preloaded",
]
_SIGNAL_OF_PARENTS_END = 1  # PR_SET_PDEATHSIG of Linux


def _start_fork_server(imports: Sequence[str]) -> None:
    """Once; it has the environment of now, and ends with this process."""
    multiprocessing.set_forkserver_preload(list(imports))
    forkserver.ensure_running()


def start_forks_of_sglang() -> None:
    """Have SGLang imported in the process whose forks `forking_sglang` is about, beside what this one does."""
    _start_fork_server(_IMPORTS_OF_SGLANG)


@contextmanager
def forking_sglang() -> Iterator[None]:
    """SGLang's engines that are started meanwhile have forks for processes."""
    from sglang.srt.entrypoints.engine import Engine

    multiprocessing.set_start_method("forkserver", force=True)
    start_forks_of_sglang()
    with (
        patch.object(multiprocessing, "set_start_method"),  # SGLang would have them spawned
        patch.object(Engine, "run_scheduler_process_func", _InThisEnvironment(Engine.run_scheduler_process_func)),
        patch.object(Engine, "run_detokenizer_process_func", _InThisEnvironment(Engine.run_detokenizer_process_func)),
    ):
        yield


@contextmanager
def forking_benchmarks() -> Iterator[None]:
    """Engines of SGLang's benchmarks that are started meanwhile are forks, and so are the processes of each."""
    start_forks_of_sglang()
    forks = SimpleNamespace(get_context=lambda _: ForkContext())
    with patch.object(engines, "multiprocessing", forks), patch.object(engines, "_serve", _serve_with_forks):
        yield


@contextmanager
def forking_vllm() -> Iterator[None]:
    """Engines of vLLM in processes of their own, and ranks, that are started meanwhile are forks."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    _start_fork_server(_IMPORTS_OF_VLLM)
    with (
        patch.object(utils, "get_mp_context", ForkContext),
        patch.object(multiproc_executor, "get_mp_context", ForkContext),
    ):
        yield


def vllm_context() -> BaseContext:
    """For processes of tests that start vLLM's engines: forks, but where there are GPUs."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    _start_fork_server(_IMPORTS_OF_VLLM)
    return ForkContext()


def _serve_with_forks(*args: Any) -> None:
    """In the benchmark's process of an engine, before that has threads."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register("integration.bench.sglang_models")  # it has looked at the environment of the fork server
    multiprocessing.set_start_method("fork", force=True)
    with patch.object(multiprocessing, "set_start_method"):  # SGLang would have them spawned
        engines._serve(*args)


class _ForkProcess(ForkServerProcess):
    """With the environment of the process that starts it."""

    def __init__(self, target: Callable[..., Any], **options: Any) -> None:
        super().__init__(target=_InThisEnvironment(target), **options)


class ForkContext(ForkServerContext):
    """What is started with it is forked from the fork server, whose imports `_start_fork_server` has said."""

    Process = _ForkProcess  # type: ignore[assignment]


@dataclass(frozen=True)
class _InThisEnvironment:
    """Is the function in the process that it is sent to, which then has the environment of the one that sends it."""

    function: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_environment, (dict(os.environ), self.function)


def _with_environment(variables: dict[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
    _end_with_the_fork_server()
    os.environ.clear()
    os.environ.update(variables)
    return function


def _end_with_the_fork_server() -> None:
    """Of this fork, and let that one end with the tests, however they end. The pipe whose end it waits for is open here
    too, and an engine that waits for requests would keep both for good."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_END, signal.SIGKILL)
