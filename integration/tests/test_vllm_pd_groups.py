"""Two real engines on models whose layers keep different things: one computes a prompt, the other continues it.

Each is in a process of its own, as vLLM has one connector in a process. Answers are those of an engine that computes
all of it, to the token, and rest on the blocks of every group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.forks import vllm_context
from integration.tests.test_vllm_hybrid import Answer, options
from integration.tests.vllm_engines import VllmEngine, prompts, running
from kv_connector.engines.vllm.groups import TELLS_STATES
from kv_connector.types import PeerAction, PeerJob

pytestmark = [
    pytest.mark.skipif(not TELLS_STATES, reason="served with vLLM 0.32 and newer"),
    pytest.mark.usefixtures("stable_hashes", "slow_machine", "mamba2_on_the_cpu"),
    pytest.mark.timeout(1200),
]

SECRET = "a secret of these tests only"
Params = dict[str, Any]


def settings_of(model: str, role: str, **more: Any) -> dict[str, Any]:
    peer = {"secret": SECRET, "role": role, "deadline_ms": 60_000, "timeout_ms": 60_000} | more
    return options(model, peer=peer) | {"num_blocks": 80}


def ask(engine: VllmEngine, prompt: Sequence[int], num_tokens: int, params: Params) -> tuple[Answer, Params | None]:
    """Greedy tokens with the log-probability of each, and what another engine is to be told."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    (output,) = engine.llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
    (answer,) = output.outputs
    probabilities = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    return (list(answer.token_ids), probabilities), output.kv_transfer_params


def differences(one: Answer, other: Answer) -> list[float]:
    """Of the log-probability of each token."""
    return [a - b for a, b in zip(one[1], other[1], strict=True)]


def zero_offered(engine: VllmEngine, group: int) -> int:
    """Put zeros into all blocks of one of our groups that wait to be asked for; returns how many those were."""
    jobs = [entry.job for entry in engine.half._ledger._open.values()]
    sends = [job for job in jobs if isinstance(job, PeerJob) and job.action is PeerAction.SEND and job.group == group]
    block_ids = [block_id for job in sends for block_id in job.device_ids.tolist()]
    engine.llm.collective_rpc(_zero_blocks, args=(block_ids,))
    return len(block_ids)


def _zero_blocks(worker: Any, block_ids: list[int]) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for region in get_kv_transfer_group()._worker.half._layout.regions:
        region.view[block_ids] = 0


def _prefill(pipe: Connection, folder: Path, model: str, more: dict[str, Any]) -> None:
    """The process of a prefill engine: answers what it is asked until it is asked nothing."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if not torch.cuda.is_available():
        del MambaMixer2.get_kv_cache_spec  # see test_vllm_hybrid
    with running(folder, model, **(settings_of(model, "producer") | more)) as engine:
        pipe.send(len(engine.half._grouped.groups))
        while (asked := pipe.recv()) is not None:
            prompt, zeroed, forgets = asked
            _, params = ask(engine, prompt, 1, {"do_remote_decode": True})
            pipe.send((params, zero_offered(engine, zeroed) if zeroed is not None else 0))
            pipe.recv()  # it has been continued
            engine.drain()
            engine.check_all_free()
            assert not forgets or engine.llm.reset_prefix_cache()
            pipe.send(engine.stats())


class Prefill:
    """A prefill engine in a process of its own; `more` of vLLM's options."""

    def __init__(self, folder: Path, model: str, **more: Any) -> None:
        context = vllm_context()
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_prefill, args=(there, folder, model, more), daemon=True)
        self.process.start()
        there.close()
        self.num_groups = int(self._pipe.recv())

    @contextmanager
    def computed(
        self, prompt: Sequence[int], zeroed: int | None = None, forgets: bool = True
    ) -> Iterator[Params | None]:
        """What a proxy is told of the prompt, while its blocks are held; all of one group's may be zeros. Afterwards
        the engine's own cache is emptied, where it `forgets`."""
        self._pipe.send((list(prompt), zeroed, forgets))
        params, num_zeroed = self._pipe.recv()
        assert (num_zeroed > 0) == (zeroed is not None)
        yield params
        self._pipe.send(True)
        assert self._pipe.recv()["expired_transfers"] == 0

    def end(self) -> None:
        self._pipe.send(None)
        self.process.join(60)


@pytest.mark.parametrize(
    "model", ["windows", "chunks", "sinks", "delta", "two_sizes", "mamba", "states_apart", "states_only", "conv"]
)
def test_a_prompt_computed_there_is_continued_here(folder: Path, model: str) -> None:
    """Log-probabilities are those of computing to the last bit where a state is kept: the same shapes are run."""
    asked = [prompt[:577] for prompt in prompts(3, 600)]
    with running(folder, model, **settings_of(model, "consumer")) as engine:
        prefill = Prefill(folder, model)
        try:
            expected = [ask(engine, prompt, 12, {})[0] for prompt in asked]
            for prompt, answer in zip(asked, expected, strict=True):
                engine.drain()
                assert engine.llm.reset_prefix_cache(reset_connector=True)
                with prefill.computed(prompt) as params:
                    assert params is not None
                    before = engine.stats()["peer_hit_tokens"]
                    tokens, probabilities = ask(engine, prompt, 12, params)[0]
                    assert tokens == answer[0]
                    assert probabilities == answer[1] or model == "two_sizes"
                    assert engine.stats()["peer_hit_tokens"] - before == params["remote_num_tokens"] >= 512
            assert not engine.stats().get("failed_receive_jobs")
            for group in range(prefill.num_groups):
                engine.drain()
                assert engine.llm.reset_prefix_cache(reset_connector=True)
                with prefill.computed(asked[0], zeroed=group) as params:
                    spoilt, _ = ask(engine, asked[0], 12, params or {})
                    assert spoilt[0] != expected[0][0] or max(map(abs, differences(spoilt, expected[0]))) > 1e-3, group
            engine.check_all_free()
        finally:
            prefill.end()


@pytest.mark.parametrize("model", ["two_sizes", "states_apart", "mamba"])
def test_transfers_end_where_all_layers_have_what_a_hit_needs(folder: Path, model: str) -> None:
    """For prompts that end at a block's end, one token in front of it and one behind it. Each is computed there twice:
    the second time the producer begins with what it has cached, with a state at the very end of the transfer."""
    lengths = [end + more for end in (64, 128, 192, 384) for more in (-1, 0, 1)]
    asked = [prompt[:length] for prompt, length in zip(prompts(len(lengths), 400), lengths, strict=True)]
    hits: list[list[int]] = [[], []]
    with running(folder, model, **settings_of(model, "consumer")) as engine:
        prefill = Prefill(folder, model)
        try:
            for prompt in asked:
                engine.drain()
                assert engine.llm.reset_prefix_cache(reset_connector=True)
                expected, _ = ask(engine, prompt, 4, {})
                for turn in range(2):
                    engine.drain()
                    assert engine.llm.reset_prefix_cache(reset_connector=True)
                    with prefill.computed(prompt, forgets=turn == 1) as params:
                        before = engine.stats()["peer_hit_tokens"]
                        assert ask(engine, prompt, 4, params or {})[0][0] == expected[0]
                        hits[turn].append(int(engine.stats()["peer_hit_tokens"] - before))
            assert not engine.stats().get("failed_receive_jobs")
            engine.check_all_free()
        finally:
            prefill.end()
    size = 128 if model == "mamba" else 64
    most = [(length - 1) // size * size for length in lengths]
    assert all(found in (0, end) for turn in hits for found, end in zip(turn, most, strict=True))
    if model == "mamba":  # vLLM computes states at half of these ends, and more where a prompt comes again
        assert all(first <= second for first, second in zip(*hits, strict=True)) and sum(hits[0]) >= 384
    else:
        assert hits == [most, most]
