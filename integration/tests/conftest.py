"""What tests of whole engines ask for by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_connector.scheduler.storage import reading
from kv_connector.testing.engine_contract import Expected


@pytest.fixture(scope="module")
def stable_hashes() -> Iterator[None]:
    """One start names a prompt's blocks as the next one does, which older vLLM needs this for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        yield


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still for seconds, as a busy host's do, is not a storage that never answers."""
    monkeypatch.setattr(reading, "STALL_SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the weights of small models are made once for all tests."""
    return tmp_path_factory.getbasetemp() / "models"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for engines that outlive a test."""
    return tmp_path_factory.getbasetemp() / "models"


@pytest.fixture(scope="session")
def expected(models: Path) -> Iterator[Expected]:
    """What the engine of this environment answers without us; one for all that ask."""
    if find_spec("sglang") is None:
        from integration.tests.vllm_contract import answers_alone
    else:
        from integration.tests.sglang_engines import answers_alone
    with answers_alone(models) as answers:
        yield answers


@pytest.fixture(scope="session")
def expected_in_bf16(models: Path) -> Iterator[Expected]:
    """The same of an engine whose model and cache are in bf16."""
    if find_spec("sglang") is None:
        from integration.tests.vllm_contract import answers_alone
    else:
        from integration.tests.sglang_engines import answers_alone
    with answers_alone(models, dtype="bfloat16") as answers:
        yield answers


@pytest.fixture(scope="session")
def expected_of_tensorrt_llm() -> Iterator[Expected]:
    """What the model of TensorRT-LLM's executor answers without us."""
    from integration.tests.tensorrt_llm_engines import answers_alone

    with answers_alone() as answers:
        yield answers


@pytest.fixture
def mamba2_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 lets Mamba2 keep a state from the middle of a step, which its kernels for the CPU cannot."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    monkeypatch.delattr(MambaMixer2, "get_kv_cache_spec")


@pytest.fixture
def whole_blocks_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks of attention and of states lie in one memory, vLLM 0.32 copies no more of either than the first of
    its tensors has there: a state. So its own hits inside of blocks give other tokens, unless attention comes first.

    And where a step admits two requests that hit the same block inside, the second copies what the first is about to
    copy: the copies of a step are made at once, so it has what lay there before, unless they are made one by one."""
    from vllm.v1.worker import gpu_model_runner

    copy = gpu_model_runner.copy_kv_cache_blocks_inplace

    def copy_whole(caches: Iterable[torch.Tensor], num_blocks: int, copies: Any) -> None:
        whole = sorted(caches, key=lambda cache: cache[0].nbytes, reverse=True)
        for one in copies:
            copy(whole, num_blocks, [one])

    monkeypatch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", copy_whole)


@pytest.fixture
def forked_engines() -> Iterator[None]:
    """Processes of vLLM are forks, but where there are GPUs."""
    from integration.tests.forks import forking_vllm

    with nullcontext() if torch.cuda.is_available() else forking_vllm():
        yield


@pytest.fixture
def two_ranks_on_the_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """They share two cores, with a thread each; skipped where they do not run."""
    from integration.tests.vllm_engines import vllm_version

    if vllm_version().startswith("0.20"):
        pytest.skip("two CPU ranks of vLLM 0.20 need more than two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    request.getfixturevalue("forked_engines")
