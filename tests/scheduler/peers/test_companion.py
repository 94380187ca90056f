"""Two engines, one of which computes prompts that the other continues. Tokens depend on every cached byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.request import EngineRequest
from integration.mini_engine.runner import LocalRunner
from integration.mini_engine.scheduler import Scheduler
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import Config
from kv_connector.errors import ConfigError
from kv_connector.index import CacheIdentity
from tests.fakes import PatternModel, check_engine

BLOCK = 4
SECONDS = 60.0
IDS = itertools.count()
SECRET = "a secret that both engines know"
DECODE = {"do_remote_decode": True}


class Engine:
    """A mini engine over a `PatternModel` that hands blocks over."""

    def __init__(
        self,
        num_blocks: int = 60,
        ranks: int = 1,
        tp_size: int = 0,
        peer: dict[str, Any] | None = None,
        model: str = "pattern",
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        peer = {"secret": SECRET, "deadline_ms": 60_000, "timeout_ms": 20_000, "staging_memory": 1 << 16} | (peer or {})
        config = Config(peer=peer, **({"layer_group_bytes": 1, "load_choice": "sync"} | settings))  # type: ignore[arg-type]
        self.model = PatternModel(num_ranks=ranks)
        tp_size = tp_size or ranks
        identity = CacheIdentity(model, "uint8", "rows", BLOCK, tp_size=tp_size, pp_size=ranks // tp_size)
        engine_id = f"engine-{next(IDS)}"
        worker = partial(build_worker, config, identity=identity, engine_id=engine_id)
        scheduler = Scheduler(num_blocks, BLOCK, max_step_tokens=24, max_running=4)
        runner = LocalRunner(self.model, num_blocks, BLOCK, worker)
        half = build_scheduler(
            config, BLOCK, ranks, tree=scheduler.tree, clock=clock, identity=identity, engine_id=engine_id
        )
        self.engine = MiniEngine(scheduler, runner, identity, half)
        self.half = half
        self.requests: list[EngineRequest] = []

    def add(self, prompt: list[int], num_tokens: int, params: dict[str, Any] | None = None) -> EngineRequest:
        request = self.engine.add(prompt, num_tokens, kv_transfer_params=params)
        self.requests.append(request)
        return request

    def stats(self) -> dict[str, float]:
        return dict(self.half.get_kv_connector_stats())

    def check(self) -> None:
        """All went as in an engine alone, and nothing is held any more."""
        check_engine(self.engine)
        for request in self.requests:
            prompt = request.token_ids[: request.num_prompt_tokens]
            assert request.output_token_ids == self.model.expected_tokens(prompt, request.max_new_tokens)
        for pool in (self.engine.scheduler.device.pool, self.half.host.pool):
            assert not [block for block in pool.live_ids() if pool.refs(block)], "blocks are held for ever"
        assert not self.half.has_pending_push_work()


def run(*engines: Engine, until: Callable[[], bool] | None = None) -> None:
    """Step all engines until there is no work, or until something is so."""
    end = time.monotonic() + SECONDS
    while any(engine.engine.scheduler.has_work for engine in engines):
        for engine in engines:
            if engine.engine.scheduler.has_work:
                engine.engine.step()
        if until is not None and until():
            return
        assert time.monotonic() < end, "it never ended"
    assert until is None or until(), "nothing is left to do"


@contextmanager
def pair(**options: Any) -> Iterator[tuple[Engine, Engine]]:
    producer, consumer = Engine(**options), Engine(**options)
    try:
        yield producer, consumer
    finally:
        producer.engine.shutdown()
        consumer.engine.shutdown()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * position + 13 * seed) % 900 for position in range(length)]


def prefill(producer: Engine, prompt: list[int], **params: Any) -> dict[str, Any]:
    """As a proxy does: one token, and what it has to tell the consumer."""
    request = producer.add(prompt, 1, DECODE | params)
    run(producer, until=lambda: request.is_finished)
    assert request.transfer is not None
    return request.transfer


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_computed_here_is_continued_there(ranks: int) -> None:
    prompt = prompt_of(50)
    with pair(ranks=ranks) as (producer, consumer):
        params = prefill(producer, prompt)
        request = consumer.add(prompt, 6, params)
        run(consumer, producer)
        assert request.host_hit_tokens == 48, "12 whole blocks; the consumer computes the rest"
        assert consumer.stats()["peer_hit_tokens"] == 48
        assert consumer.stats()["received_blocks"] == 12
        assert consumer.stats()["peer_received_bytes"] == producer.stats()["peer_sent_bytes"] > 0
        producer.check()
        consumer.check()


def test_the_producer_pushes_while_it_computes() -> None:
    """Both are asked at once, under a name that the proxy gives, and the consumer's blocks fill chunk by chunk."""
    prompt = prompt_of(120)
    with pair() as (producer, consumer):
        producer.add(prompt_of(3, seed=5), 1)  # learns its port
        run(producer)
        port = producer.engine._runner.workers[0]._peers.port  # type: ignore[attr-defined, union-attr]
        address = {"remote_host": "127.0.0.1", "remote_port": port}
        waiting = consumer.add(prompt, 4, {"do_remote_prefill": True, "transfer_id": "t", **address})
        for _ in range(3):
            consumer.engine.step()
        first = producer.add(prompt, 1, {"do_remote_decode": True, "transfer_id": "t"})
        sent_early = []
        run(
            producer,
            consumer,
            until=lambda: bool(sent_early.append(producer.stats().get("peer_sent_bytes", 0)) or waiting.is_finished),
        )
        run(producer, consumer)
        assert first.output_token_ids == waiting.output_token_ids[:1]
        assert consumer.stats()["received_blocks"] == 29
        assert producer.stats()["expired_transfers"] == 0
        producer.check()
        consumer.check()


@pytest.mark.parametrize("consumer_first", [False, True])
def test_nobody_waits_for_what_the_consumer_has(consumer_first: bool) -> None:
    """Both are asked at once, and the consumer has all of it: the producer hears so, be it before it has begun."""
    prompt = prompt_of(60)
    with pair() as (producer, consumer):
        for engine in (producer, consumer):
            engine.add(prompt, 1)
            run(engine)
        port = producer.engine._runner.workers[0]._peers.port  # type: ignore[attr-defined, union-attr]
        told = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": port}
        first, second = (producer, consumer) if not consumer_first else (consumer, producer)
        for engine in (first, second):
            engine.add(prompt, 2, told if engine is consumer else {"do_remote_decode": True, "transfer_id": "t"})
            run(engine, until=lambda engine=engine: engine.requests[-1].is_finished)
        run(producer, consumer)
        assert producer.stats()["expired_transfers"] == 0
        producer.check()
        consumer.check()


def test_what_the_consumer_has_is_not_sent_again() -> None:
    prompt = prompt_of(60)
    with pair() as (producer, consumer):
        consumer.add(prompt[:30], 1)
        run(consumer)
        consumer.add(prompt, 3, prefill(producer, prompt))
        run(consumer, producer)
        assert consumer.stats()["received_blocks"] == 14 - 7
        again = consumer.add(prompt, 3, prefill(producer, prompt))
        run(consumer, producer)
        assert again.device_hit_tokens == 56
        assert consumer.stats()["received_blocks"] == 7, "all of it was there: the producer is told at once"
        producer.check()
        consumer.check()


def test_the_host_has_the_beginning_and_the_producer_the_rest() -> None:
    """A part comes from the host's memory and a part from the other engine, and the request waits for both."""
    prompt = prompt_of(60)
    with pair(host_memory="1MiB", write_policy="write_through") as (producer, consumer):
        consumer.add(prompt[:30], 1)
        run(consumer)
        consumer.engine.scheduler.device.reset()
        request = consumer.add(prompt, 3, prefill(producer, prompt))
        run(consumer, producer)
        stats = consumer.stats()
        assert (stats["host_hit_tokens"], stats["peer_hit_tokens"]) == (28, 28)
        assert request.host_hit_tokens == 56
        consumer.engine.scheduler.device.reset()
        consumer.add(prompt, 3)
        run(consumer)
        assert consumer.stats()["host_hit_tokens"] == 28 + 56, "what was received is saved like what was computed"
        producer.check()
        consumer.check()


def test_a_producer_that_is_gone_costs_a_computation() -> None:
    prompt = prompt_of(50)
    with pair() as (producer, consumer):
        params = prefill(producer, prompt)
        producer.engine.shutdown()
        request = consumer.add(prompt, 5, params)
        run(consumer)
        assert (request.host_hit_tokens, consumer.stats()["failed_receive_jobs"]) == (0, 1)
        consumer.check()


def test_a_producer_that_was_started_anew_is_not_taken_for_the_old_one() -> None:
    prompt = prompt_of(50)
    with pair() as (producer, consumer):
        params = prefill(producer, prompt) | {"remote_engine_id": "the one before"}
        consumer.add(prompt, 5, params)
        run(consumer)
        assert consumer.stats()["failed_receive_jobs"] == 1
        consumer.check()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_pipeline_says_its_tp_size_and_where_each_rank_is(tp_size: int) -> None:
    """Two ranks: those of one stage, or a stage each. vLLM's own key counts no stages."""
    with pair(ranks=2, tp_size=tp_size) as (producer, consumer):
        prompt = prompt_of(50)
        told = prefill(producer, prompt)
        assert (told["tp_size"], len(told["remote_ports"])) == (tp_size, 2)
        consumer.add(prompt, 3, told)
        run(consumer, producer)
        assert consumer.stats()["received_blocks"] == 12
        for engine in (producer, consumer):
            engine.check()


def test_a_world_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no multiple of it"):
        Engine(ranks=3, tp_size=2)


def test_a_proxy_that_passes_on_only_vllms_own_keys() -> None:
    """Some of vLLM's examples make the decode request's parameters anew, from the keys of vLLM's own connector."""
    prompt = prompt_of(50)
    keys = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
    with pair() as (producer, consumer):
        told = prefill(producer, prompt)
        params = {"do_remote_prefill": True, "do_remote_decode": False, **{key: told.get(key) for key in keys}}
        consumer.add(prompt, 3, params)
        run(consumer, producer)
        assert consumer.stats()["received_blocks"] == 12
        for engine in (producer, consumer):
            engine.check()


def test_blocks_of_another_prompt_are_refused() -> None:
    """A proxy mixes two requests up: names of blocks tell."""
    with pair() as (producer, consumer):
        params = prefill(producer, prompt_of(50, seed=1))
        consumer.add(prompt_of(50, seed=2), 5, params)
        run(consumer)
        assert consumer.stats()["failed_receive_jobs"] == 1
        consumer.check()


@pytest.mark.parametrize(
    "params",
    [
        {"remote_port": 70000},
        {"remote_port": "7100"},
        {"remote_port": None, "remote_ports": None},
        {"remote_host": 5},
        {"remote_host": "no such host.", "timeout": 1},
        {"transfer_id": "x" * 1000, "remote_request_id": None},
        {"transfer_id": "never heard of"},
        {"remote_ports": [1, "2"]},
        {"remote_ports": [1] * 5000},
        {"tp_size": 1 << 40},
        {"tp_size": "two"},
        {"tp_size": 3},
        {"tp_size": 200},
    ],
)
def test_nonsense_from_a_client_costs_a_computation(params: dict[str, Any]) -> None:
    prompt = prompt_of(50)
    with pair() as (producer, consumer):
        good = prefill(producer, prompt)
        consumer.add(prompt, 2, good | params | ({} if "remote_ports" in params else {"remote_ports": None}))
        run(consumer)
        consumer.check()
        consumer.add(prompt_of(50, seed=3), 2, prefill(producer, prompt_of(50, seed=3)))
        run(consumer, until=lambda: not consumer.engine.scheduler.has_work)
        consumer.check()
        assert consumer.stats()["received_blocks"] == 12


def test_a_model_that_differs_is_computed() -> None:
    prompt = prompt_of(50)
    producer, consumer = Engine(model="one"), Engine(model="another")
    consumer.add(prompt, 3, prefill(producer, prompt))
    run(consumer)
    consumer.check()
    assert consumer.stats()["peer_refused_links"] == 1
    for engine in (producer, consumer):
        engine.engine.shutdown()


def test_a_hand_over_that_nobody_asks_for_is_let_go_at_the_deadline() -> None:
    now = [0.0]
    producer = Engine(clock=lambda: now[0], peer={"deadline_ms": 5000})
    prefill(producer, prompt_of(50))
    for _ in range(5):
        producer.engine.step()
    held = [
        b for b in producer.engine.scheduler.device.pool.live_ids() if producer.engine.scheduler.device.pool.refs(b)
    ]
    assert len(held) == 12
    assert producer.half.has_pending_push_work(), "an idle engine has to step, or would hold them for ever"
    now[0] = 6.0
    run(producer)
    assert producer.stats()["expired_transfers"] == 1
    producer.check()
    producer.engine.shutdown()


def test_a_producers_request_that_is_given_up_holds_nothing() -> None:
    producer = Engine()
    request = producer.add(prompt_of(100), 1, DECODE)
    producer.engine.step()
    producer.engine.scheduler.abort(request.request_id)
    assert request.transfer is None
    producer.requests.clear()
    run(producer)
    producer.check()
    producer.engine.shutdown()


@pytest.mark.parametrize("when", ["before admission", "while it waits"])
def test_a_consumers_request_that_is_given_up_frees_both_sides(when: str) -> None:
    """The producer hears of it and holds nothing, long before its deadline."""
    prompt = prompt_of(50)
    with pair() as (producer, consumer):
        params = prefill(producer, prompt)
        if when == "while it waits":
            params |= {"remote_engine_id": "", "transfer_id": "later"}  # nothing comes
        request = consumer.add(prompt, 5, params)
        if when == "while it waits":
            for _ in range(5):
                consumer.engine.step()
        consumer.engine.scheduler.abort(request.request_id)
        consumer.requests.clear()
        if when == "while it waits":
            producer.half.reset_cache()
        run(consumer, producer)
        assert producer.stats()["expired_transfers"] == 0
        producer.check()
        consumer.check()


def test_a_reset_of_the_producer_withdraws_what_it_offers() -> None:
    prompt = prompt_of(50)
    with pair() as (producer, consumer):
        params = prefill(producer, prompt)
        assert not producer.engine.scheduler.reset_cache(), "its ranks hear of it with the next step"
        run(producer)
        assert producer.engine.scheduler.reset_cache()
        producer.check()
        consumer.add(prompt, 5, params)
        run(consumer)
        assert consumer.stats()["failed_receive_jobs"] == 1
        consumer.check()


def test_more_requests_than_either_side_has_room_for() -> None:
    """Preemption, chunks and waiting on both sides, with prefixes in common."""
    prompts = [prompt_of(30, seed=0)[: 10 + 5 * (n % 4)] + prompt_of(30 + 3 * n, seed=n) for n in range(12)]
    with pair(num_blocks=40, host_memory="64KiB", write_policy="write_through") as (producer, consumer):
        first = [producer.add(prompt, 1, DECODE) for prompt in prompts]
        told: set[str] = set()

        def pass_on() -> bool:
            for request in first:
                if request.is_finished and request.request_id not in told:
                    told.add(request.request_id)
                    prompt = request.token_ids[: request.num_prompt_tokens]
                    consumer.add(prompt, 8, request.transfer)
            return len(told) == len(first)

        run(producer, consumer, until=pass_on)
        run(producer, consumer)
        assert consumer.stats()["received_blocks"] > 60
        assert producer.stats()["expired_transfers"] == 0
        producer.check()
        consumer.check()


def test_roles_are_kept() -> None:
    prompt = prompt_of(50)
    producer, consumer = Engine(peer={"role": "producer"}), Engine(peer={"role": "consumer"})
    params = prefill(producer, prompt)
    backwards = producer.add(prompt_of(40, seed=4), 2, params)
    request = consumer.add(prompt, 2, params | DECODE)
    run(producer, consumer)
    assert (backwards.host_hit_tokens, request.host_hit_tokens, request.transfer) == (0, 48, None)
    for engine in (producer, consumer):
        engine.check()
        engine.engine.shutdown()


def test_what_is_not_served_is_refused_at_the_start() -> None:
    config = Config(peer={"secret": SECRET})  # type: ignore[arg-type]
    half = build_worker(config)
    caches = PatternModel().allocate_kv_caches(9, 4)[0]
    with pytest.raises(ConfigError, match="peer needs the engine's identity"):
        half.register_kv_caches(caches, 9)
