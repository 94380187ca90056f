"""The families of `test_vllm_families.py` on two ranks, and in two engines of which one computes the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM is needed")

from integration.tests.test_vllm_families import FAMILIES, OPTIONS, check_host_and_storage, skip_unserved
from integration.tests.test_vllm_hybrid import ask_and_hit
from integration.tests.test_vllm_pd_groups import Prefill, ask, settings_of
from integration.tests.test_vllm_pipeline import STAGES
from integration.tests.vllm_engines import prompts, running
from kv_connector.engines.vllm.groups import TELLS_STATES

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer"),
    pytest.mark.usefixtures("stable_hashes", "slow_machine", "whole_blocks_are_copied"),
    pytest.mark.timeout(1200),
]

RANKS: dict[str, dict[str, Any]] = {"tensor-parallel": {"tensor_parallel_size": 2}, "pipeline": STAGES}
NO_STAGES = {
    "DeepSeek-V4": "its three layers are of three kinds, and vLLM wants the same kinds in all stages",
    "Granite 4": "vLLM's loader looks for the experts of other stages' layers",
    "Mamba2": "vLLM has no stages for it",
}
BLOCKS_ALIKE: dict[str, dict[str, Any]] = {"Kimi-Linear": {"block_size": 128}}
"""Of families whose first stage has states alone, the blocks that vLLM makes of the last one: storage answers where
blocks of every layer end, and of that stage vLLM would leave them smaller."""
HAS_TWO_GPUS = torch.cuda.device_count() > 1
ON_THE_CPU = ("Gemma 3", "Gemma 4", "Llama 4", "LFM2")
"""Whose layers vLLM shares out there; dense models have tests of their own."""


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """On GPUs, which this process has used, a fork could not use them."""
    if torch.cuda.is_available():
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    else:
        request.getfixturevalue("two_ranks_on_the_cpu")


@pytest.mark.skipif(torch.cuda.is_available() and not HAS_TWO_GPUS, reason="two GPUs are needed")
@pytest.mark.parametrize("split", RANKS)
@pytest.mark.parametrize("family", FAMILIES if HAS_TWO_GPUS else ON_THE_CPU)
def test_a_family_on_two_ranks_is_answered_from_the_host_and_from_storage(
    folder: Path, tmp_path: Path, family: str, split: str
) -> None:
    if split == "pipeline" and family in NO_STAGES:
        pytest.skip(NO_STAGES[family])
    alike = BLOCKS_ALIKE.get(family, {}) if split == "pipeline" else {}
    check_host_and_storage(folder, tmp_path, FAMILIES[family], **RANKS[split], **alike)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_what_another_engine_has_computed_answers_as_a_hit_on_the_device(folder: Path, family: str) -> None:
    """Of as many tokens: a GPU adds up otherwise in steps of other shapes."""
    model = FAMILIES[family]
    skip_unserved(model)
    more: dict[str, Any] = {"num_blocks": 120} | OPTIONS.get(model, {})
    with running(folder, model, **(settings_of(model, "consumer") | more)) as engine:
        prefill = Prefill(folder, model, **more)
        try:
            for prompt in (prompt[:577] for prompt in prompts(2, 600)):
                _, (on_device, hits) = (ask_and_hit(engine, [prompt], 12) for _ in range(2))
                engine.drain()
                assert engine.llm.reset_prefix_cache(reset_connector=True)
                with prefill.computed(prompt) as params:
                    assert params is not None
                    before = engine.stats()["peer_hit_tokens"]
                    assert ask(engine, prompt, 12, params)[0] == on_device[0]
                    assert engine.stats()["peer_hit_tokens"] - before == hits[0] >= 384
            assert not engine.stats().get("failed_receive_jobs")
            engine.drain()
            engine.check_all_free()
        finally:
            prefill.end()
