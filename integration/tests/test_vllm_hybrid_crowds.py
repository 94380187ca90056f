"""Models of several block groups under everything at once: requests that share beginnings of any length come faster
than the device holds them, are preempted, aborted and begun anew, while caches are reset, the host evicts and loads
fail.

Each answer is that of its prompt computed alone, up to the first token that was a close call.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.test_vllm_hybrid import forget_device, options, zero_on_host
from integration.tests.vllm_engines import VllmEngine, prompts, running, schedule_ahead
from kv_connector.engines.vllm.groups import TELLS_STATES
from tests.waiting import ANSWER_SECONDS, until

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer"),
    pytest.mark.usefixtures("mamba2_on_the_cpu", "whole_blocks_are_copied"),
]

CLOSE_CALL = 0.05  # between the log-probabilities of the first and the second token
NUM_TURNS = 100  # at each of them some requests come, and an engine makes one step
Expected = list[tuple[list[int], list[int]]]


def sharing_prompts() -> list[list[int]]:
    """Branches off two texts, and branches off those, none of which has to do with blocks."""
    rng, tails = random.Random(7), prompts(12, 260, seed=3)
    found: list[list[int]] = []
    for index, tail in enumerate(tails):
        stem = prompts(2, 330)[index % 2] if index < 8 else found[index - 8]
        found.append([*stem[: rng.randrange(30, len(stem))], *tail[: rng.randrange(1, 200)]])
    return found


def computed_alone(engine: VllmEngine, asked: list[list[int]]) -> Expected:
    """Each with its answer, as far as that is clear."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2)
    params.skip_reading_prefix_cache = True
    found = []
    for prompt in asked:
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        (answer,) = output.outputs
        likely = [sorted((entry.logprob for entry in entries.values()), reverse=True) for entries in answer.logprobs]
        close = (at for at, (first, second, *_) in enumerate(likely) if first - second < CLOSE_CALL)
        found.append((prompt, list(answer.token_ids)[: next(close, None)]))
    return [(prompt, answer) for prompt, answer in found if answer]


def crowd(engine: VllmEngine, expected: Expected, rng: random.Random) -> Counter[str]:
    """What was met; answers that are others are counted as `wrong`."""
    from vllm import SamplingParams

    llm, seen, live, wanted = engine.llm.llm_engine, Counter[str](), set[str](), {}

    def step() -> None:
        for output in llm.step():
            if output.finished and output.request_id in live:
                live.remove(output.request_id)
                same = list(output.outputs[0].token_ids) == wanted[output.request_id]
                seen["right" if same else "wrong"] += 1

    for turn in range(NUM_TURNS):
        for _ in range(rng.randrange(12 - len(live)) if len(live) < 12 else 0):
            name, (prompt, answer) = f"user {len(wanted)}", rng.choice(expected)
            wanted[name] = answer[: rng.randint(1, len(answer))]
            length = len(wanted[name])
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            llm.add_request(name, {"prompt_token_ids": prompt}, params)
            live.add(name)
        if live and rng.random() < 0.05:
            name = rng.choice(sorted(live))
            live.remove(name)
            llm.abort_request([name])
        if turn % 20 == 15:  # refused where loads are under way
            try:
                llm.reset_prefix_cache(reset_running_requests=rng.random() < 0.5, reset_connector=turn == 55)
            except RuntimeError:
                seen["refused"] += 1
        engine.break_loads(turn % 10 > 6)
        step()
    engine.break_loads(False)
    until(lambda: not live, step, engine.stats, ANSWER_SECONDS)
    return seen


@pytest.mark.parametrize(
    ("model", "unit", "policy"), [("states_apart", 32, "write_back"), ("two_sizes", None, "write_through")]
)
def test_a_crowd_is_answered_as_each_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, unit: int | None, policy: str
) -> None:
    schedule_ahead(monkeypatch)
    settings: dict[str, Any] = options(model, unit, write_policy=policy, host_memory="5MiB")
    limits = {"num_blocks": 56, "max_num_seqs": 16, "max_num_batched_tokens": 192}
    with running(folder, model, **limits, **settings) as engine:
        expected = computed_alone(engine, sharing_prompts())
        seen = crowd(engine, expected, random.Random(1))
        engine.check_all_free()
        stats = engine.stats()
        assert not seen["wrong"] and seen["right"] > 50
        assert stats["async_loads"] > 0 and stats["host_evicted_blocks"] > 0
        forget_device(engine, overwrite=False)
        assert zero_on_host(engine, 1)
        spoilt = [engine.alone([prompt], len(answer))[0] != answer for prompt, answer in expected]
    assert any(spoilt), "wrong bytes would not be seen"
