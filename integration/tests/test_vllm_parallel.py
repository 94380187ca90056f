"""Real vLLM in shapes that are not tensor parallel alone: several engines behind one front (data parallel), and ranks
that share out the tokens of each block (decode context parallel, which needs GPUs)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.test_vllm_hybrid import ask_and_hit, forget_device
from integration.tests.vllm_engines import BLOCK_SIZE, prompts, running, transfer_config, weights
from kv_connector.engines.vllm.groups import TELLS_STATES

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="shown with vLLM 0.32 and newer"),
    pytest.mark.usefixtures("stable_hashes", "slow_machine", "two_ranks_on_the_cpu"),
    pytest.mark.timeout(1200),
]
SETTINGS = {"write_policy": "write_through"}


async def ask(engine: Any, prompt: Sequence[int], replica: int) -> tuple[list[int], int]:
    """Greedy tokens of one of the engines, and how many of the prompt's were cached there."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    request_id = f"{replica} {id(prompt)}"
    asked = {"prompt_token_ids": list(prompt)}
    async for output in engine.generate(asked, params, request_id, data_parallel_rank=replica):
        last = output
    tokens, num_cached = [*last.outputs[0].token_ids], int(last.num_cached_tokens or 0)
    return tokens, num_cached


async def ask_replicas(options: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    try:
        asked = prompts(2)
        num_whole = len(asked[0]) // BLOCK_SIZE * BLOCK_SIZE
        computed = [await ask(engine, prompt, replica) for replica in range(2) for prompt in asked]
        assert [hit for _, hit in computed] == [0] * 4, "each replica has a cache of its own"
        on_device = [await ask(engine, prompt, replica) for replica in range(2) for prompt in asked]
        assert [hit for _, hit in on_device] == [num_whole] * 4
        assert on_device[0] != on_device[1]
        await engine.reset_prefix_cache()
        assert [await ask(engine, prompt, replica) for replica in range(2) for prompt in asked] == on_device
        await engine.reset_prefix_cache(reset_connector=True)
        assert [hit for _, hit in [await ask(engine, prompt, 1) for prompt in asked]] == [0, 0]
    finally:
        engine.shutdown()


def test_each_replica_answers_from_its_own_host_memory(folder: Path) -> None:
    """Data parallel: what one has computed the other has not, and all forget when they are told to."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 100,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "data_parallel_size": 2,
        "kv_transfer_config": transfer_config(SETTINGS),
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
    }
    if torch.cuda.is_available():
        options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    asyncio.run(ask_replicas(options | weights("dense", folder)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("interleave", [1, BLOCK_SIZE])
@pytest.mark.parametrize("model", ["latent", "one_head"])
def test_ranks_that_share_out_each_block_are_answered_from_the_host_and_from_storage(
    folder: Path, tmp_path: Path, model: str, interleave: int
) -> None:
    """Decode context parallel: a block spans both ranks, and each keeps, stores and loads its part."""
    storage = {"path": str(tmp_path / "store"), "capacity": "1GiB", "prefetch": "wait_complete"}
    options: dict[str, Any] = {
        "num_blocks": 100,
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": interleave,
        "kv_transfer_config": transfer_config(SETTINGS | {"storage": storage}),
    }
    asked = [prompt[:577] for prompt in prompts(2, 600)]
    with running(folder, model, **options) as engine:
        engine.wait_for_storage()
        computed, _ = ask_and_hit(engine, asked)
        assert computed[0] != computed[1]
        from_device, on_device = ask_and_hit(engine, asked)
        assert on_device == [576, 576]
        forget_device(engine)
        assert ask_and_hit(engine, asked) == (from_device, on_device)
        stats = engine.stats()
        engine.check_all_free()
    assert stats["host_hit_tokens"] >= sum(on_device)
    with running(folder, model, **options) as engine:
        engine.wait_for_storage()
        assert ask_and_hit(engine, asked) == (from_device, on_device)
        assert engine.stats()["storage_hit_tokens"] == sum(on_device)
        engine.check_all_free()
