"""SGLang's processes, forked from one that has imported SGLang: that takes seconds in each that SGLang spawns."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

_IMPORTS = ["sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager", "integration.sglang_watched"]


def start_fork_server() -> None:
    """Once; it has the environment of now, and ends with this process."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(_IMPORTS)
    forkserver.ensure_running()


@contextmanager
def forking() -> Iterator[None]:
    """Engines that are started meanwhile have forks for processes. Not for GPUs, which may be in use by the import."""
    from sglang.srt.entrypoints.engine import Engine

    start_fork_server()
    with (
        patch.object(multiprocessing, "set_start_method"),  # SGLang would have them spawned
        patch.object(Engine, "run_scheduler_process_func", _InThisEnvironment(Engine.run_scheduler_process_func)),
        patch.object(Engine, "run_detokenizer_process_func", _InThisEnvironment(Engine.run_detokenizer_process_func)),
    ):
        yield


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
