"""The families of models that are deployed, small, in real vLLM on a GPU: what comes from behind the device answers as
a hit on the device does, its log-probabilities to the last bit. Two of them run on a GPU alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM is needed")

from integration.tests.test_vllm_hybrid import ask_and_hit, forget_device, options, zero_on_host
from integration.tests.vllm_engines import prompts, running
from kv_connector.engines.vllm.groups import TELLS_STATES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer"),
    pytest.mark.usefixtures("stable_hashes", "slow_machine", "whole_blocks_are_copied"),
]

FAMILIES = {
    "Llama 3": "dense",
    "Gemma 3": "windows",
    "Gemma 4": "two_sizes",
    "gpt-oss": "sinks",
    "Llama 4": "chunks",
    "DeepSeek V2 and V3": "latent",
    "DeepSeek-V4": "compressed",
    "Qwen3-Next": "delta",
    "Kimi-Linear": "kimi",
    "Nemotron-H": "states_apart",
    "Granite 4": "mamba",
    "LFM2": "conv",
    "Mamba2": "states_only",
}

OPTIONS: dict[str, dict[str, Any]] = {
    "two_sizes": {} if find_spec("cutlass") else {"attention_backend": "TRITON_ATTN"},
    "delta": {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"},
    "compressed": {"block_size": 256, "kv_cache_dtype": "fp8", "num_blocks": 600},
}
"""Kernels of Triton, where packages are missing that vLLM takes its own choice from; and what vLLM asks for."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_answered_from_the_host_and_from_storage(folder: Path, tmp_path: Path, family: str) -> None:
    check_host_and_storage(folder, tmp_path, FAMILIES[family])


def skip_unserved(model: str) -> None:
    """Skips a model that vLLM cannot start with the packages that are here."""
    if model in ("kimi", "compressed"):
        pytest.importorskip("cutlass", reason="some of vLLM's kernels for this model are written in CUTLASS's DSL")
    if model == "compressed":
        for package in ("tilelang", "vllm._flashmla_C", "vllm.third_party.deep_gemm"):
            pytest.importorskip(package, reason="vLLM's kernels for DeepSeek-V4 need it", exc_type=ImportError)


def check_host_and_storage(folder: Path, tmp_path: Path, model: str, **ranks: Any) -> None:
    """Hits are as long as vLLM's own, and each group decides the answer. `ranks`: of vLLM's options."""
    skip_unserved(model)
    storage = {"path": str(tmp_path / "store"), "capacity": "1GiB", "prefetch": "wait_complete"}
    settings: dict[str, Any] = options(model, storage=storage) | {"num_blocks": 120} | OPTIONS.get(model, {}) | ranks
    asked = [prompt[:577] for prompt in prompts(2, 600)]
    with running(folder, model, **settings) as engine:
        computed, _ = ask_and_hit(engine, asked)
        assert computed[0] != computed[1]
        from_device, on_device = ask_and_hit(engine, asked)
        assert min(on_device) >= 384
        forget_device(engine)
        assert ask_and_hit(engine, asked) == (from_device, on_device)
        for group in range(len(engine.half._grouped.groups)):
            forget_device(engine, overwrite=False)
            assert zero_on_host(engine, group)
            spoilt, _ = ask_and_hit(engine, asked[:1])
            assert spoilt != from_device[:1], f"the answer does not depend on group {group}"
        engine.check_all_free()
        assert engine.stats()["backed_up_blocks"] > 0
    with running(folder, model, **settings) as engine:
        engine.wait_for_storage()
        assert ask_and_hit(engine, asked) == (from_device, on_device)
        stats = engine.stats()
        engine.check_all_free()
    assert stats["storage_hit_tokens"] == stats["host_hit_tokens"] == sum(on_device)
