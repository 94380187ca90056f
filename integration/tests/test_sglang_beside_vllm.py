"""One folder of storage under engines of two kinds at a time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from integration.tests.sglang_engines import running
from integration.tests.vllm_process import vllm_process, vllm_python
from kv_connector.testing.engine_contract import ContractEngine, Expected, loadable, prompts

CAPACITY = 16 << 20
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""Of the model's layers, keys and values, heads, their width, and float32."""


@pytest.mark.skipif(vllm_python() is None, reason="vLLM has a virtual environment of its own: make vllm")
def test_each_finds_its_own_blocks_in_a_folder_of_two(
    models: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SGLang and vLLM, of one model's weights: after a restart each finds what it has stored last, nothing that the
    other has, and the folder never holds more than it may. One engine without us says what both must answer."""
    python, folder = vllm_python(), tmp_path / "kv"
    assert python is not None
    storage = {"path": str(folder), "capacity": CAPACITY, "prefetch": "timeout", "timeout_ms": 10000}
    settings = {"storage": storage}
    with vllm_process(python, models) as open_vllm:
        expected: Expected = request.getfixturevalue("expected")  # it starts while vLLM is imported
        with running(models, settings, sleep_on_idle=True) as sglang, open_vllm(settings) as vllm:
            engines: list[ContractEngine] = [sglang, vllm]
            asked = [prompts(engine, 12, seed=name) for engine, name in zip(engines, ("sglang", "vllm"), strict=True)]
            for each in zip(*asked, strict=True):
                for engine, prompt in zip(engines, each, strict=True):
                    assert [engine.generate([prompt])[0].token_ids] == expected([prompt], 8)
                    assert num_bytes(folder) <= CAPACITY
            for engine in engines:
                engine.check_idle()
            assert sum(stored_bytes(engine) for engine in engines) > CAPACITY
            assert num_bytes(folder) <= CAPACITY
        with running(models, settings, sleep_on_idle=True) as sglang, open_vllm(settings) as vllm:
            last = [each[-3:] for each in asked]
            for engine, own, others in ((sglang, *last), (vllm, *last[::-1])):
                check_finds(engine, expected, own, [loadable(engine, prompt) for prompt in own])
                check_finds(engine, expected, others, [0] * len(others))
                engine.check_idle()
                fetched = sum(loadable(engine, prompt) for prompt in own) // engine.block_tokens
                assert engine.stats()["fetched_blocks"] == fetched
                assert num_bytes(folder) <= CAPACITY


def check_finds(engine: ContractEngine, expected: Expected, asked: list[list[int]], num_loaded: list[int]) -> None:
    answers = [engine.generate([prompt])[0] for prompt in asked]
    assert [answer.token_ids for answer in answers] == expected(asked, 8)
    assert [answer.num_loaded for answer in answers] == num_loaded


def stored_bytes(engine: ContractEngine) -> float:
    """That the engine has written since its start."""
    return engine.stats()["backed_up_blocks"] * engine.block_tokens * TOKEN_BYTES


def num_bytes(folder: Path) -> int:
    """Of all files; some may go while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total
