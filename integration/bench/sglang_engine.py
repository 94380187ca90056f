"""SGLang engines for the benchmarks: with its own hierarchical cache, with our linker, or with neither.

Random weights of Llama-3.1-8B's shape, the same in all engines (`sglang_models`). The hierarchical cache is as it was
fastest on an H200, of what was tried; all have the same bytes of host memory, in whole gigabytes, as that takes no
other size.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np

from integration.bench.engines import Output, Phases, Sample, fill_device
from integration.bench.options import EngineOptions
from integration.bench.peers import parse_connector

GIGABYTE = 10**9
HICACHE = {"hicache_io_backend": "kernel", "hicache_mem_layout": "page_first", "hicache_write_policy": "write_through"}
ROOT = Path(__file__).parents[2]
SHIMS = ROOT / "integration" / "sglang_shims"
_SAVED_SECONDS = 0.25
"""Behind the last answer, until SGLang's own cache has saved all: it does not tell."""


class SglangOptions(EngineOptions):
    """Of an SGLang engine."""

    package = "sglang"
    kinds = "none,hicache,ours"

    @property
    def block_size(self) -> int:
        return 16 if self.tiny else 64

    @classmethod
    def host_size(cls, num_bytes: int) -> int:
        return round(num_bytes / GIGABYTE) * GIGABYTE or num_bytes

    def environment(self) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join(folder for folder in [*self._shims, str(ROOT), *given] if folder)
        model = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "integration.bench.sglang_models"}
        return super().environment() | model | {"PYTHONPATH": path}

    @property
    def _shims(self) -> list[str]:
        """For what SGLang imports and a CPU lacks."""
        return [str(SHIMS)] if self.tiny else []

    def serve(self) -> SglangServer:
        sys.path[:0] = self._shims  # here it is the parent's
        return SglangServer(self)

    def fault(self, log: str) -> str:
        if parse_connector(self.connector).kind == "hicache" and self.host_bytes % GIGABYTE:
            return f"it takes whole gigabytes of host memory, not {self.host_bytes} bytes"
        return ""

    def arguments(self, control: str) -> dict[str, Any]:
        """Of `sglang.Engine`; our linker is asked things at `control`."""
        arguments = {
            "model_path": str(self.logs),
            "json_model_override_args": json.dumps({"architectures": ["LargeLlamaForCausalLM"]}),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "device": "cpu" if self.tiny else "cuda",
            "attention_backend": "torch_native" if self.tiny else "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "page_size": self.block_size,
            "max_total_tokens": self.device_tokens,
            "context_length": self.max_model_len + self.block_size,
            "chunked_prefill_size": 2048 if self.tiny else 16384,
            "max_running_requests": 64,
            "mem_fraction_static": 0.9,  # of what the others leave; `max_total_tokens` says how much is taken
            "random_seed": 1,
            "log_level": "info",
        }
        if self.tiny:
            arguments["sleep_on_idle"] = True  # or those that are not measured take the processors of a small machine
        if self.tiny or self.eager:
            arguments["disable_cuda_graph"] = True
        else:
            arguments["cuda_graph_max_bs_decode"] = 64
            arguments["cuda_graph_max_bs_prefill"] = 1024  # the device is busy with more; two minutes of each start
        return arguments | self._cache(control)

    def _cache(self, control: str) -> dict[str, Any]:
        kind, settings = parse_connector(self.connector)
        if kind == "none":
            return {}
        if kind == "hicache":
            size = {"enable_hierarchical_cache": True, "hicache_size": self.host_bytes // GIGABYTE}
            return size | HICACHE | settings
        linker = {
            "linker": "WatchedLinker",
            "linker_module_path": "integration.sglang_watched",
            "linker_extra_config": {"host_memory": self.host_bytes, "control": control} | self.ours | settings,
        }
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": linker,
        }


class SglangServer:
    """See `EngineServer`. SGLang's scheduler is a process of its own, this one has its tokenizer's part and waits for
    answers."""

    def __init__(self, options: SglangOptions) -> None:
        import sglang

        self.options = options
        self.kept: Any = None
        self._is_ours = parse_connector(options.connector).is_ours
        control = f"{tempfile.mkdtemp()}/control"
        with Listener(control, "AF_UNIX") as listener:
            self._engine = sglang.Engine(**options.arguments(control))
            self._control = listener.accept() if self._is_ours else None
        self._random = np.random.default_rng(3 * 10**6)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[Output] = []
        self._told = asyncio.Event()

    def generate(self, token_ids: Sequence[int]) -> Sample:
        start = time.perf_counter()
        output = self._engine.generate(input_ids=list(token_ids), sampling_params=_params(1))
        ms = 1e3 * (time.perf_counter() - start)
        cached, on_host = _cached(output)
        return Sample(ms, cached, int(output["output_ids"][0]), cached - on_host)

    def generate_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=_params(max_tokens))

    def submit(self, name: str, token_ids: Sequence[int], max_tokens: int) -> None:
        self._tasks[name] = self._engine.loop.create_task(self._ask(name, list(token_ids), max_tokens))

    def step(self) -> list[Output]:
        """Wait for answers, a millisecond at most."""
        self._engine.loop.run_until_complete(self._wait())
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._engine.tokenizer_manager.abort_request(name)
        while self._tasks:
            self.step()

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def settle(self, seconds: float = 20.0) -> bool:
        deadline = time.monotonic() + seconds
        time.sleep(_SAVED_SECONDS)
        while self._is_saving() and time.monotonic() < deadline:
            time.sleep(0.01)
        return time.monotonic() < deadline

    def _is_saving(self) -> bool:
        stats = self.stats()
        return bool(stats.get("jobs_in_flight") or stats.get("open_offers"))

    def clear_device(self) -> str:
        """Other prompts: to flush SGLang's cache is to forget what is on the host as well."""
        self.settle()
        return fill_device(self, self._random)

    def follow(self) -> Phases:
        return _HostTokens()

    def stats(self) -> dict[str, float]:
        if self._control is None:
            return {}
        self._control.send(("answer_stats", ()))
        stats: dict[str, float] = self._control.recv()
        return stats

    def wait_for_host(self, seconds: float = 120.0) -> dict[str, float]:
        wanted = self.options.host_blocks
        deadline = time.monotonic() + seconds
        while self._is_ours and self.stats()["host_capacity_blocks"] < wanted and time.monotonic() < deadline:
            self.generate([3])
        return self.stats()

    def close(self) -> None:
        self._engine.shutdown()

    async def _wait(self) -> None:
        if self._outputs:
            return
        self._told.clear()
        try:
            await asyncio.wait_for(self._told.wait(), 0.001)
        except TimeoutError:
            return

    async def _ask(self, name: str, token_ids: list[int], max_tokens: int) -> None:
        try:
            answer = await self._engine.async_generate(
                input_ids=token_ids, sampling_params=_params(max_tokens), rid=name, stream=True
            )
            async for output in answer:
                cached, on_host = _cached(output)
                reason = output["meta_info"]["finish_reason"]
                self._outputs.append(
                    Output(name, reason is not None, output["output_ids"], len(token_ids), cached, on_host)
                )
                self._told.set()
        finally:
            del self._tasks[name]


class _HostTokens:
    """Follows what came from behind the device, as the answers say."""

    def __init__(self) -> None:
        self._num_tokens = self._num_ended = 0

    def arrived(self, name: str) -> None:
        """A request was submitted."""

    def answered(self, output: Output) -> None:
        """Output of a request."""
        if output.is_finished:
            self._num_tokens += output.host_tokens
            self._num_ended += 1

    def stop(self) -> dict[str, float]:
        """Of those that have finished."""
        return {"external_tokens": self._num_tokens, "ended": self._num_ended}


def _params(max_tokens: int) -> dict[str, Any]:
    """Greedy, of exactly so many tokens."""
    return {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}


def _cached(output: Any) -> tuple[int, int]:
    """Tokens of the prompt that were cached, and of these the ones that were not on the device."""
    meta = output["meta_info"]
    return int(meta["cached_tokens"]), int((meta.get("cached_tokens_details") or {}).get("host", 0))
