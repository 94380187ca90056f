"""What single requests may ask of an engine with our connector: salts, log-probabilities, resets in their middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.models import tiny
from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, prompts, running, transfer_config
from kv_connector.engines.vllm import identity


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine whose device cache holds all that a test asks; the host holds it too."""
    folder = tmp_path_factory.getbasetemp() / "models"
    with running(folder, num_blocks=200, kv_transfer_config=transfer_config({"write_policy": "write_through"})) as one:
        yield one


def test_salts_separate_prefixes(roomy: VllmEngine) -> None:
    asked = prompts(1, seed=20)
    roomy.alone(asked, cache_salt="alice")
    roomy.drain()
    roomy.llm.reset_prefix_cache()
    before = roomy.stats()["host_hit_tokens"]
    roomy.alone(asked, cache_salt="bob")
    assert roomy.stats()["host_hit_tokens"] == before
    roomy.llm.reset_prefix_cache()
    roomy.alone(asked, cache_salt="alice")
    assert roomy.stats()["host_hit_tokens"] == before + 13 * BLOCK_SIZE
    roomy.check_all_free()


def test_a_request_that_skips_reading_is_computed(roomy: VllmEngine) -> None:
    """Prompt log-probabilities need every position computed."""
    from vllm import SamplingParams

    (asked,) = prompts(1, seed=21)
    roomy.alone([asked])
    roomy.drain()
    roomy.llm.reset_prefix_cache()
    before = roomy.stats()["host_hit_tokens"]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    roomy.llm.generate([{"prompt_token_ids": asked}], params, use_tqdm=False)
    assert roomy.stats()["host_hit_tokens"] == before
    roomy.check_all_free()


def test_a_reset_with_the_connector_forgets_the_host(roomy: VllmEngine) -> None:
    asked = prompts(1, seed=22)
    first = roomy.alone(asked)
    assert roomy.llm.reset_prefix_cache(reset_connector=True), "also right behind the last step, with saves under way"
    before = roomy.stats()["host_hit_tokens"]
    assert roomy.alone(asked) == first
    assert roomy.stats()["host_hit_tokens"] == before
    roomy.check_all_free()


def test_running_requests_survive_a_reset_in_their_middle(roomy: VllmEngine) -> None:
    from vllm import SamplingParams

    asked = prompts(3, seed=23)
    expected = roomy.alone(asked, 24)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    engine = roomy.llm.llm_engine
    for index, prompt in enumerate(asked):
        engine.add_request(f"reset-{index}", {"prompt_token_ids": prompt}, params)
    answers: dict[str, list[int]] = {}
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step in (2, 9):
            assert roomy.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        for output in engine.step():
            answers[output.request_id.split("-")[1]] = list(output.outputs[0].token_ids)
    assert [answers[str(index)] for index in range(3)] == expected
    roomy.check_all_free()


def test_adapters_keep_their_caches_apart(tmp_path: Path) -> None:
    """The same prompt under two adapters and without one: three caches, each found again by its own."""
    from vllm.lora.request import LoRARequest

    config = transfer_config({"write_policy": "write_through"})
    adapters = [LoRARequest(f"a{i}", i, str(tiny.write_adapter(tmp_path / f"a{i}", seed=i))) for i in (1, 2)]
    asked = prompts(1, seed=23)
    with running(tmp_path, num_blocks=200, kv_transfer_config=config, enable_lora=True, max_lora_rank=8) as engine:

        def answers() -> list[list[list[int]]]:
            return [engine.alone(asked, adapter=adapter) for adapter in (None, *adapters)]

        answers()
        from_device = answers()
        assert len({str(answer) for answer in from_device}) == 3, "adapters change the answers"
        engine.drain()
        assert engine.stats()["host_hit_tokens"] == 0
        assert engine.llm.reset_prefix_cache()
        assert answers() == from_device
        assert engine.stats()["host_hit_tokens"] == 3 * 13 * BLOCK_SIZE
        engine.check_all_free()


def test_an_adapter_that_was_replaced_hits_nothing_of_its_old_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's hashes have its name and path alone, and a reset of vLLM's cache leaves the host as it is. Behind one that
    resets the host too, the new weights' blocks are kept and found. The log says so, once."""
    from vllm.lora.request import LoRARequest

    config = transfer_config({"write_policy": "write_through"})
    path, asked = tmp_path / "adapter", prompts(1, seed=24)
    monkeypatch.setattr(identity.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(identity.logger, "propagate", False)  # in vLLM 0.20 it does
    adapter = LoRARequest("a", 1, str(tiny.write_adapter(path, seed=1)))
    with running(tmp_path, num_blocks=200, kv_transfer_config=config, enable_lora=True, max_lora_rank=8) as engine:

        def ask() -> tuple[list[list[int]], int]:
            before = engine.stats()["host_hit_tokens"]
            answers = engine.alone(asked, adapter=adapter)
            engine.drain()
            return answers, int(engine.stats()["host_hit_tokens"] - before)

        old, _ = ask()
        assert engine.llm.reset_prefix_cache()
        assert ask() == (old, 13 * BLOCK_SIZE)
        tiny.write_adapter(path, seed=2)
        engine.llm.llm_engine.add_lora(LoRARequest("a", 1, str(path), load_inplace=True))
        assert engine.llm.reset_prefix_cache()
        new, hits = ask()
        assert new != old and not hits
        assert engine.llm.reset_prefix_cache()
        assert ask() == (new, 0)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert ask() == (new, 0)
        assert engine.llm.reset_prefix_cache()
        assert ask() == (new, 13 * BLOCK_SIZE)
        engine.check_all_free()
    told = [message for message in caplog.messages if "have changed" in message]
    assert len(told) == 1 and str(path) in told[0]


def test_an_adapter_stays_replaced_where_a_reset_leaves_vllms_own_cache(tmp_path: Path) -> None:
    """A request runs, so vLLM keeps its blocks, those of the old weights among them: a hit there puts them on the host
    again."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    config = transfer_config({"write_policy": "write_through"})
    path, (asked, other) = tmp_path / "adapter", prompts(2, seed=25)
    adapter = LoRARequest("a", 1, str(tiny.write_adapter(path, seed=1)))
    with running(tmp_path, num_blocks=200, kv_transfer_config=config, enable_lora=True, max_lora_rank=8) as engine:
        engine.alone([asked], adapter=adapter)
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        core = engine.llm.llm_engine
        core.add_request("other", {"prompt_token_ids": other}, params)
        core.step()
        tiny.write_adapter(path, seed=2)
        core.add_lora(LoRARequest("a", 1, str(path), load_inplace=True))
        assert not engine.llm.reset_prefix_cache(reset_connector=True)
        core.add_request("asked", {"prompt_token_ids": asked}, params, lora_request=adapter)
        while core.has_unfinished_requests():
            core.step()
        engine.drain()
        hits = engine.stats()["host_hit_tokens"]
        for reset_connector in (False, True):
            assert engine.llm.reset_prefix_cache(reset_connector=reset_connector)
            new = engine.alone([asked], adapter=adapter)
            assert new == engine.alone([asked], adapter=adapter, cache_salt="nothing is cached under it")
            assert engine.stats()["host_hit_tokens"] == hits
            engine.drain()
        assert engine.llm.reset_prefix_cache()
        assert engine.alone([asked], adapter=adapter) == new
        assert engine.stats()["host_hit_tokens"] == hits + 13 * BLOCK_SIZE
        engine.check_all_free()
