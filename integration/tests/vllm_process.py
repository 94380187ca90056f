"""Real vLLM engines for tests of another environment: in a process of vLLM's, which is told what to do over a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kv_connector.testing.engine_contract import Answer, Open

ROOT = Path(__file__).parents[2]


def vllm_python() -> Path | None:
    """The Python of the newest of vLLM's environments that `make vllm` has made; None without one."""
    return max(ROOT.glob(".venv-vllm-*/bin/python"), default=None)


class RemoteVllm:
    """The engine that is open in the process; as much of `ContractEngine` as is asked for over the pipe."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self.block_tokens: int
        self.device_tokens: int
        self.num_token_ids: int
        self.block_tokens, self.device_tokens, self.num_token_ids = control.recv()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, salt: str = "") -> list[Answer]:
        return list(self._call("generate", prompts, num_tokens, salt))

    def stats(self) -> Mapping[str, float]:
        return dict(self._call("stats"))

    def check_idle(self) -> None:
        self._call("check_idle")

    def _call(self, name: str, *args: object) -> Any:
        self._control.send((name, args))
        return self._control.recv()


@contextmanager
def vllm_process(python: Path, models: Path) -> Iterator[Open]:
    """What it yields opens engines on the model "dense" of this folder, one after the other. EOFError where the process
    has ended; it has printed why."""
    control, theirs = Pipe()
    with theirs:
        command = [python, "-m", "integration.tests.vllm_process", str(theirs.fileno()), models]
        names = {"PYTHONPATH": "", "PYTHONHASHSEED": "0"}  # no other engine's; a start names blocks as the one before
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | names, pass_fds=[theirs.fileno()])

    @contextmanager
    def open_engine(settings: Mapping[str, Any]) -> Iterator[RemoteVllm]:
        control.send(dict(settings))
        yield RemoteVllm(control)
        control.send(None)

    try:
        yield open_engine
    finally:
        control.close()
        process.wait()


def main() -> None:
    """In the process: an engine for each of the settings that come, which is called until None does."""
    import conftest  # noqa: F401  # where imports come from
    from integration.tests.vllm_contract import opened
    from kv_connector.scheduler.storage import reading

    import_module("vllm.entrypoints.llm")  # at once: it takes seconds, in which other engines start
    reading.STALL_SECONDS = 60.0  # engines share the machine: one that stands still is not a storage that is lost
    with Connection(int(sys.argv[1])) as control:
        while True:
            try:
                settings = control.recv()
            except EOFError:  # nobody asks any more
                return
            with opened(Path(sys.argv[2]), settings) as engine:
                control.send((engine.block_tokens, engine.device_tokens, engine.num_token_ids))
                while (call := control.recv()) is not None:
                    name, args = call
                    control.send(getattr(engine, name)(*args))


if __name__ == "__main__":
    main()
