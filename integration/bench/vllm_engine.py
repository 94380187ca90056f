"""vLLM engines for the benchmarks: each is a process of its own, with one connector, and runs what it is sent.

All engines of a comparison run beside each other on one device and one at a time is active, so that both sides are
measured in one run without paying for start-up twice. The engine core lives in the child's own process: its statistics
can be read, and requests can arrive while it steps. Every wait has a limit, and a child that dies or hangs is an
`EngineError` with the end of its log; the benchmark goes on with the others. Dummy weights of Llama-3.1-8B's shape.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from kv_connector.values import parse_size

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

P = ParamSpec("P")
R = TypeVar("R")

CONNECTORS = {"offloading": "OffloadingConnector", "simple": "SimpleCPUOffloadConnector"}
"""vLLM's own. `none` is no connector; `ours` is ours with `write_through`, `ours:POLICY` with that policy, and
`ours:KEY=VALUE` with that setting; more of them follow after further colons. `producer` and `consumer` hand over."""
ROLES = {"producer": "kv_producer", "consumer": "kv_consumer"}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
TINY = LLAMA_8B | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
_NUDGES = 3  # some connectors begin a save, or notice that one ended, only in a later step


class EngineError(RuntimeError):
    """An engine failed to start, raised, died or hung."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is started with.

    `device_tokens`: size of its KV cache; `logs` holds the model's shape too; `device`: index of its GPU.
    """

    connector: str
    host_bytes: int
    device_tokens: int
    max_model_len: int
    tiny: bool = False
    eager: bool = False
    ours: dict[str, Any] = field(default_factory=dict)
    logs: Path = Path()
    device: int = 0

    @property
    def block_size(self) -> int:
        return 32 if self.tiny else 16

    @property
    def bytes_per_token(self) -> int:
        model = TINY if self.tiny else LLAMA_8B
        values = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
        return int(values * (4 if self.tiny else 2))

    def transfer_config(self) -> dict[str, Any] | None:
        """Arguments of vLLM's KVTransferConfig; None for no connector."""
        name, *settings = self.connector.split(":")
        if name == "none":
            return None
        if name in ROLES:
            return {
                "kv_connector": "TieredKVConnector",
                "kv_connector_module_path": "kv_connector.engines.vllm",
                "kv_role": ROLES[name],
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self.ours,
            }
        if name == "ours":
            given = {"host_memory": self.host_bytes, "write_policy": "write_through"} | self.ours
            for setting in settings:
                key, _, value = setting.rpartition("=")
                given |= {key: json.loads(value)} if key else {"write_policy": value}
            return {
                "kv_connector": "TieredKVConnector",
                "kv_connector_module_path": "kv_connector.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": given,
            }
        return {
            "kv_connector": CONNECTORS[name],
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": self.host_bytes},
        }


def add_arguments(parser: argparse.ArgumentParser, host_memory: str, device_tokens: int) -> None:
    """What all benchmarks of vLLM engines take."""
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--connectors", default="none,offloading,simple,ours", help="of these, and ours:POLICY, ours:KEY=VALUE"
    )
    parser.add_argument("--host-memory", default=host_memory, help="of each engine with a connector")
    parser.add_argument("--device-tokens", type=int, default=device_tokens, help="KV cache of each engine")
    parser.add_argument("--ours-config", type=json.loads, default={}, help="more settings of ours, a JSON object")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small sizes, for a machine without a GPU")
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs and the model's shape")


def unavailable(options: argparse.Namespace) -> str:
    """Why nothing can be measured here; empty where it can."""
    if importlib.util.find_spec("vllm") is None:
        return "no vLLM here: nothing to measure"
    if not options.tiny and not torch.cuda.is_available():
        return "no GPU: nothing to measure (--tiny runs on the CPU)"
    return ""


def engine_options(options: argparse.Namespace, connector: str, max_model_len: int, **ours: Any) -> EngineOptions:
    """From the command line; `ours` are settings of our connector that this benchmark needs."""
    if options.logs is None:
        options.logs = Path(tempfile.mkdtemp(prefix="vllm_bench_"))
    options.logs.mkdir(parents=True, exist_ok=True)
    (options.logs / "config.json").write_text(json.dumps(TINY if options.tiny else LLAMA_8B))
    return EngineOptions(
        connector=connector,
        host_bytes=parse_size(options.host_memory),
        device_tokens=options.device_tokens,
        max_model_len=max_model_len,
        tiny=options.tiny,
        eager=options.eager,
        ours=ours | options.ours_config,
        logs=options.logs.resolve(),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """One `generate` with one output token: its wall time, and how many tokens of the prompt were in a cache."""

    ms: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Sent by a child that serves: seconds from its start to the engine and to its first token; statistics then."""

    engine_seconds: float
    first_token_seconds: float
    stats: dict[str, float]


class EngineServer:
    """The child's side: functions that the parent sends are called with this."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self.options = options
        transfer = options.transfer_config()
        blocks = options.device_tokens // options.block_size + 1  # one is no request's: it stands for absent ones
        self.llm = LLM(
            model=str(options.logs),
            load_format="dummy",
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
        return Sample(1e3 * (time.perf_counter() - start), output.num_cached_tokens or 0)

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
        if not self.options.connector.startswith("ours") and self.options.connector not in ROLES:
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
        self.log = options.logs / f"{re.sub('[^a-z0-9]', '_', options.connector)}_{time.strftime('%H%M%S')}.log"
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, options, self.log, time.time()))
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


def start_engines(wanted: Sequence[EngineOptions], seconds: float) -> tuple[dict[str, Engine], dict[str, Ready]]:
    """Start engines at the same time. Those that fail are told of and left out."""
    deadline = time.monotonic() + seconds
    engines = {options.connector: Engine(options) for options in wanted}
    ready = {}
    for name, engine in list(engines.items()):
        try:
            ready[name] = engine.wait_ready(deadline)
            print(f"{name}: serves {ready[name].first_token_seconds:.1f} s after its start", flush=True)
        except EngineError as error:
            drop(engines, name, error)
    return engines, ready


def drop(engines: dict[str, Engine], name: str, error: EngineError) -> None:
    """Tell of an engine that failed and go on without it."""
    print(f"FAILED  {error}", file=sys.stderr, flush=True)
    engines.pop(name).close()


def everywhere(engines: dict[str, Engine], function: Callable[..., R], *args: Any) -> dict[str, R]:
    """Call a function in every engine, one after the other; those that fail are dropped."""
    results = {}
    for name, engine in list(engines.items()):
        try:
            results[name] = engine.call(function, *args)
        except EngineError as error:
            drop(engines, name, error)
    return results


def _serve(connection: Connection, options: EngineOptions, log: Path, started: float) -> None:
    """The child's main function."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.device:  # as an operator keeps servers apart; vLLM takes the first that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = str(options.device)
    # Engines that compile at the same time must not write into one cache.
    root = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(root, f"bench_{options.connector.replace(':', '_')}")
    try:
        server = EngineServer(options)
        engine_seconds = time.time() - started
        server.generate(range(3, 3 + options.block_size))
        connection.send((True, Ready(engine_seconds, time.time() - started, server.stats())))
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
