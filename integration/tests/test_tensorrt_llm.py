"""The connector in the model of TensorRT-LLM's executor (`integration/tensorrt_llm`), with one rank and two, with
overlap and without: the contract of adapters, as far as the slot goes.

What the slot cannot do is said here. Where a load fails for good the engine has to be started anew: so does
`ModelledEngine.break_loads(False)`. Storage is not waited for: for the contract's `RESTARTS` there is
`test_what_is_stored_is_there_for_those_that_come_later`. The engine's first cache manager takes nobody's blocks away:
`PREEMPTIONS` run with requests that are replayed, as its second does it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration import faults
from integration.tensorrt_llm.blocks import LlmRequest
from integration.tensorrt_llm.engine import LLM, llm_args
from integration.tensorrt_llm.executor import Options
from integration.tests.tensorrt_llm_engines import ModelledEngine, delay_saves, running, scheduler_of, worker_of
from kv_connector.engines.tensorrt_llm import TieredKVScheduler, TieredKVWorker
from kv_connector.engines.tensorrt_llm.identity import PromptHasher
from kv_connector.engines.tensorrt_llm.launch import VARIABLE, read_settings, refuse_unserved
from kv_connector.errors import ConfigError, KVConnectorError
from kv_connector.index import CacheIdentity
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, Expected, evict, loadable, prompts

KINDS: dict[str, dict[str, Any]] = {
    "one rank": {"options": Options()},
    "one rank, overlap, late saves": {"options": Options(overlap=True), "saves_late": 5},
    "two ranks, late saves": {"options": Options(), "tp_size": 2, "saves_late": 5},
    "two ranks, overlap": {"options": Options(overlap=True), "tp_size": 2},
}


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """What the engine answers without a connector, to each prompt; asked once."""
    known: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}
    llm = LLM(Options(num_blocks=256))

    def answers(asked: Sequence[Sequence[int]], num_tokens: int) -> list[Sequence[int]]:
        keys = [(tuple(prompt), num_tokens) for prompt in asked]
        new = [key for key in dict.fromkeys(keys) if key not in known]
        for key, response in zip(new, llm.generate([key[0] for key in new], num_tokens), strict=True):
            assert response.token_ids is not None, response.error
            known[key] = response.token_ids
        return [known[key] for key in keys]

    yield answers
    llm.shutdown()


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[ModelledEngine]:
    """One for all checks."""
    with running(**KINDS[request.param]) as engine:
        yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: ModelledEngine, expected: Expected) -> None:
    check(engine, expected)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_cache_in_bf16_says_the_same_from_coded_blocks(tp_size: int) -> None:
    """From raw ones, that is: in bf16 what is computed rounds otherwise than what goes on behind a loaded prefix."""
    said = []
    for form in ("raw", "lossless"):
        with running(Options(), tp_size, {"host_form": form}, dtype=torch.bfloat16) as engine:
            asked = prompts(engine, 4, seed="coded")
            computed = [engine.generate([prompt])[0].token_ids for prompt in asked]
            evict(engine, "coded")
            again = [engine.generate([prompt])[0] for prompt in asked]
            assert [answer.num_loaded for answer in again] == [loadable(engine, prompt) for prompt in asked]
            said.append([computed, [answer.token_ids for answer in again]])
            assert not engine.stats()["refused_blocks"]
            engine.check_idle()
    assert said[0] == said[1]


def test_a_cache_that_cannot_be_coded_is_refused_at_the_start() -> None:
    """It is in fp32 here."""
    with (
        pytest.raises(RuntimeError, match=r"host_form='lossless' gains nothing here: .*; give 'raw'"),
        running(Options(), settings={"host_form": "lossless"}),
    ):
        pass


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("check", engine_contract.PREEMPTIONS, ids=lambda check: check.__name__)
def test_requests_that_are_replayed(check: Check, tp_size: int, expected: Expected) -> None:
    """Nobody keeps their blocks for copies: the next step waits for these."""
    with running(Options(evicts=True), tp_size, saves_late=80) as engine:
        check(engine, expected)


def test_ranks_share_what_all_of_them_hold() -> None:
    """With multi-head latent attention every rank has the whole cache, and the host one copy of it."""
    options, latent = Options(tokens_per_block=64, num_blocks=16), {"key_only": True, "num_key_value_heads": 1}
    asked = [[5 + i, *range(7, 300)] for i in range(8)]
    alone = LLM(options, **latent)
    answers = [alone.generate([prompt])[0].token_ids for prompt in asked]
    alone.shutdown()
    with running(options, 2, **latent) as engine:
        assert [engine.generate([prompt])[0].token_ids for prompt in asked] == answers
        again = [engine.generate([prompt])[0] for prompt in asked]
        assert [answer.token_ids for answer in again] == answers
        assert [answer.num_loaded for answer in again] == [256] * 8
        stats = engine.stats()
        assert stats["saved_bytes"] * 2 == stats["loaded_bytes"], "each block is saved once and loaded by both"
        engine.check_idle()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_is_stored_is_there_for_those_that_come_later(tp_size: int, expected: Expected, tmp_path: Path) -> None:
    """An engine that was started anew computes a prompt that storage has once more, and loads it the next time."""
    settings = {"storage": {"path": str(tmp_path / "storage"), "capacity": "256MiB"}}
    with running(Options(), tp_size, settings) as engine:
        asked = prompts(engine, 3, seed="stored")
        answers = expected(asked, 8)
        assert [answer.token_ids for answer in engine.generate(asked)] == answers
        for _ in range(200):  # an idle engine plans nothing: others ask, meanwhile
            if engine.stats().get("storage_stored_blocks", 0) >= 3 * (len(asked[0]) // engine.block_tokens):
                break
            engine.generate(prompts(engine, 1, 8, seed="meanwhile"), num_tokens=2)
        engine.start(prompts(engine, 3, seed="stopped"), num_tokens=64)
    settings |= {"write_policy": "write_through_selective", "write_through_threshold": 99}  # it is storage that brings
    with running(Options(), tp_size, settings) as engine:
        first = engine.generate(asked)
        assert [answer.token_ids for answer in first] == answers
        evict(engine, "stored")
        again = engine.generate(asked)
        assert [answer.token_ids for answer in again] == answers
        assert [answer.num_loaded for answer in again] == [loadable(engine, prompt) for prompt in asked]
        assert engine.stats()["storage_read_blocks"] > 0


@pytest.mark.parametrize("tp_size", [1, 2])
def test_after_a_load_that_has_failed_nothing_is_computed_any_more(tp_size: int, expected: Expected) -> None:
    """The engine keeps the blocks of the requests that it has answered with the error, as if they were computed."""
    with running(Options(), tp_size) as engine:
        (prompt,) = asked = prompts(engine, 1, seed="failing")
        assert engine.generate(asked)[0].token_ids == expected(asked, 8)[0]
        evict(engine, "failing")
        engine.break_loads(True)
        (said,) = engine.generate(asked)
        assert said.token_ids is None
        assert "restart the engine" in said.error
        engine.llm.call(lambda executor: faults.break_loads(worker_of(executor)._half, False))
        for later in ([*prompt, 7], prompt, prompts(engine, 1, seed="another")[0]):
            (said,) = engine.generate([later])
            assert said.token_ids is None


def test_with_overlap_a_load_that_has_failed_ends_the_executor() -> None:
    """As any error of the forward pass does there; whoever was waiting has been answered."""
    with running(Options(overlap=True)) as engine:
        asked = prompts(engine, 1, seed="failing")
        engine.generate(asked)
        evict(engine, "failing")
        engine.break_loads(True)
        assert "restart the engine" in engine.generate(asked)[0].error
        assert engine.llm.error


def test_one_rank_whose_load_fails_stops_all() -> None:
    with running(Options(), 2) as engine:
        asked = prompts(engine, 1, seed="one rank")
        engine.generate(asked)
        evict(engine, "one rank")
        engine.llm.call(lambda e: faults.break_loads(worker_of(e)._half, e.rank == 1))
        assert "restart the engine" in engine.generate(asked)[0].error
        assert [worker_of(executor)._is_broken for executor in engine.llm.ranks] == [True, True]


def test_a_rank_that_hears_late_of_a_failed_load_keeps_step_with_the_others() -> None:
    """In a step that loads nothing: the ranks tell each other at its end."""
    with running(Options(), 2) as engine:
        engine.llm.call(lambda e: setattr(worker_of(e), "_has_lost", e.rank == 1))
        (said,) = engine.generate(prompts(engine, 1, seed="late"))
        assert "restart the engine" in said.error
        assert not engine.llm.error
        assert [worker_of(executor)._is_broken for executor in engine.llm.ranks] == [True, True]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_a_failed_forward_pass_has_not_computed_is_not_saved(
    tp_size: int, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Options(), tp_size) as engine:
        asked, others = prompts(engine, 2, seed="forward"), prompts(engine, 1, seed="before")
        engine.generate(others)  # there are host blocks once the ranks have said so

        with monkeypatch.context() as patch:
            patch.setattr(engine.llm.ranks[0], "_compute", lambda *args: ([], "out of memory"))
            assert [answer.error for answer in engine.generate(asked)] == ["out of memory"] * 2
        engine.llm.call(lambda executor: executor.kv.reset())  # where the engine has kept what it has not computed
        again = engine.generate(asked)
        assert [answer.num_loaded for answer in again] == [0, 0]
        assert [answer.token_ids for answer in again] == expected(asked, 8)
        engine.check_idle()


def test_a_request_that_has_ended_is_held_while_its_blocks_are_saved(expected: Expected) -> None:
    with running(Options(), saves_late=5) as engine:
        (executor,) = engine.llm.ranks
        held = []
        for prompt in prompts(engine, 4, seed="held"):
            assert engine.generate([prompt], num_tokens=2)[0].token_ids == expected([prompt], 2)[0]
            held.append(len(scheduler_of(executor)._held))
        assert any(held), "no save was late"
        engine.check_idle()


@pytest.mark.parametrize("fails", [False, True], ids=["canceled", "forward pass fails"])
def test_blocks_of_a_request_that_was_given_up_are_not_saved_with_the_bytes_of_another(
    fails: bool, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM frees them at once and says nothing; here saves that read them have not begun."""
    with running(Options(num_blocks=20)) as engine:
        (prompt,) = asked = prompts(engine, 1, seed="given up")
        engine.llm.call(lambda executor: delay_saves(executor, 10**6))
        executor = engine.llm.ranks[0]
        forward, num_steps = executor._forward, iter(range(10**6))

        def given_up(batch: Any) -> Any:
            results = forward(batch)
            if next(num_steps) == 1:
                if fails:
                    raise RuntimeError("a kernel has failed")
                batch[0].is_canceled = True
            return results

        monkeypatch.setattr(executor, "_forward", given_up)
        (said,) = engine.generate(asked, num_tokens=32)
        assert said.token_ids is None
        scheduler = scheduler_of(executor)
        assert len(scheduler._live) == 1, "nobody has said that it has ended"
        (other,) = prompts(engine, 1, 18 * engine.block_tokens, seed="takes all blocks")
        engine.generate([other], num_tokens=2)
        assert not scheduler._live
        assert len(scheduler._half._requests) == 0
        late = worker_of(executor)._half._engine
        late._most = 0
        engine.llm.call(lambda executor: late._submit(lambda left: True))
        for turn in range(3):
            evict(engine, f"given up {turn}")
        (again,) = engine.generate(asked)
        assert again.token_ids == expected(asked, 8)[0]
        assert again.num_loaded == loadable(engine, prompt)
        engine.check_idle()


def about_to_be_offered(engine: ModelledEngine, seed: str) -> tuple[TieredKVScheduler, Any]:
    """The scheduler, and a request for a prompt that the host has; the engine does not know of it."""
    (prompt,) = asked = prompts(engine, 1, seed=seed)
    engine.generate(asked)
    request = SimpleNamespace(request_id=10**6, get_tokens=lambda beam: list(prompt))
    return scheduler_of(engine.llm.ranks[0]), request


def test_what_was_offered_is_leased_until_it_is_loaded() -> None:
    """The engine's second cache manager may take an offer up some iterations later."""
    with running(Options()) as engine:
        scheduler, request = about_to_be_offered(engine, "offered")
        num_offered, is_async = scheduler.get_num_new_matched_tokens(request, 0)
        assert (num_offered, is_async) == (loadable(engine, request.get_tokens(0)), False)
        assert scheduler.stats()["host_leased_blocks"] == num_offered // engine.block_tokens
        assert not scheduler.reset_cache()
        engine.limit_host(num_offered // engine.block_tokens + 2)
        evict(engine, "offered")
        leased = scheduler._live[10**6].offered_ids
        nodes = scheduler._half.tree.match(scheduler._live[10**6].block_hashes[: len(leased)])
        assert scheduler._half.host.blocks_of(nodes) == leased
        assert not scheduler.request_finished(request, [])
        assert scheduler.stats()["host_leased_blocks"] == 0


def test_an_offer_that_is_given_back_is_leased_no_more() -> None:
    with running(Options()) as engine:
        scheduler, request = about_to_be_offered(engine, "given back")
        num_offered, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.cancel_load(request, num_offered // 2, num_offered)
        assert scheduler.stats()["host_leased_blocks"] > 0
        scheduler.cancel_load(request, 0, num_offered)
        assert scheduler.stats()["host_leased_blocks"] == 0
        engine.check_idle()


def test_a_part_of_an_offer_is_loaded_where_blocks_for_no_more_are_there() -> None:
    """And what a step of such a request computes is believed to end too soon rather than too late."""
    with running(Options()) as engine:
        scheduler, request = about_to_be_offered(engine, "part")
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc_by_layer_group(request, [[3, 4]])
        scheduler.update_state_after_alloc_by_layer_group(request, [[3, 4, 5]])  # told with the step
        live = scheduler._live[10**6]
        data = SimpleNamespace(
            request_id=10**6,
            new_tokens=request.get_tokens(0),
            new_block_ids=[3, 4, 5],
            computed_position=0,
            num_scheduled_tokens=16,
        )
        assert live.scheduled(data) == (str(10**6), 0, 16, [[5]])
        plan = scheduler.build_connector_meta(SimpleNamespace(new_requests=[], cached_requests=[]))
        assert [job.device_ids.tolist() for job in plan.loads] == [[3, 4]]
        engine.shutdown()


def test_names_cover_salts_adapters_and_images() -> None:
    identity = CacheIdentity("model", "auto", "", 4)
    request = {"lora_task_id": None, "cache_salt": None, "cache_salt_id": None, "multimodal_hashes": None}
    picture = {"multimodal_hashes": [[1] * 8], "multimodal_positions": [2], "multimodal_lengths": [3]}
    kinds = [{}, {"cache_salt": "mine"}, {"cache_salt_id": 7}, {"lora_task_id": 7}, picture]
    kinds.append(picture | {"multimodal_hashes": [[2] * 8]})

    def name(kind: dict[str, Any], hasher: PromptHasher) -> bytes:
        return hasher.start(SimpleNamespace(**request | kind)).update([5, 6, 7, 8])[0]

    hashers = [PromptHasher(identity, 4) for _ in range(2)]
    assert len({name(kind, hashers[0]) for kind in kinds}) == len(kinds)
    same = [name(kind, hashers[0]) == name(kind, hashers[1]) for kind in kinds]
    assert same == [True, True, True, False, True, True], "the number of an adapter means nothing to another start"


def test_images_without_a_hash_are_neither_saved_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt has placeholders for them, the same for every image."""
    with running(Options()) as engine:
        engine.generate(prompts(engine, 1, seed="before"))
        (prompt,) = asked = prompts(engine, 1, seed="image")
        num_cached = engine.stats()["host_cached_blocks"]
        with monkeypatch.context() as patch:
            patch.setattr(LlmRequest, "py_multimodal_data", {"image": "pixels"}, raising=False)
            engine.generate(asked)
            assert engine.stats()["host_cached_blocks"] == num_cached
        engine.llm.call(lambda executor: executor.kv.reset())
        engine.generate(asked)
        assert engine.stats()["host_cached_blocks"] > num_cached
        scheduler = scheduler_of(engine.llm.ranks[0])
        request = SimpleNamespace(request_id=10**6, get_tokens=lambda beam: prompt, py_multimodal_data={"image": 1})
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "TRTLLM_KV_CONNECTOR="),
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ('{"host_memroy": "1GiB"}', "host_memroy"),
        ('{"host_memory": "1GiB", "load_choice": "async"}', "load_choice"),
        ('{"host_memory": "1GiB", "write_policy": "write_back"}', "write_policy"),
        ('{"host_memory": "1GiB", "peer": {"port": 7100}}', "peer"),
        ('{"host_memory": "1GiB", "storage": {"path": "/x", "capacity": "1GiB", "prefetch": "timeout"}}', "prefetch"),
    ],
)
def test_settings_that_the_slot_has_no_use_for(settings: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, settings)
    with pytest.raises(ConfigError, match=said):
        read_settings()


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
        {"max_beam_width": 4},
        {"enable_attention_dp": True},
        {"speculative_config": object()},
        {"cache_transceiver_config": SimpleNamespace(backend="UCX")},
        {"kv_cache_config": SimpleNamespace(host_cache_size=1 << 30)},
        {"kv_cache_config": SimpleNamespace(max_attention_window=[4096])},
        {"kv_cache_config": SimpleNamespace(dtype="nvfp4")},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_engines_that_are_not_served(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        refuse_unserved(llm_args(Options(), **settings))


def test_blocks_of_another_size_than_was_asked_for() -> None:
    """Attention kernels may change it behind the settings: nothing is loaded or saved then under wrong names."""
    with running(Options()) as engine:
        scheduler = scheduler_of(engine.llm.ranks[0])
        request = SimpleNamespace(request_id=10**6, get_tokens=lambda beam: list(range(40)))
        with pytest.raises(ConfigError, match="tokens_per_block"):
            scheduler.update_state_after_alloc(request, [1])
        request.request_id += 1
        with pytest.raises(KVConnectorError, match="window"):
            scheduler.update_state_after_alloc(request, [1, -1, 2])
        worker: TieredKVWorker = worker_of(engine.llm.ranks[0])
        with pytest.raises(ConfigError, match="FlashMLA"):
            worker.register_kv_caches(torch.zeros(4, 2, 1, 64))
        layout = SimpleNamespace(tokens_per_block=32, groups=[])
        with pytest.raises(ConfigError, match="give that"):
            worker.register_kv_cache_layout(layout)
        window = SimpleNamespace(window_size=512)
        with pytest.raises(ConfigError, match="full attention"):
            worker.register_kv_cache_layout(SimpleNamespace(tokens_per_block=16, groups=[window]))


def test_the_module_needs_no_engine() -> None:
    """Nor does it look for one."""
    code = "import sys, kv_connector.engines.tensorrt_llm; sys.exit('tensorrt_llm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
