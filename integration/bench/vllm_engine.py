"""vLLM engines for the benchmarks.

Random weights of Llama-3.1-8B's shape, the same in all engines, and large enough that an answer depends on the whole
prompt: with vLLM's own dummy weights it is that of the last token alone, and a load that brought nothing would not be
seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from integration.bench.engines import Output, Phases, Sample, fill_device
from integration.bench.options import EngineOptions
from integration.bench.peers import parse_connector
from integration.bench.vllm_peers import environment, fault, transfer_config
from integration.bench.vllm_phases import VllmPhases

_NUDGES = 3  # some connectors begin a save, or notice that one ended, only in a later step


class VllmOptions(EngineOptions):
    """Of a vLLM engine."""

    package = "vllm"
    kinds = "none,offloading,simple,lmcache,ours"

    @property
    def block_size(self) -> int:
        return 32 if self.tiny else 16

    def environment(self) -> dict[str, str]:
        """What an operator has set for vLLM's cache and network stays."""
        # Engines that compile at the same time, on any device, must not write into one cache.
        root = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CACHE_ROOT": os.path.join(root, f"bench_{self.name}_{self.device}"),
        }
        return super().environment() | variables | environment(self.connector, self.host_bytes)

    def serve(self) -> VllmServer:
        return VllmServer(self)

    def fault(self, log: str) -> str:
        return fault(self.connector, log)


GRAPH_TOKENS = 512
"""Of a step, up to which vLLM replays CUDA graphs, of prompts too: its default for `max_num_seqs` of 256 and more
(0.32, H200). Engines have 64 here, for which it would be 128."""


class VllmServer:
    """See `EngineServer`. The engine core lives in this process: its statistics can be read, and requests can arrive
    while it steps."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self.options = options
        self.kept: Any = None  # what a benchmark keeps here from one call to the next
        transfer = transfer_config(options.connector, options.host_bytes, options.ours)
        blocks = options.device_tokens // options.block_size + 1  # one is no request's: it stands for absent ones
        self.llm = LLM(
            model=str(options.logs),
            load_format=register_weights(),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=options.dtype,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=2048 if options.tiny else 16384,
            enforce_eager=options.eager or options.tiny,
            compilation_config={} if options.eager or options.tiny else {"max_cudagraph_capture_size": GRAPH_TOKENS},
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

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """By layer; the last three dimensions are of a block's tokens, KV heads and values, in some order."""
        caches: list[torch.Tensor] = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        return caches

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

    def generate_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        asked: Any = [{"prompt_token_ids": list(token_ids)} for token_ids in prompts]
        self.llm.generate(asked, self.params(max_tokens), use_tqdm=False)

    def step(self) -> list[Output]:
        """One step of the engine."""
        return [
            Output(
                output.request_id,
                output.finished,
                output.outputs[0].token_ids,
                len(output.prompt_token_ids),
                output.num_cached_tokens or 0,
            )
            for output in self.llm.llm_engine.step()
        ]

    def abort(self, names: Sequence[str]) -> None:
        self.llm.llm_engine.abort_request(list(names))

    def follow(self) -> Phases:
        return VllmPhases(self.scheduler, self._core.model_executor)

    def close(self) -> None:
        """It ends with its process."""

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
        return fill_device(self, self._random)

    def stats(self) -> dict[str, float]:
        """Sums of our connector since start-up; nothing for others."""
        if not parse_connector(self.options.connector).is_ours:
            return {}
        return dict(self.scheduler.connector._scheduler.half.get_kv_connector_stats())

    def wait_for_host(self, seconds: float = 120.0) -> dict[str, float]:
        """Wait until all host memory of ours is ready; returns the statistics."""
        wanted = self.options.host_blocks if self.stats() else 0
        deadline = time.monotonic() + seconds
        while self.stats().get("host_capacity_blocks", 0) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
            self.generate([1])
        return self.stats()


def register_weights() -> str:
    """Tell vLLM of weights that are its dummy ones times a power of two; returns the name to load them by.

    Those are so small, in the norms as well, that what attention adds to a token's embedding is lost in rounding, and
    nearly all of those in fp8 are zeros: these are drawn anew, with scales that make them as large as the others.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class Loader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            for name, parameter in model.named_parameters():
                if parameter.dtype == torch.float8_e4m3fn:
                    draw_fp8(parameter.data)
                elif name.endswith("weight_scale_inv"):
                    parameter.data.fill_(2**-10)
                elif parameter.is_floating_point():
                    parameter.data.mul_(256)

    register_model_loader("dummy_times_256")(Loader)
    return "dummy_times_256"


def draw_fp8(weights: torch.Tensor) -> None:
    """Fill weights in fp8 with numbers of up to 256, the same ones whenever the shape is."""
    generator = torch.Generator(weights.device).manual_seed(1234)
    drawn = torch.empty_like(weights, dtype=torch.float16)
    weights.copy_(drawn.uniform_(-256, 256, generator=generator))
