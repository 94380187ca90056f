"""Real engines on models whose layers keep different things: recurrent states, and blocks of different sizes.

Answers are compared with those of vLLM's own cache, and with computed ones, their log-probabilities to the last bit:
where a state is kept vLLM ends a step, so that computing and hitting run the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import VllmEngine, prompts, running, schedule_ahead, transfer_config
from kv_connector.engines.vllm.groups import TELLS_STATES
from kv_connector.index import split_key
from kv_connector.scheduler.half import SchedulerHalf

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer"),
    pytest.mark.usefixtures("mamba2_on_the_cpu", "whole_blocks_are_copied"),
]

MODELS = ("mamba", "states_apart", "states_only", "delta", "conv", "two_sizes", "sinks")
Answer = tuple[list[int], list[float]]


def options(model: str, unit: int | None = None, **settings: Any) -> dict[str, Any]:
    """`unit`: vLLM's `prefix_match_unit`."""
    config = transfer_config({"write_policy": "write_through"} | settings, kv_load_failure_policy="recompute")
    own: dict[str, dict[str, Any]] = {"delta": {"dtype": "bfloat16"}, "states_only": {"enable_prefix_caching": True}}
    own_unit = {} if unit is None else {"prefix_match_unit": unit}
    return {"kv_transfer_config": config} | own.get(model, {}) | own_unit


def ask(engine: VllmEngine, asked: Sequence[Sequence[int]], num_tokens: int = 6) -> list[Answer]:
    """Greedy tokens, and the log-probability of each; one prompt after the other."""
    return ask_and_hit(engine, asked, num_tokens)[0]


def ask_and_hit(
    engine: VllmEngine, asked: Sequence[Sequence[int]], num_tokens: int = 6
) -> tuple[list[Answer], list[int]]:
    """And how many tokens of each prompt were cached, as vLLM says."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    answers, hits = [], []
    for prompt in asked:
        (output,) = engine.llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        (answer,) = output.outputs
        probabilities = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        answers.append((list(answer.token_ids), probabilities))
        hits.append(int(output.num_cached_tokens))
    return answers, hits


def forget_device(engine: VllmEngine, overwrite: bool = True) -> None:
    """vLLM forgets what it has cached, and other prompts are written over it."""
    engine.drain()
    assert engine.llm.reset_prefix_cache()
    if overwrite:
        engine.alone(prompts(3, 700, seed=9), 1)
        engine.drain()
        assert engine.llm.reset_prefix_cache()


def zero_on_host(engine: VllmEngine, group: int) -> int:
    """Put zeros into all that the host has of one of our block groups; returns how many blocks that was."""
    spoilt = host_blocks_of(engine.half, group)
    engine.llm.collective_rpc(_zero_host_blocks, args=(spoilt,))
    return len(spoilt)


def host_blocks_of(half: SchedulerHalf, group: int) -> list[int]:
    """Those that the host has of one of our block groups."""
    block_ids = list(half.host.pool.live_ids())
    keys = zip(block_ids, half.host.hashes_of(block_ids), strict=True)
    return [block_id for block_id, key in keys if split_key(key)[1] == group]


def _zero_host_blocks(worker: Any, block_ids: list[int]) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group()._worker.half._host.tensor[block_ids] = 0


@pytest.mark.parametrize("model", MODELS)
def test_what_comes_from_the_host_answers_as_the_device_and_as_computing_do(folder: Path, model: str) -> None:
    """And what is loaded decides the answer: zeros in the blocks of any one group change it."""
    asked = [prompt[:577] for prompt in prompts(2, 600)]
    with running(folder, model, num_blocks=60, **options(model)) as engine:
        computed, from_device = ask(engine, asked), ask(engine, asked)
        assert [tokens for tokens, _ in from_device] == [tokens for tokens, _ in computed]
        assert from_device == computed or model == "two_sizes"
        assert computed[0] != computed[1]
        engine.drain()
        saved, by_device = engine.cached_bytes(), engine.stats()["device_hit_tokens"]
        forget_device(engine)
        from_host = ask(engine, asked)
        loaded, stats = engine.cached_bytes(), engine.stats()
        assert from_host == from_device
        # vLLM makes blocks of 64 tokens or of 96, as it knows the processor, and computes the last one.
        assert stats["host_hit_tokens"] == by_device >= 2 * 480
        assert stats["async_loads"] == 2
        assert not stats.get("failed_load_jobs") and not stats.get("failed_save_jobs")
        for group in range(len(engine.half._grouped.groups)):
            forget_device(engine, overwrite=False)
            assert zero_on_host(engine, group)
            assert ask(engine, asked[:1]) != from_host[:1], f"the answer does not depend on group {group}"
        engine.check_all_free()
    same = saved.keys() & loaded.keys()
    assert {key[-4:] for key in same} == {key[-4:] for key in saved}, "blocks of every group came back"
    assert all(saved[key] == loaded[key] for key in same)


@pytest.mark.parametrize(
    ("model", "unit"), [("mamba", None), ("two_sizes", None), ("mamba", 32), ("states_apart", 32), ("conv", 16)]
)
def test_hits_end_where_those_of_vllm_do(folder: Path, model: str, unit: int | None) -> None:
    """For prompts that end at a block's end, one token in front of it and one behind it, of every size of blocks. Where
    vLLM hashes more often than blocks of states end, at `unit` tokens, its hits end inside of blocks, and so do ours.
    """
    lengths = [end + more for end in (64, 128, 192, 256, 384) for more in (-1, 0, 1)]
    asked = [prompt[:length] for prompt, length in zip(prompts(len(lengths), 400), lengths, strict=True)]
    with running(folder, model, num_blocks=400, **options(model, unit=unit)) as engine:
        computed = ask(engine, asked, 3)
        from_device, on_device = ask_and_hit(engine, asked, 3)
        forget_device(engine)
        from_host, on_host = ask_and_hit(engine, asked, 3)
        engine.check_all_free()
    assert max(on_device) == 384
    assert unit is None or (3 * unit in on_device and on_host == on_device)
    assert all(theirs <= ours for theirs, ours in zip(on_device, on_host, strict=True))
    assert [answer for answer, _ in from_host] == [answer for answer, _ in computed]
    pairs = zip(from_host, from_device, on_host, on_device, strict=True)
    assert all(ours == theirs for ours, theirs, at, end in pairs if at == end)


@pytest.mark.parametrize(
    ("model", "is_ahead", "unit"), [("states_apart", False, None), ("conv", True, None), ("states_apart", True, 16)]
)
def test_chats_go_on_from_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, is_ahead: bool, unit: int | None
) -> None:
    """Each turn is the last one, its answer and a new question; chats share a beginning, and the device has room for
    one at a time. Prompts are computed in several steps."""
    if is_ahead:
        schedule_ahead(monkeypatch)
    (shared,), tails = prompts(1, 200), prompts(12, 150, seed=3)

    def chats(engine: VllmEngine, between: bool) -> list[list[int]]:
        answers, texts = [], [[*shared, *tails[chat]] for chat in range(3)]
        for turn in range(3):
            for chat, text in enumerate(texts):
                (answer,) = engine.alone([text], 20)
                answers.append(answer)
                text += [*answer, *tails[3 * (turn + 1) + chat]]
            if between:
                forget_device(engine, overwrite=False)
        return answers

    settings = options(model, unit) | {"max_num_batched_tokens": 192}
    with running(folder, model, num_blocks=60, **settings) as engine:
        assert engine.core.batch_queue_size == (2 if is_ahead else 1)
        answers = chats(engine, between=True)
        stats = engine.stats()
        forget_device(engine, overwrite=False)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert chats(engine, between=False) == answers, "all of it is computed, or on the device"
        engine.check_all_free()
    assert stats["host_hit_tokens"] >= (3 * 336 + 3 * 512 if unit else 3 * 320 + 3 * 448)
    assert stats["async_loads"] >= 6 and not stats.get("sync_loads")


@pytest.mark.parametrize(("is_ahead", "unit"), [(False, None), (True, None), (True, 32)])
def test_many_at_once_are_preempted_and_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool, unit: int | None
) -> None:
    """Requests with a common beginning, on a device that cannot hold them as they grow."""
    (shared,), tails = prompts(1, 260), prompts(6, 90, seed=5)
    asked = [[*shared, *tail] for tail in tails]
    with running(folder, "mamba", num_blocks=120, **options("mamba")) as engine:
        expected = engine.generate(asked, 100)
    if is_ahead:
        schedule_ahead(monkeypatch)
    with running(folder, "mamba", num_blocks=26, **options("mamba", unit)) as engine:
        rounds = [engine.generate(asked, 100) for _ in range(2)]
        stats = engine.stats()
        engine.check_all_free()
    assert all(answers == expected for answers in rounds)
    assert stats["async_loads"] > 0


@pytest.mark.parametrize("unit", [None, 32])
def test_a_reset_forgets_states_and_a_failed_load_is_computed(folder: Path, unit: int | None) -> None:
    asked = prompts(2)
    with running(folder, "mamba", num_blocks=60, **options("mamba", unit)) as engine:
        expected = ask(engine, asked)
        forget_device(engine)
        engine.break_loads(True)
        assert ask(engine, asked) == expected
        engine.break_loads(False)
        stats = engine.stats()
        assert stats["failed_load_jobs"] == 2
        forget_device(engine)
        assert ask(engine, asked) == expected
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        before = engine.stats()["host_hit_tokens"]
        assert ask(engine, asked) == expected
        assert engine.stats()["host_hit_tokens"] == before
        engine.check_all_free()


def test_a_state_is_saved_when_a_hit_shows_that_it_is_wanted(folder: Path) -> None:
    """Under `write_through_selective` the third request for a prompt has saved it, its state as well."""
    asked = [prompt[:577] for prompt in prompts(1, 600)]
    settings = options("mamba", write_policy="write_through_selective")
    with running(folder, "mamba", num_blocks=60, **settings) as engine:
        _, from_device, third = (ask(engine, asked) for _ in range(3))
        assert third == from_device
        forget_device(engine)
        assert ask(engine, asked) == from_device
        assert engine.stats()["host_hit_tokens"] == 512
        engine.check_all_free()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_state_that_the_host_has_lost_is_saved_with_the_next_hit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """The device has it yet, and whoever hits it there brings it back to the host."""
    if is_ahead:
        schedule_ahead(monkeypatch)
    asked = [prompt[:577] for prompt in prompts(1, 600)]
    with running(folder, "mamba", num_blocks=120, **options("mamba", host_memory="2MiB")) as engine:
        ask(engine, asked)
        from_device = ask(engine, asked)
        engine.alone(prompts(3, 577, seed=9), 1)
        engine.drain()
        assert engine.stats()["host_evicted_blocks"] > 0
        assert ask(engine, asked) == from_device
        forget_device(engine, overwrite=False)
        assert ask(engine, asked) == from_device
        assert engine.stats()["host_hit_tokens"] == 512
        engine.check_all_free()


def test_a_state_inside_of_a_block_that_the_host_has_lost_is_saved_with_the_next_hit(folder: Path) -> None:
    """And what goes on behind it begins with it: zeros in the copies of any group change the answer."""
    asked = [prompt[:420] for prompt in prompts(1)]
    longer = [[*asked[0], *range(2, 100)]]
    with running(folder, "states_apart", num_blocks=120, **options("states_apart", 32)) as engine:
        assert engine.scheduler.connector._scheduler.shape.block_sizes == (64, 64, 64)
        computed = ask(engine, asked)
        engine.drain()
        assert engine.half.reset_cache()
        again, hits = ask_and_hit(engine, asked)
        assert (again, hits) == (computed, [416])
        forget_device(engine)
        from_host, hits = ask_and_hit(engine, longer)
        assert hits == [416]
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert [tokens for tokens, _ in ask(engine, longer)] == [tokens for tokens, _ in from_host]
        for group in range(3):
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            ask(engine, asked)
            forget_device(engine, overwrite=False)
            assert zero_on_host(engine, group)
            spoilt, hits = ask_and_hit(engine, longer)
            assert hits == [416] and spoilt != from_host, f"the answer does not depend on group {group}"
            engine.drain()
        engine.check_all_free()


def test_what_is_computed_behind_a_hit_inside_of_a_block_is_saved_with_it(folder: Path) -> None:
    """A step copies the block of attention that its request has hit on the device, and computes on to where a block of
    states ends: rows of the copy, where the block that was hit has those of another prompt."""
    (shared,), tails = prompts(1, 160), prompts(2, 70, seed=22)
    other, longer = ([*shared, *tail] for tail in tails)
    asked = [longer[:200]]
    with running(folder, "mamba", num_blocks=200, **options("mamba", 32)) as engine:
        computed = ask(engine, asked)
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert [ask_and_hit(engine, [prompt])[1] for prompt in (other[:180], longer)] == [[0], [160]]
        forget_device(engine)
        from_host, hits = ask_and_hit(engine, asked)
        engine.check_all_free()
    assert hits == [192]
    assert [tokens for tokens, _ in from_host] == [tokens for tokens, _ in computed]


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
@pytest.mark.parametrize("model", ["mamba", "two_sizes"])
def test_the_next_engine_answers_from_storage(folder: Path, tmp_path: Path, model: str) -> None:
    """What comes back after a restart answers as the device did."""
    storage = {"path": str(tmp_path / "store"), "capacity": "1GiB", "prefetch": "wait_complete"}
    settings = options(model, storage=storage)
    asked = [prompt[:577] for prompt in prompts(2, 600)]
    with running(folder, model, num_blocks=60, **settings) as engine:
        engine.wait_for_storage()
        ask(engine, asked)
        from_device = ask(engine, asked)
        engine.check_all_free()
        assert engine.stats()["backed_up_blocks"] > 0
    with running(folder, model, num_blocks=60, **settings) as engine:
        engine.wait_for_storage()
        assert ask(engine, asked) == from_device
        engine.check_all_free()
        stats = engine.stats()
    assert stats["storage_hit_tokens"] == stats["host_hit_tokens"] >= 2 * 512


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
def test_states_of_another_type_are_not_found(folder: Path, tmp_path: Path) -> None:
    """Both take two bytes an element: nothing but the identity tells them apart."""
    storage = {"path": str(tmp_path / "store"), "capacity": "1GiB", "prefetch": "wait_complete"}
    settings = options("mamba", storage=storage)
    asked = [prompt[:577] for prompt in prompts(1, 600)]
    hits = []
    for dtype in ("float16", "bfloat16"):
        with running(folder, "mamba", num_blocks=60, mamba_cache_dtype=dtype, **settings) as engine:
            engine.wait_for_storage()
            ask(engine, asked)
            engine.check_all_free()
            hits.append(engine.stats()["host_hit_tokens"])
    assert hits == [0, 0]
