"""Engines for the benchmarks: each is a process of its own, with one connector, and runs what it is sent.

All engines of a comparison run beside each other on one device and one at a time is active, so that both sides are
measured in one run without paying for start-up twice. Every wait has a limit, and a child that dies or hangs is an
`EngineError` with the end of its log; the benchmark goes on with the others, and so it does where an engine is not what
its name says (`EngineOptions.fault`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from integration.bench.options import EngineOptions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

P = ParamSpec("P")
R = TypeVar("R")


class EngineError(RuntimeError):
    """An engine failed to start, raised, died or hung."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One `generate` with one output token: its wall time, how many tokens of the prompt were in a cache, the token,
    and how many of those were on the device, where the engine says so."""

    ms: float
    cached_tokens: int
    token: int
    device_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent by a child that serves: seconds from its start to the engine and to its first token; statistics then."""

    engine_seconds: float
    first_token_seconds: float
    stats: dict[str, float]
    fault: str = ""  # why it is not what its name says


@dataclass(frozen=True, slots=True)
class Output:
    """Of a request, when it has new tokens. `token_ids`: all of its answer so far. `cached_tokens` of its prompt were
    in a cache, and `host_tokens` of these not on the device, where the engine says so with its answers."""

    name: str
    is_finished: bool
    token_ids: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int = 0


class Phases(Protocol):
    """Follows the requests of one run."""

    def arrived(self, name: str) -> None:
        """A request was submitted."""

    def answered(self, output: Output) -> None:
        """Output of a request."""

    def stop(self) -> dict[str, float]:
        """Figures of those that have finished; `external_tokens` of prompts came from behind the device."""


class EngineServer(Protocol):
    """The child's side: functions that the parent sends are called with this."""

    options: EngineOptions
    kept: Any
    """What a benchmark keeps here from one call to the next."""

    def generate(self, token_ids: Sequence[int]) -> Sample:
        """Time to first token of one prompt, with nothing else in the engine."""

    def generate_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """All prompts at once, answers of exactly so many tokens each."""

    def submit(self, name: str, token_ids: Sequence[int], max_tokens: int) -> None:
        """Add a request; `step` answers it, under this name."""

    def step(self) -> list[Output]:
        """Go on; what has new tokens."""

    def abort(self, names: Sequence[str]) -> None:
        """Give these requests up."""

    @property
    def busy(self) -> bool:
        """Whether there is a reason to step."""

    def settle(self, seconds: float = 20.0) -> bool:
        """Step until all saves have arrived; False where that did not happen in time."""

    def clear_device(self) -> str:
        """Forget every prefix on the device and none on the host; returns how."""

    def follow(self) -> Phases:
        """Follow the requests from now on, until `stop`."""

    def stats(self) -> dict[str, float]:
        """Sums of our connector since start-up; nothing for others."""

    def wait_for_host(self, seconds: float = 120.0) -> dict[str, float]:
        """Wait until all host memory of ours is ready; returns the statistics."""

    def close(self) -> None:
        """Stop the engine; nothing follows."""


def fill_device(server: EngineServer, random: np.random.Generator) -> str:
    """Ask for so many other prompts that the device holds nothing of before; says that it was done so."""
    options = server.options
    length = min(8192, options.max_model_len - 1, options.device_tokens)
    for _ in range(options.device_tokens // length + 1):
        server.generate(random.integers(3, 500, length).tolist())
    server.settle()
    return "fillers"


def wait_for_host(server: EngineServer) -> dict[str, float]:
    """Runs in the engine's process; a function of `EngineServer` itself, sent there, would do nothing."""
    return server.wait_for_host()


class Engine:
    """The parent's side of one engine. `name` is its connector."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the child; `wait_ready` must follow."""
        context = multiprocessing.get_context("spawn")
        self.name = options.connector
        self.log = options.logs / f"{options.name}_{time.strftime('%H%M%S')}.log"
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, options, self.log, time.time()))
        with _environ(options.environment()):
            self._process.start()
        other.close()

    def wait_ready(self, deadline: float) -> Ready:
        """`deadline` is one of `time.monotonic()`. Raises EngineError."""
        ready = self._receive(max(1.0, deadline - time.monotonic()))
        assert isinstance(ready, Ready)
        return ready

    def call(self, function: Callable[Concatenate[EngineServer, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a module's function in the child. Raises EngineError where it takes more than three minutes, too."""
        self.begin(function, *args, **kwargs)
        result: R = self.finish()
        return result

    def begin(
        self, function: Callable[Concatenate[EngineServer, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Let the child begin; `finish` must follow."""
        with contextlib.suppress(OSError):  # of a child that is gone: receiving says so, with its log
            self._connection.send((function, args, kwargs))

    def finish(self) -> Any:
        """What the function that was begun has returned. Raises EngineError as `call` does."""
        return self._receive(180.0)

    def close(self) -> None:
        """Stop the child, by force where it does not stop by itself."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
            self._process.join(15.0)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(15.0)
        self._connection.close()

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self._process.kill()
                raise EngineError(f"{self.name}: no answer in {seconds:.0f} s{self._log_tail()}")
            worked, result = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            raise EngineError(f"{self.name}: exited with {self._process.exitcode}{self._log_tail()}") from None
        if not worked:
            raise EngineError(f"{self.name}: {result}{self._log_tail()}")
        return result

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "".join(f"\n    | {line[:200]}" for line in lines[-12:])


class Engines(dict[str, Engine]):
    """Those that answer, by name; `failed` says in a line why others do not, or are not measured."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}

    def drop(self, name: str, error: EngineError) -> None:
        """Tell of an engine that failed and go on without it."""
        print(f"FAILED  {error}", file=sys.stderr, flush=True)
        self.failed[name] = str(error).splitlines()[0].removeprefix(f"{name}: ")
        self.pop(name).close()

    def each(self, names: Iterable[str], function: Callable[..., R], *args: Any) -> Iterator[tuple[str, R]]:
        """Call a function in one engine after the other; those that fail are dropped."""
        for name in names:
            try:
                yield name, self[name].call(function, *args)
            except EngineError as error:
                self.drop(name, error)

    def everywhere(self, function: Callable[..., R], *args: Any) -> dict[str, R]:
        """The same for all engines."""
        return dict(self.each(list(self), function, *args))

    def at_once(self, function: Callable[..., object], *args: Any) -> None:
        """The same beside each other, for what is not measured."""
        for engine in self.values():
            engine.begin(function, *args)
        for name, engine in list(self.items()):
            try:
                engine.finish()
            except EngineError as error:
                self.drop(name, error)

    def close(self) -> None:
        """Stop all."""
        for engine in self.values():
            engine.close()


def start_engines(wanted: Sequence[EngineOptions], seconds: float) -> tuple[Engines, dict[str, Ready]]:
    """Start engines at the same time. Those that fail, or are not what they are called, are told of and left out."""
    deadline = time.monotonic() + seconds
    engines = Engines()
    engines.update({options.connector: Engine(options) for options in wanted})
    ready = {}
    for name, engine in list(engines.items()):
        try:
            begun = engine.wait_ready(deadline)
            if begun.fault:
                raise EngineError(f"{name}: void: {begun.fault}")
        except EngineError as error:
            engines.drop(name, error)
            continue
        ready[name] = begun
        print(f"{name}: serves {begun.first_token_seconds:.1f} s after its start", flush=True)
    return engines, ready


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    """What is started meanwhile has these variables, before its interpreter begins."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection, options: EngineOptions, log: Path, started: float) -> None:
    """The child's main function."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        server = options.serve()
        engine_seconds = time.time() - started
        server.generate(range(3, 3 + options.block_size))
        reason = options.fault(log.read_text(errors="replace"))
        ready = Ready(engine_seconds, time.time() - started, server.stats(), reason)
        connection.send((True, ready))
    except Exception as error:  # noqa: BLE001 - the child's top: whatever the engine raises goes to the parent.
        traceback.print_exc()
        connection.send((False, f"did not start: {error}"))
        return
    with contextlib.suppress(EOFError):  # the parent is gone
        while (command := connection.recv()) is not None:
            function, args, kwargs = command
            try:
                connection.send((True, function(server, *args, **kwargs)))
            except Exception as error:  # noqa: BLE001 - the child's top: whatever the engine raises goes to the parent.
                traceback.print_exc()
                connection.send((False, f"{function.__name__} raised {type(error).__name__}: {error}"))
    server.close()
