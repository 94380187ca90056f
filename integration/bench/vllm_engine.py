"""vLLM engines for the benchmarks: each is a process of its own, with one connector, and runs what it is sent.

All engines of a comparison run beside each other on one device and one at a time is active, so that both sides are
measured in one run without paying for start-up twice. The engine core lives in the child's own process: its statistics
can be read, and requests can arrive while it steps. Every wait has a limit, and a child that dies or hangs is an
`EngineError` with the end of its log; the benchmark goes on with the others, and so it does where an engine is not what
its name says (`vllm_peers.fault`). Random weights of Llama-3.1-8B's shape, the same in all engines, and large enough
that an answer depends on the whole prompt: with vLLM's own dummy weights it is that of the last token alone, and a load
that brought nothing would not be seen.
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
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from integration.bench.vllm_options import EngineOptions
from integration.bench.vllm_peers import fault, parse_connector, slug, transfer_config

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

P = ParamSpec("P")
R = TypeVar("R")

_NUDGES = 3  # some connectors begin a save, or notice that one ended, only in a later step


class EngineError(RuntimeError):
    """An engine failed to start, raised, died or hung."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One `generate` with one output token: its wall time, how many tokens of the prompt were in a cache, the token."""

    ms: float
    cached_tokens: int
    token: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent by a child that serves: seconds from its start to the engine and to its first token; statistics then."""

    engine_seconds: float
    first_token_seconds: float
    stats: dict[str, float]
    fault: str = ""  # why it is not what its name says


class EngineServer:
    """The child's side: functions that the parent sends are called with this."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self.options = options
        self.kept: Any = None  # what a benchmark keeps here from one call to the next
        transfer = transfer_config(options.connector, options.host_bytes, options.ours)
        blocks = options.device_tokens // options.block_size + 1  # one is no request's: it stands for absent ones
        self.llm = LLM(
            model=str(options.logs),
            load_format=_register_weights(),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype="float32" if options.tiny else "bfloat16",
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=2048 if options.tiny else 16384,
            enforce_eager=options.eager or options.tiny,
            enable_prefix_caching=True,
            # The size is given: several engines that start at a time would each find the others' memory in a profile.
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=blocks * options.block_size * options.bytes_per_token,
            num_gpu_blocks_override=blocks if options.tiny else None,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        self._params = SamplingParams
        self._core = self.llm.llm_engine.engine_core.engine_core
        self._random = np.random.default_rng(3 * 10**6)

    @property
    def scheduler(self) -> Any:
        """vLLM's."""
        return self._core.scheduler

    def params(self, max_tokens: int) -> Any:
        """Greedy, of exactly so many tokens."""
        return self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    def generate(self, token_ids: Sequence[int]) -> Sample:
        """Time to first token of one prompt, with nothing else in the engine."""
        prompt, params = {"prompt_token_ids": list(token_ids)}, self.params(1)
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        (token,) = output.outputs[0].token_ids
        return Sample(1e3 * (time.perf_counter() - start), output.num_cached_tokens or 0, token)

    def submit(self, name: str, token_ids: Sequence[int], max_tokens: int) -> None:
        """Add a request; `step` answers it, under this name."""
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(token_ids)}, self.params(max_tokens))

    def step(self) -> list[Any]:
        """One step of the engine; vLLM's outputs, each with all tokens of its request so far."""
        return list(self.llm.llm_engine.step())

    @property
    def busy(self) -> bool:
        """Whether there is a reason to step: requests, a batch in flight, or a connector with work under way."""
        return bool(self.scheduler.has_requests() or self._core.batch_queue)

    def settle(self, seconds: float = 20.0) -> bool:
        """Step until all saves have arrived; False where that did not happen in time."""
        deadline = time.monotonic() + seconds
        for _ in range(_NUDGES):
            self.generate([1])
            while self.busy and time.monotonic() < deadline:
                self.step()
        return not self.busy

    def clear_device(self) -> str:
        """Forget every prefix on the device and none on the host; returns how: a reset, or other prompts."""
        self.settle()
        if self.llm.reset_prefix_cache():
            return "reset"
        length = min(8192, self.options.max_model_len - 1, self.options.device_tokens)
        for _ in range(self.options.device_tokens // length + 1):
            self.generate(self._random.integers(3, 500, length).tolist())
        self.settle()
        return "fillers"

    def stats(self) -> dict[str, float]:
        """Sums of our connector since start-up; nothing for others."""
        if not parse_connector(self.options.connector).is_ours:
            return {}
        return dict(self.scheduler.connector._scheduler.half.get_kv_connector_stats())

    def wait_for_host(self, seconds: float = 120.0) -> dict[str, float]:
        """Wait until all host memory of ours is ready; returns the statistics."""
        block_bytes = self.options.block_size * self.options.bytes_per_token
        wanted = self.options.host_bytes // block_bytes - 1 if self.stats() else 0
        deadline = time.monotonic() + seconds
        while self.stats().get("host_capacity_blocks", 0) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
            self.generate([1])
        return self.stats()


class Engine:
    """The parent's side of one engine. `name` is its connector."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the child; `wait_ready` must follow."""
        context = multiprocessing.get_context("spawn")
        self.name = options.connector
        self.log = options.logs / f"{slug(options.connector)}_{time.strftime('%H%M%S')}.log"
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


def _register_weights() -> str:
    """Tell vLLM of weights that are its dummy ones times a power of two; returns the name to load them by.

    Those are so small, in the norms as well, that what attention adds to a token's embedding is lost in rounding.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class Loader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            for parameter in model.parameters():
                parameter.data.mul_(256)

    register_model_loader("dummy_times_256")(Loader)
    return "dummy_times_256"


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
        server = EngineServer(options)
        engine_seconds = time.time() - started
        server.generate(range(3, 3 + options.block_size))
        reason = fault(options.connector, log.read_text(errors="replace"))
        ready = Ready(engine_seconds, time.time() - started, server.stats(), reason)
        connection.send((True, ready))
    except Exception as error:  # noqa: BLE001 - the child's top: whatever vLLM raises goes to the parent.
        traceback.print_exc()
        connection.send((False, f"did not start: {error}"))
        return
    with contextlib.suppress(EOFError):  # the parent is gone
        while (command := connection.recv()) is not None:
            function, args, kwargs = command
            try:
                connection.send((True, function(server, *args, **kwargs)))
            except Exception as error:  # noqa: BLE001 - the child's top: whatever vLLM raises goes to the parent.
                traceback.print_exc()
                connection.send((False, f"{function.__name__} raised {type(error).__name__}: {error}"))
