"""Multi-head latent attention on one rank, and on two that keep one copy on the host: its bytes, and what loads take.

DeepSeek-V2-Lite's attention with dummy weights, and dense layers in place of its experts. Each engine has processes of
its own; the order is 1, 2, 2, 1 and so on. Needs vLLM and two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from integration.models import tiny_configs
from integration.report import Report

BLOCK_SIZE = 64
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 65536,
    "first_k_dense_replace": 27,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--prompts", type=int, default=4, help="in each engine")
    parser.add_argument("--rounds", type=int, default=2, help="engines of each kind")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("two GPUs are needed")
        return 0
    report = Report("vllm_replicas")
    for number in range(2 * options.rounds):
        num_ranks = 1 if number % 4 in (0, 3) else 2
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row = process.submit(measure, num_ranks, options.tokens, options.prompts).result()
        print(row)
        report.rows.append(row)
        if number:
            claim(report)
        report.write(options.json)  # an engine takes minutes: what was measured stays, whatever becomes of the next one
    return 0


def claim(report: Report) -> None:
    """What two ranks have of what one has, in the median of what both have had until now."""
    one, two = ([row for row in report.rows if row["ranks"] == ranks] for ranks in (1, 2))
    held = [statistics.median(row["host_tokens"] for row in rows) for rows in (one, two)]
    report.claim("host_bytes_per_token_of_two_ranks_over_one", held[0] / held[1], 1.0, "of 1", "lower")
    taken = [statistics.median(ms for row in rows for ms in row["load_ms"]) for rows in (one, two)]
    report.claim("load_of_two_ranks_over_one", taken[1] / taken[0], 1.1, "of 1", "lower")


def measure(num_ranks: int, num_tokens: int, num_prompts: int) -> dict[str, Any]:
    """One engine: milliseconds to the first token of prompts that the device and the host have, and of the loads."""
    names = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= names | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # functions are sent to workers
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        shape = tiny_configs.CONFIGS["latent"] | SHAPE
        Path(folder, "config.json").write_text(json.dumps(shape))
        extra = {"host_memory": "8GiB", "write_policy": "write_through", "load_choice": "sync"}
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            max_model_len=num_tokens + BLOCK_SIZE,
            max_num_batched_tokens=8192,
            tensor_parallel_size=num_ranks,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=8 << 30,
            kv_transfer_config={
                "kv_connector": "TieredKVConnector",
                "kv_connector_module_path": "kv_connector.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )
        return {"ranks": num_ranks, "tokens": num_tokens} | ask(llm, num_tokens, num_prompts)


def ask(llm: Any, num_tokens: int, num_prompts: int) -> dict[str, Any]:
    """Each prompt is computed, hit on the device, and on the host."""
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    half = scheduler.connector._scheduler.half
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    random = np.random.default_rng(1)
    num_ranks = llm.llm_engine.vllm_config.parallel_config.world_size

    def first_token(prompt: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        milliseconds = 1e3 * (time.perf_counter() - start)
        while scheduler.has_requests():
            llm.llm_engine.step()
        return milliseconds, int(output.outputs[0].token_ids[0])

    while half.get_kv_connector_stats()["host_capacity_blocks"] * BLOCK_SIZE < (num_prompts + 1) * num_tokens:
        first_token([1])  # host memory is page-locked in the background
    rows: dict[str, list[float]] = {"computed_ms": [], "device_hit_ms": [], "host_hit_ms": [], "load_ms": []}
    for number in range(num_prompts + 1):
        prompt = random.integers(2, 100_000, num_tokens).tolist()
        computed, on_device = first_token(prompt), first_token(prompt)
        assert llm.reset_prefix_cache()
        before = half.get_kv_connector_stats()
        from_host = first_token(prompt)
        after = half.get_kv_connector_stats()
        assert from_host[1] == on_device[1], "the host's answer is another one"
        assert after["host_hit_tokens"] - before["host_hit_tokens"] >= num_tokens - 2 * BLOCK_SIZE
        if not number:
            continue  # kernels were compiled
        rows["computed_ms"].append(computed[0])
        rows["device_hit_ms"].append(on_device[0])
        rows["host_hit_ms"].append(from_host[0])
        rows["load_ms"].append((after["load_milliseconds"] - before["load_milliseconds"]) / num_ranks)
    return {**rows, "host_tokens": _capacity(llm) * BLOCK_SIZE}


def _capacity(llm: Any) -> int:
    """Blocks that the host has room for."""
    return int(min(llm.collective_rpc(_num_host_blocks)))


def _num_host_blocks(worker: Any) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return int(get_kv_transfer_group()._worker.half._host.num_blocks)


if __name__ == "__main__":
    sys.exit(main())
