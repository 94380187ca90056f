"""Announced loads that fail twice in a real vLLM engine while their requests wait for room: those are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.models import tiny
from integration.servers import free_ports
from integration.tests.vllm_engines import (
    BLOCK_SIZE,
    VllmEngine,
    prompts,
    running,
    schedule_ahead,
    transfer_config,
)
from kv_connector.errors import KVConnectorError
from kv_connector.scheduler.peers.incoming import Incoming
from tests.waiting import ANSWER_SECONDS, until

NUM_BLOCKS = 40  # one is vLLM's null block
NUM_HELD = 25 * BLOCK_SIZE  # slots of the blocks that the other request has when the waiting one is admitted
(WAITING,) = prompts(1, seed=5)  # 13 full blocks, and a 14th
(OTHER,) = prompts(1, NUM_HELD - 10, seed=6)
SHARING = [*WAITING[:-4], 5, 6, 7, 8]
ALIKE = [*WAITING[: 13 * BLOCK_SIZE], *OTHER[13 * BLOCK_SIZE :]]
NUM_TOKENS = {"waiting": 16, "sharing": 8, "other": 28, "alike": 28}


class Crowded:
    """An engine in which a request waits for room behind a load that was announced and has not begun: the other one has
    taken the last block, and keeps it for a while."""

    def __init__(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, transfer: dict[str, Any] | None) -> None:
        self.engine = engine
        self.transfer = transfer  # parameters of the waiting request, that another engine has computed
        self.adapters: dict[str, Any] = {}
        self.reading_nothing: set[str] = {"alike"}  # that want their prompts computed, as for log-probabilities
        self.answers: dict[str, list[int]] = {}
        self.begun_anew: list[int] = []  # tokens that are left of a request that vLLM does not look for
        role = engine.scheduler.connector._scheduler
        compute_from = role._compute_from

        def count(request: Any, *rest: Any) -> None:
            compute_from(request, *rest)
            if request.status.name in ("WAITING", "PREEMPTED"):
                self.begun_anew.append(request.num_computed_tokens)

        monkeypatch.setattr(role, "_compute_from", count)

    def ask(self, name: str, prompt: list[int], num_tokens: int | None = None) -> None:
        """The prompt is asked under this name; one that is alike hits nothing, and is cached on the device alone."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=num_tokens or NUM_TOKENS[name], ignore_eos=True, detokenize=False
        )
        if name == "waiting" and self.transfer:
            params.extra_args = {"kv_transfer_params": self.transfer}
        if name in self.reading_nothing:
            params.skip_reading_prefix_cache = True
        if name == "alike":
            params.extra_args = {"kv_transfer_params": {"cache": {"do_not_cache": True}}}
        adapter = self.adapters.get(name)
        self.engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=adapter)

    def step(self) -> None:
        """One step; answers that are complete are kept."""
        for output in self.engine.llm.llm_engine.step():
            if output.finished:
                self.answers[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)

    def request(self, name: str) -> Any:
        """vLLM's own."""
        return next(r for i, r in self.engine.scheduler.requests.items() if i.split("-")[0] == name)

    def fill(self) -> None:
        """Until the waiting request has been told that it is received, and vLLM has found no room for it."""
        self.ask("other", OTHER)
        self.go_on("other")
        self.engine.hold_loads(True)
        self.ask("waiting", WAITING)
        self._receive("WAITING")

    def fill_anew(self) -> None:
        """The same of one that has run and was preempted, beside one that computes the same blocks for itself since."""
        self.ask("waiting", WAITING)
        self.step()
        until(lambda: self.request("waiting").status.name == "RUNNING", self.step, self.engine.stats)
        self.ask("alike", ALIKE)  # behind the other one, also when both begin anew
        self.go_on("alike")
        assert self.request("waiting").num_output_tokens > 1
        self.engine.hold_loads(True)
        assert self.engine.llm.reset_prefix_cache(reset_running_requests=True)
        self._receive("PREEMPTED")

    def go_on(self, name: str) -> None:
        """Until this one's next token but one takes a block."""
        self.step()
        until(lambda: self.request(name).num_computed_tokens >= NUM_HELD - 1, self.step, self.engine.stats)
        assert self.request(name).num_computed_tokens == NUM_HELD - 1

    def _receive(self, status: str) -> None:
        for wanted in ("WAITING_FOR_REMOTE_KVS", status):
            until(lambda wanted=wanted: self.request("waiting").status.name == wanted, self.step, self.engine.stats)
        assert not self.engine.pool.get_num_free_blocks() and self.request("waiting").num_computed_tokens

    def fail(self) -> None:
        """The load begins and fails."""
        self.engine.break_loads(True)
        self.engine.hold_loads(False)
        until(lambda: self.engine.stats().get("failed_load_jobs", 0) == 1, self.step, self.engine.stats)
        self.engine.break_loads(False)

    def run(self) -> None:
        """Until there is room for the waiting request, which may hit what it wants from then on."""
        until(lambda: self.request("waiting").status.name == "RUNNING", self.step, self.engine.stats)
        assert not self.request("waiting").skip_reading_prefix_cache

    def end(self) -> dict[str, list[int]]:
        """The answers, of all that were asked."""
        until(
            lambda: not self.engine.llm.llm_engine.has_unfinished_requests(),
            self.step,
            self.engine.stats,
            ANSWER_SECONDS,
        )
        role = self.engine.scheduler.connector._scheduler
        assert not role._begun_anew and not role._to_compute, "those that ended are forgotten"
        return self.answers

    def check_what_is_cached(self, computed: dict[str, list[int]]) -> None:
        """What these requests have computed gives the same answers, from the device and from the host."""
        asked = [(WAITING, NUM_TOKENS["waiting"]), (SHARING, NUM_TOKENS["sharing"])]
        expected = [computed["waiting"], computed["sharing"]]
        assert [self.engine.generate([p], n)[0] for p, n in asked] == expected
        self.forget_device()
        hits = self.engine.stats()["host_hit_tokens"]
        assert [self.engine.generate([p], n)[0] for p, n in asked] == expected
        assert self.engine.stats()["host_hit_tokens"] > hits
        self.engine.check_all_free()

    def forget_device(self, num_kept: int = 0) -> None:
        """All but the first blocks of the waiting prompt, and other bytes lie in the rest."""
        self.engine.drain()
        assert self.engine.llm.reset_prefix_cache()
        self.engine.alone(prompts(6, seed=9))
        self.engine.drain()
        assert self.engine.llm.reset_prefix_cache()
        if num_kept:
            self.engine.alone([WAITING[: num_kept * BLOCK_SIZE + 1]], 1)
            self.engine.drain()


@contextmanager
def crowding(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    failure: str = "recompute",
    transfer: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Crowded]:
    """An engine that has the waiting prompt on the host, knows how long loads take, and announces each at once; with
    `transfer` it continues what others have computed. `options` are vLLM's."""
    if ahead:
        schedule_ahead(monkeypatch)
    settings = {"write_policy": "write_through", "load_choice": "async", "max_load_stall_ms": 10_000}
    if transfer:
        settings["peer"] = {"secret": "of these tests only", "role": "consumer"}
    config = transfer_config(settings, kv_load_failure_policy=failure)
    options |= {"num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 1024, "kv_transfer_config": config}
    with running(models, **options) as engine:
        assert (engine.core.batch_queue_size == 2) == ahead
        crowded = Crowded(engine, monkeypatch, transfer)
        engine.alone([WAITING])
        crowded.forget_device()
        engine.alone([WAITING])
        assert engine.stats()["async_loads"] == 1
        yield crowded


@pytest.fixture(scope="module")
def computed(models: Path) -> dict[str, list[int]]:
    """The answers of an engine without the connector, that computes each alone."""
    asked = {"waiting": WAITING, "sharing": SHARING, "other": OTHER, "alike": ALIKE}
    with running(models, num_blocks=160, kv_transfer_config=None, enable_prefix_caching=False) as engine:
        return {name: engine.generate([prompt], NUM_TOKENS[name])[0] for name, prompt in asked.items()}


@pytest.mark.parametrize("num_kept", [0, 3])
@pytest.mark.parametrize("failure", ["recompute", "fail"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("given_up", ["", "before", "behind"])
def test_who_waits_for_room_behind_a_load_that_fails_is_computed(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed: dict[str, list[int]],
    given_up: str,
    ahead: bool,
    failure: str,
    num_kept: int,
) -> None:
    """Also where its client goes away before the load fails or behind that, and with another one that shares what was
    not loaded. Later ones find what these have computed, on the device and on the host."""
    expected = {name: computed[name] for name in ("waiting", "sharing", "other")}
    with crowding(models, monkeypatch, ahead, failure) as crowded:
        engine = crowded.engine
        crowded.forget_device(num_kept)
        crowded.fill()
        crowded.ask("sharing", SHARING)
        crowded.step()
        if given_up == "before":
            engine.abort([crowded.request("waiting").request_id])
        crowded.fail()
        assert crowded.begun_anew == ([] if given_up == "before" else [num_kept * BLOCK_SIZE])
        if given_up == "behind":
            engine.abort([crowded.request("waiting").request_id])
        if given_up:
            del expected["waiting"]
        else:
            assert crowded.request("waiting").status.name == "WAITING"
            crowded.run()
        assert crowded.end() == expected
        crowded.check_what_is_cached(computed)


@pytest.mark.parametrize("ahead", [False, True])
def test_who_was_preempted_and_waits_for_room_behind_a_load_that_fails_is_computed(
    models: Path, monkeypatch: pytest.MonkeyPatch, computed: dict[str, list[int]], ahead: bool
) -> None:
    """It holds the blocks that its tokens are loaded to, which no step in flight has seen, and gets no others where
    vLLM has the same ones of somebody else by then. Older versions that plan ahead do not say what becomes of the
    output of the steps before that: there the engine ends."""
    with crowding(models, monkeypatch, ahead) as crowded:
        crowded.forget_device()
        crowded.fill_anew()
        if ahead and not hasattr(crowded.request("waiting"), "drop_stale_output"):
            with pytest.raises(KVConnectorError, match="failed twice"):
                crowded.fail()
            return
        crowded.fail()
        assert crowded.begun_anew == [0]
        crowded.run()
        assert crowded.end() == {name: computed[name] for name in ("waiting", "alike")}
        crowded.check_what_is_cached(computed)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("ahead", [False, True])
def test_who_waits_for_its_adapter_behind_a_load_that_fails_does_not_keep_blocks_from_those_in_front(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool, reads: bool
) -> None:
    """vLLM has it wait among those without blocks then, and the other one, which it has preempted, in front of it: that
    has no room before the first one ends. Also where vLLM drops what it is answered of the other one, as that wants its
    prompt computed."""
    from vllm.lora.request import LoRARequest

    adapters = [LoRARequest(f"a{i}", i, str(tiny.write_adapter(tmp_path / f"a{i}", seed=i))) for i in (1, 2)]
    asked = {"waiting": (WAITING, NUM_TOKENS["waiting"]), "other": (OTHER, 2 * BLOCK_SIZE)}
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
    with crowding(models, monkeypatch, ahead, **options) as crowded:
        engine, crowded.adapters = crowded.engine, dict(zip(asked, adapters, strict=True))
        crowded.reading_nothing |= set() if reads else {"other"}

        def answer(name: str, **options: Any) -> list[int]:
            prompt, num_tokens = asked[name]
            return engine.generate([prompt], num_tokens, adapter=crowded.adapters[name], **options)[0]

        answer("waiting")
        crowded.forget_device()
        engine.hold_loads(True)
        for name, (prompt, num_tokens) in asked.items():
            crowded.ask(name, prompt, num_tokens)
        crowded.go_on("other")
        assert crowded.request("waiting").status.name == "WAITING"
        crowded.fail()
        assert crowded.begun_anew == [0]
        until(lambda: crowded.request("other").status.name == "PREEMPTED", crowded.step, engine.stats)
        crowded.run()
        assert crowded.request("other").skip_reading_prefix_cache != reads
        answers = crowded.end()
        crowded.forget_device()
        assert answers == {name: answer(name) for name in asked}
        assert answers == {name: answer(name, cache_salt="nothing is cached under it") for name in asked}
        engine.check_all_free()


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_who_waits_behind_one_that_begins_anew_wants_its_prompt_computed_all_the_same(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: bool, given_up: bool
) -> None:
    """Also where the client of the one in front goes away."""
    from vllm.lora.request import LoRARequest

    adapters = [LoRARequest(f"a{i}", i, str(tiny.write_adapter(tmp_path / f"a{i}", seed=i))) for i in (1, 2)]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
    (late,) = prompts(1, 200, seed=7)
    with crowding(models, monkeypatch, ahead, **options) as crowded:
        engine = crowded.engine
        crowded.adapters = {"waiting": adapters[0], "other": adapters[1], "late": adapters[1]}
        crowded.reading_nothing.add("late")
        engine.generate([WAITING], adapter=adapters[0])
        crowded.forget_device()
        expected = engine.generate([late], adapter=adapters[1])
        engine.drain()
        engine.hold_loads(True)
        crowded.ask("waiting", WAITING)
        crowded.ask("other", OTHER)
        crowded.go_on("other")
        crowded.fail()
        assert crowded.begun_anew == [0]
        crowded.ask("late", late, 8)
        crowded.step()
        request = crowded.request("late")
        assert request.status.name == "WAITING" and not request.skip_reading_prefix_cache
        if given_up:
            engine.abort([crowded.request("waiting").request_id])
        until(lambda: request.status.name == "RUNNING", crowded.step, engine.stats)
        assert request.skip_reading_prefix_cache
        assert crowded.end()["late"] == expected[0]
        engine.check_all_free()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_decode_engine_that_has_all_of_a_prompt_computes_what_fails(
    models: Path, monkeypatch: pytest.MonkeyPatch, computed: dict[str, list[int]], ahead: bool
) -> None:
    """It asks the prefill engine for nothing, before the load fails or behind that; nobody listens there. What such an
    engine brings is never announced before it has come."""
    (port,) = free_ports(1)
    transfer = {
        "do_remote_prefill": True,
        "remote_request_id": "computed there",
        "remote_engine_id": "prefill",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_num_tokens": 13 * BLOCK_SIZE,
    }
    declined: list[str] = []
    decline = Incoming._want_nothing

    def count(self: Incoming, request: Any, source: Any) -> None:
        declined.append(request.request_id)
        decline(self, request, source)

    monkeypatch.setattr(Incoming, "_want_nothing", count)
    with crowding(models, monkeypatch, ahead, transfer=transfer) as crowded:
        crowded.forget_device()
        crowded.fill()
        crowded.fail()
        assert crowded.begun_anew == [0]
        crowded.run()
        assert crowded.end() == {name: computed[name] for name in ("waiting", "other")}
        assert len(declined) == 1 and not crowded.engine.stats()["peer_hit_tokens"]
        crowded.check_what_is_cached(computed)
