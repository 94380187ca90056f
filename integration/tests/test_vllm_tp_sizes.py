"""Two real engines of two TP sizes: one computes a prompt, the other continues it with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.forks import vllm_context
from integration.tests.test_vllm_pd_groups import ask, settings_of
from integration.tests.vllm_engines import prompts, running
from kv_connector.engines.vllm.groups import TELLS_STATES

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="vLLM 0.32 and newer say how KV heads lie"),
    pytest.mark.usefixtures("stable_hashes", "slow_machine", "two_ranks_on_the_cpu"),
    pytest.mark.timeout(1200),
]

ROUTE = {"route": "staged"}
"""KV heads are divided anew in host memory alone, so on GPUs it has to be asked for."""
EXACT = {"dtype": "float32", "attention_backend": "TRITON_ATTN", "num_blocks": 120}
ON_GPUS: dict[str, Any] = EXACT if torch.cuda.is_available() else {}
"""In bfloat16 another number of ranks adds up to other tokens, with a connector or without one. And vLLM keeps blocks
behind a window for the steps that it has planned ahead."""


def _prefill(pipe: Connection, folder: Path, model: str, tp_size: int) -> None:
    """The process of a prefill engine: answers what it is asked until it is asked nothing."""
    settings = settings_of(model, "producer", **ROUTE) | ON_GPUS
    with running(folder, model, **settings, tensor_parallel_size=tp_size) as engine:
        pipe.send(None)
        while (prompt := pipe.recv()) is not None:
            pipe.send(ask(engine, prompt, 1, {"do_remote_decode": True})[1])
            pipe.recv()  # it has been continued
            engine.drain()
            engine.check_all_free()
            pipe.send(engine.stats())


def _continue(
    folder: Path, model: str, tp_size: int, pipe: Connection, asked: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Tokens of an engine that computes all, and of one that continues what another has computed."""
    alone, continued = [], []
    settings = settings_of(model, "consumer", **ROUTE) | ON_GPUS
    with running(folder, model, **settings, tensor_parallel_size=tp_size) as engine:
        for prompt in asked:
            alone.append(ask(engine, prompt, 12, {})[0][0])
            engine.drain()
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            pipe.send(list(prompt))
            continued.append(ask(engine, prompt, 12, pipe.recv())[0][0])
            pipe.send(True)
            assert pipe.recv()["expired_transfers"] == 0
        stats = engine.stats()
        engine.check_all_free()
    return alone, continued, stats


@pytest.mark.parametrize("model", ["dense", "windows"])
@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1)])
def test_a_prompt_computed_by_another_number_of_ranks_is_continued(
    folder: Path, model: str, producer: int, consumer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has used CUDA, and a fork could not
    asked = [prompt[:161] for prompt in prompts(3, 200)]
    context = vllm_context()
    pipe, there = context.Pipe()
    process = context.Process(target=_prefill, args=(there, folder, model, producer))
    process.start()
    there.close()  # else nobody would hear that it has ended
    try:
        pipe.recv()
        alone, continued, stats = _continue(folder, model, consumer, pipe, asked)
    finally:
        pipe.send(None)
        process.join(60)
    assert continued == alone
    assert not stats.get("failed_receive_jobs")
    assert stats["peer_hit_tokens"] == len(asked) * 160
