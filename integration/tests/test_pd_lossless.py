"""Engines that keep blocks in different forms on the host hand each other what lies on their devices, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.model import ModelConfig, PagedLlama
from integration.mini_engine.pd import EngineShape, make_engine, peer_settings
from integration.mini_engine.request import EngineRequest
from kv_connector.peer.carriers.nixl_agent import why_not
from tests.waiting import until

BLOCK_SIZE, NUM_BLOCKS = 8, 24
PROMPT = [(31 * i + 7) % 499 for i in range(12 * BLOCK_SIZE + 3)]
HOST = {"host_memory": "16MiB", "write_policy": "write_through", "load_choice": "sync"}
needs_nixl = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
KINDS = ["shared_memory", pytest.param("nixl", marks=needs_nixl), pytest.param("nixl staged", marks=needs_nixl)]


@contextmanager
def engine_of(form: str, kind: str, role: str, **peer: Any) -> Iterator[MiniEngine]:
    """One of a pair in this process, in bf16."""
    kind, _, route = kind.partition(" ")
    settings: dict[str, Any] = HOST | {"host_form": form, "peer": peer_settings(kind, role, route or "auto") | peer}
    config = ModelConfig(head_dim=64, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    model = PagedLlama.random(config, seed=3, dtype=torch.bfloat16)
    engine = make_engine(model, EngineShape(NUM_BLOCKS, BLOCK_SIZE, settings, name=role), "random")
    try:
        engine.generate([[1]], 1)  # the scheduler half hears what memory there is
        yield engine
    finally:
        engine.shutdown()


def ask(*engines: MiniEngine, params: dict[str, Any] | None = None, num_tokens: int = 1) -> EngineRequest:
    """The first engine is asked for the prompt; the others work beside it."""
    request = engines[0].add(PROMPT, num_tokens, kv_transfer_params=params)
    ended: list[EngineRequest] = []

    def step() -> None:
        for engine in engines:
            ended.extend(engine.step())

    until(
        lambda: request in ended and not any(engine.scheduler.has_work for engine in engines),
        step,
        lambda: [engine.connector.get_kv_connector_stats() for engine in engines if engine.connector is not None],
    )
    return request


def forget(engine: MiniEngine) -> None:
    """The device computes other things until it has nothing of the prompt."""
    others: Sequence[list[int]] = [[500 + n, *PROMPT[1:]] for n in range(4)]
    engine.generate(others, 1)


def blocks(engine: MiniEngine, request: EngineRequest) -> list[bytes]:
    """What the device has of the prompt's whole blocks, block by block."""
    hashes = request.block_hashes[: len(PROMPT) // BLOCK_SIZE]
    nodes = engine.scheduler.tree.match(hashes)
    (worker,) = engine._runner.workers  # type: ignore[union-attr]
    ids = engine.scheduler.device.blocks_of(nodes)
    return [b"".join(r.view[block].numpy().tobytes() for r in worker._layout.regions) for block in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("here", "there"), [("lossless", "lossless"), ("lossless", "raw"), ("raw", "lossless")])
def test_bytes_are_those_that_were_computed(here: str, there: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine loads a prompt from its host and hands it over, and the other one loads it from its own later."""
    for name, value in (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")):  # what two machines would have
        monkeypatch.setenv(name, value)
    with engine_of(here, kind, "producer") as producer, engine_of(there, kind, "consumer") as consumer:
        computed = blocks(producer, ask(producer))
        assert len(set(computed)) == 12
        forget(producer)
        offered = producer.add(PROMPT, 1, kv_transfer_params={"do_remote_decode": True})
        until(lambda: offered.transfer is not None, producer.step)
        assert offered.host_hit_tokens == 12 * BLOCK_SIZE
        continued = ask(consumer, producer, params=offered.transfer, num_tokens=6)
        assert (continued.device_hit_tokens, continued.host_hit_tokens) == (0, 12 * BLOCK_SIZE)
        assert blocks(consumer, continued) == computed
        forget(consumer)
        again = ask(consumer, num_tokens=6)
        assert (again.device_hit_tokens, again.host_hit_tokens) == (0, 12 * BLOCK_SIZE)
        assert blocks(consumer, again) == computed
        assert again.output_token_ids == continued.output_token_ids
        for engine in (producer, consumer):
            assert engine.connector is not None
            stats = engine.connector.get_kv_connector_stats()
            assert stats["refused_blocks"] == stats["failed_load_jobs"] == 0
        assert stats["failed_receive_jobs"] == 0
        assert stats["peer_received_bytes"] == len(b"".join(computed)), "raw pieces travel, whatever the hosts keep"


@pytest.mark.parametrize("kind", ["shared_memory", pytest.param("nixl staged", marks=needs_nixl)])
@pytest.mark.parametrize("host_form", ["raw", "lossless"])
def test_bytes_that_are_coded_on_their_way_are_those_that_were_computed(
    host_form: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")):
        monkeypatch.setenv(name, value)
    with (
        engine_of(host_form, kind, "producer", wire_form="lossless") as producer,
        engine_of(host_form, kind, "consumer", wire_form="lossless") as consumer,
    ):
        computed = blocks(producer, ask(producer))
        offered = producer.add(PROMPT, 1, kv_transfer_params={"do_remote_decode": True})
        until(lambda: offered.transfer is not None, producer.step)
        continued = ask(consumer, producer, params=offered.transfer, num_tokens=6)
        assert continued.host_hit_tokens == 12 * BLOCK_SIZE
        assert blocks(consumer, continued) == computed
        assert producer.connector is not None
        sent = producer.connector.get_kv_connector_stats()
        assert sent["peer_sent_bytes"] == len(b"".join(computed))
        assert 0.75 < sent["peer_slot_bytes"] / sent["peer_sent_bytes"] < 0.85
