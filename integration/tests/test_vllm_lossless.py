"""Blocks that are coded on the host, behind real vLLM engines in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.models.smollm2 import default_folder, is_converted
from integration.tests.vllm_contract import opened
from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    check_loaded_bytes_and_tokens,
    prompts,
    running,
    transfer_config,
)
from kv_connector.errors import ConfigError
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Expected, RestartCheck

BF16: dict[str, Any] = {"dtype": "bfloat16"}
FORMS = ("raw", "lossless")
ROOT = Path(__file__).parents[2]


def config_of(form: str, **settings: Any) -> dict[str, Any]:
    return transfer_config({"write_policy": "write_through", "host_form": form} | settings)


@pytest.mark.parametrize("check", engine_contract.RESTARTS, ids=lambda check: check.__name__)
def test_restart(
    check: RestartCheck,
    models: Path,
    expected_in_bf16: Expected,
    tmp_path: Path,
    stable_hashes: None,
    slow_machine: None,
) -> None:
    coded = {"host_form": "lossless"}
    check(lambda settings: opened(models, coded | dict(settings), **BF16), expected_in_bf16, str(tmp_path / "storage"))


@pytest.mark.parametrize(("model", "choice"), [("dense", "sync"), ("dense", "async"), ("windows", "sync")])
def test_a_coded_prefix_has_the_bytes_and_gives_the_tokens_of_a_cached_one(
    folder: Path, model: str, choice: str
) -> None:
    check_loaded_bytes_and_tokens(folder, model, choice, host_form="lossless", **BF16)


def test_both_forms_say_the_same_of_many_at_once(folder: Path) -> None:
    """Eight requests that grow at once do not fit, and lose their blocks; the steps are the same for both forms. In
    bf16 these answers are others than to each alone, with us and without: vLLM rounds by what is in the batch."""
    asked = prompts(8, 100)
    said = []
    for form in FORMS:
        with running(folder, num_blocks=40, kv_transfer_config=config_of(form), **BF16) as engine:
            said.append([engine.generate(asked, 200), engine.generate(prompts(6) + asked), engine.alone(asked)])
            stats = engine.stats()
            engine.check_all_free()
        assert stats["host_hit_tokens"] > 0
        assert stats["refused_blocks"] == stats["failed_load_jobs"] == 0
    assert said[0] == said[1]


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
def test_the_other_form_finds_nothing_of_it_in_storage(tmp_path: Path) -> None:
    """A user turns the form on, off and on again: each start finds what its own form has written, and no other."""
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    asked = prompts(4)
    num_blocks = 4 * 13
    answers, cached, fetched = [], [], []
    for form in (*FORMS, *FORMS):
        config = config_of(form, storage=storage)
        with running(tmp_path, num_blocks=200, kv_transfer_config=config, **BF16) as engine:
            answers.append(engine.alone(asked))
            cached.append(engine.alone(asked))
            engine.check_all_free()
            fetched.append(engine.stats()["fetched_blocks"])
    assert fetched == [0, 0, num_blocks, num_blocks]
    assert answers[0] == answers[1]
    assert answers[2:] == cached[:2] == cached[2:]


@pytest.mark.model
@pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)")
def test_a_real_model_keeps_more_in_the_same_memory(folder: Path) -> None:
    """SmolLM2, whose blocks of 32 tokens are 720 KiB; it reads our documents, two of which are more than the device
    holds."""
    texts = [ROOT / name for name in ("README.md", "ARCHITECTURE.md")]
    said, capacity = [], []
    for form in FORMS:
        config = config_of(form, host_memory="128MiB")
        with running(folder, default_folder(), kv_transfer_config=config, **BF16) as engine:
            asked = [read(text, 700) for text in texts]
            computed = engine.alone(asked)
            assert engine.llm.reset_prefix_cache()
            said += [computed, engine.alone(asked)]
            stats = engine.stats()
            engine.check_all_free()
        capacity.append(stats["host_capacity_blocks"])
        assert stats["host_hit_tokens"] == 2 * 21 * BLOCK_SIZE
        assert stats["refused_blocks"] == 0
    assert said[:2] == said[2:], "of both forms, computed and loaded"
    assert capacity[1] >= 1.3 * capacity[0]


def read(text: Path, num_tokens: int) -> list[int]:
    """The beginning of a text, in SmolLM2's tokens."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(default_folder())(text.read_text()).input_ids
    return ids[:num_tokens]


def test_a_cache_that_is_not_in_bf16_is_refused_at_the_start(folder: Path) -> None:
    with (
        pytest.raises((ConfigError, RuntimeError), match=r"host_form='lossless' gains nothing here: .*; give 'raw'"),
        running(folder, kv_transfer_config=config_of("lossless"), dtype="float32"),
    ):
        pass
