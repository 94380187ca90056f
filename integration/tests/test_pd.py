"""Prefill and decode in processes of their own, with real attention: tokens and bytes are those of one engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.model import ModelConfig, PagedLlama
from integration.mini_engine.pd import Ask, EngineProcess, EngineShape, Pair, make_engine, peer_settings
from kv_connector.peer.carriers.nixl_agent import why_not

BLOCK_SIZE = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split K and V": {"kv_layout": "split"},
    "fp8 with scales, two ranks": {"kv_dtype": "fp8", "tp_size": 2},
}
needs_nixl = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
KINDS = [
    "shared_memory",
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("nixl staged", marks=needs_nixl),
    pytest.param("shared_memory on cuda", marks=pytest.mark.gpu),
    pytest.param("nixl on cuda", marks=[pytest.mark.gpu, needs_nixl]),
    pytest.param("shared_memory staged on cuda", marks=pytest.mark.gpu),
    pytest.param("nixl staged on cuda", marks=[pytest.mark.gpu, needs_nixl]),
]


def build(variant: dict[str, Any], settings: dict[str, Any], name: str, on_cuda: bool) -> MiniEngine:
    """Importable by a spawned process. UCX is to use what two machines would have; consumers take the last device."""
    import os

    device = "cpu"
    if on_cuda:
        device = f"cuda:{torch.cuda.device_count() - 1 if name == 'consumer' else 0}"
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        os.environ.update({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
    torch.set_num_threads(1)
    model = PagedLlama.random(ModelConfig(num_hidden_layers=4, **variant), seed=0, device=device)
    return make_engine(model, EngineShape(60, BLOCK_SIZE, settings, max_step_tokens=48, name=name), "random")


def start(variant: dict[str, Any], kind: str, role: str, deadline_ms: int = 60_000) -> EngineProcess:
    options = {"deadline_ms": deadline_ms, "timeout_ms": 20_000, "staging_memory": 1 << 20}
    kind, _, on_cuda = kind.partition(" on ")
    kind, _, route = kind.partition(" ")
    settings = {"peer": peer_settings(kind, role, route or "auto") | options, "layer_group_bytes": 1}
    return EngineProcess(partial(build, variant, settings, role, bool(on_cuda)))


def prompts(count: int = 6) -> list[list[int]]:
    """Some share their beginnings."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 500, (40,), generator=generator).tolist()
    rest = [torch.randint(0, 500, (30 + 9 * n,), generator=generator).tolist() for n in range(count)]
    return [first[: 20 * (n % 3)] + rest[n] for n in range(count)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_tokens_are_those_of_one_engine(name: str, kind: str) -> None:
    engine = build(VARIANTS[name], {}, "alone", "cuda" in kind)
    expected = [request.output_token_ids for request in engine.generate(prompts(), 6)]
    engine.shutdown()
    pair = Pair(start(VARIANTS[name], kind, "producer"), start(VARIANTS[name], kind, "consumer"))
    try:
        parts = pair.generate(prompts(), 6)
        assert [list(decode.token_ids) for _, decode in parts] == expected
        assert [list(prefill.token_ids) for prefill, _ in parts] == [tokens[:1] for tokens in expected]
        received = sum(decode.external_hit_tokens for _, decode in parts)
        held = sum(decode.device_hit_tokens for _, decode in parts)
        assert received + held == sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts())
        stats = pair.decode.stats()
        assert stats["failed_receive_jobs"] == 0
        assert stats["peer_received_bytes"] == pair.prefill.stats()["peer_sent_bytes"] > 0
    finally:
        pair.end()


@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_a_killed_engine_costs_its_requests_only(victim: str, kind: str) -> None:
    """The other one computes what never came, holds nothing, and works with the next one that is started."""
    engine = build({}, {}, "alone", "cuda" in kind)
    expected = [request.output_token_ids for request in engine.generate(prompts(), 6)]
    engine.shutdown()
    pair = Pair(start({}, kind, "producer", 15_000), start({}, kind, "consumer"))
    try:
        told = [pair.prefill.ask(Ask(tuple(p), 1, {"do_remote_decode": True})) for p in prompts()]
        transfers = [pair.prefill.answer(number).transfer for number in told]
        if victim == "producer":
            pair.prefill.process.kill()
            asked = [pair.decode.ask(Ask(tuple(p), 6, h)) for p, h in zip(prompts(), transfers, strict=True)]
            assert [list(pair.decode.answer(number).token_ids) for number in asked] == expected
            pair.prefill.end()
            pair.prefill = start({}, kind, "producer")
        else:
            for prompt, transfer in zip(prompts(), transfers, strict=True):
                pair.decode.ask(Ask(tuple(prompt), 6, transfer))
            pair.decode.process.kill()
            pair.decode.end()
            pair.decode = start({}, kind, "consumer")
        for process in (pair.prefill, pair.decode):
            process.stats()  # it has started
        parts = pair.generate([prompt[::-1] for prompt in prompts()], 6)
        assert sum(decode.external_hit_tokens for _, decode in parts) > 100
        again = pair.generate(prompts(), 6)
        assert [list(decode.token_ids) for _, decode in again] == expected
    finally:
        pair.end()
