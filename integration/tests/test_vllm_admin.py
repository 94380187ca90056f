"""An operator steers a real vLLM: what he pins is what requests hit, and an engine that rests wakes for him."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.models.smollm2 import default_folder, is_converted
from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, prompts, running, transfer_config, weights
from kv_connector.admin.base import Answer, Refusal
from kv_connector.admin.client import AdminClient
from kv_connector.admin.listeners import listen
from kv_connector.config import AdminConfig
from kv_connector.config.admin import ADMIN_TOKEN
from kv_connector.engines.vllm.admin import RequestPrefixes
from kv_connector.engines.vllm.stats import PREFIX
from kv_connector.metrics import GAUGES
from tests.waiting import until

TOKEN = "known-to-operators-alone"


@pytest.fixture(autouse=True)
def token_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, TOKEN)


class SteeredEngine:
    """An engine in this process: while an operator waits for his answer it does what it would do by itself."""

    def __init__(self, engine: VllmEngine, socket: str) -> None:
        self.engine = engine
        self.client = AdminClient("", socket, TOKEN.encode())

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.client.call, method, path, body)
            until(answer.done, self.engine.drain, self.engine.stats)
            return answer.result()


@contextmanager
def steered(folder: Path, model: str | Path = "dense", **options: Any) -> Iterator[SteeredEngine]:
    socket = str(folder / "admin.sock")
    settings = {"write_policy": "write_through", "admin": {"socket": socket}, "host_memory": "4MiB"}
    config = transfer_config(settings | options.pop("settings", {}))
    with running(folder, model, kv_transfer_config=config, **options) as engine:
        yield SteeredEngine(engine, socket)


@pytest.mark.parametrize("salt", ["", "alice"])
def test_what_is_pinned_by_its_tokens_is_hit_after_a_flood(tmp_path: Path, salt: str) -> None:
    """The endpoint names blocks as vLLM does: with its function, its root and the request's salt."""
    asked = {"cache_salt": salt} if salt else {}
    (prompt,) = prompts(1, 4200 // 32 * 4)
    with steered(tmp_path) as steering:
        engine = steering.engine
        first = engine.generate([prompt], **asked)
        pin = steering.call("POST", "/v1/pins", {"token_ids": prompt, **asked})
        assert pin["num_blocks"] == len(prompt) // BLOCK_SIZE
        capacity = engine.stats()["host_capacity_blocks"]
        for flood in (prompts(20, 900, seed=1), prompts(20, 900, seed=2)):
            assert len(flood) * 900 // BLOCK_SIZE > 2 * capacity, "the flood fills the host twice"
            engine.alone(flood, 1)
            before = engine.stats()["host_hit_tokens"]
            assert engine.generate([prompt], **asked) == first
            hit = engine.stats()["host_hit_tokens"] - before
            assert hit == (len(prompt) // BLOCK_SIZE * BLOCK_SIZE if pin else 0)
            if pin:
                steering.call("DELETE", f"/v1/pins/{pin['id']}")
                pin = {}
        _pin_what_is_no_prefix(steering, asked)
        engine.check_all_free()


def _pin_what_is_no_prefix(steering: SteeredEngine, asked: dict[str, str]) -> None:
    """What an event tells of, blocks without those in front of them, before and after anybody asks for all."""
    engine, (prompt,) = steering.engine, prompts(1, seed=9)
    names = RequestPrefixes(engine.llm.llm_engine.vllm_config, BLOCK_SIZE)
    hashes = [block_hash.hex() for block_hash in names.hashes(prompt, asked.get("cache_salt", ""))]
    for call in ("/v1/pins", "/v1/warm"):
        with pytest.raises(Refusal, match="3 hashes are not known as those of a prompt's blocks"):
            steering.call("POST", call, {"hashes": hashes[3:6]})
    first = engine.generate([prompt], **asked)
    engine.drain()
    engine.llm.reset_prefix_cache()
    before = engine.stats()["host_hit_tokens"]
    assert engine.generate([prompt], **asked) == first
    assert engine.stats()["host_hit_tokens"] - before == len(hashes) * BLOCK_SIZE
    with pytest.raises(Refusal, match="4 hashes are not known"):
        steering.call("POST", "/v1/pins", {"hashes": hashes[2:6]})
    pin = steering.call("POST", "/v1/pins", {"hashes": hashes[:6]})
    assert engine.stats()["pinned_blocks"] == 6
    steering.call("DELETE", f"/v1/pins/{pin['id']}")
    assert engine.stats()["pinned_blocks"] == 0


def test_the_host_is_resized_and_reset_while_requests_are_served(tmp_path: Path) -> None:
    asked = prompts(6, seed=3)
    with steered(tmp_path) as steering:
        engine = steering.engine
        expected = engine.alone(asked)

        def same_answers() -> None:
            assert engine.alone(asked) == expected

        capacity = engine.stats()["host_capacity_blocks"]
        for share in (0.25, 0.0, 0.5):
            size = int(share * (4 << 20))
            with ThreadPoolExecutor(1) as pool:
                resized = pool.submit(steering.client.call, "POST", "/v1/resize", {"host_memory": size})
                until(resized.done, same_answers, engine.stats)
            small = resized.result()
            assert small["host_memory_bytes"] <= size and small["host_capacity_blocks"] == int(share * capacity)
            assert engine.alone(asked) == expected
            assert steering.call("POST", "/v1/reset") == {"done": True}
            assert engine.stats()["host_cached_blocks"] == 0
        assert steering.call("POST", "/v1/resize", {"host_memory": None})["host_capacity_blocks"] == capacity
        with pytest.raises(Refusal, match="host_memory=8388608 is more than the 4194304 bytes that the engine was"):
            steering.call("POST", "/v1/resize", {"host_memory": "8MiB"})
        engine.check_all_free()


def test_statistics_are_those_of_the_metrics(tmp_path: Path) -> None:
    """All that Prometheus is told at the end of a step; and nobody without the token is told anything."""
    from prometheus_client import REGISTRY

    with steered(tmp_path, settings={"host_memory": "64MiB"}) as steering:
        engine = steering.engine
        engine.alone([*prompts(6), *prompts(6)])
        until(lambda: not engine.stats()["jobs_in_flight"], lambda: engine.alone([[2, 3, 4]], 1), engine.stats)
        engine.alone([[2, 3, 4]], 1)  # counters are told with answers
        tiers = steering.call("GET", "/v1/stats")["tiers"]
        shown = {name: value for tier in tiers.values() for name, value in tier.items()}
        samples = [sample for family in REGISTRY.collect() for sample in family.samples]
        own = {s.name: s.value for s in samples if s.labels.get("model_name", "").startswith(str(tmp_path))}
        exported = {name: own[f"{PREFIX}{name}{'' if name in GAUGES else '_total'}"] for name in shown}
        stranger = AdminClient("", steering.client.where.removeprefix("unix:"), b"known-to-nobody-at-all")
        with pytest.raises(Refusal, match="wrong token: send the engine's") as refused:
            stranger.call("GET", "/v1/stats")
    assert refused.value.status == 401
    assert not (tmp_path / "admin.sock").exists(), "what is shut down leaves nothing behind"
    assert shown["host_hit_tokens"] > 0
    assert not {name: (shown[name], exported[name]) for name in shown if shown[name] != exported[name]}


@pytest.mark.model
@pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)")
def test_a_text_is_pinned_as_the_engine_reads_it(tmp_path: Path) -> None:
    text = "Lyon lies where two rivers meet. " * 12
    with steered(tmp_path, default_folder(), skip_tokenizer_init=False, max_model_len=512) as steering:
        engine = steering.engine
        (request_id,) = engine.llm.enqueue([text], _params(), use_tqdm=False)
        (request,) = [request for request in engine.scheduler.requests.values() if request_id in request.request_id]
        hashes = [bytes(block_hash).hex() for block_hash in request.block_hashes]
        engine.drain()
        by_text = steering.call("POST", "/v1/pins", {"text": text})
        assert by_text == steering.call("POST", "/v1/pins", {"hashes": hashes})
        assert by_text["num_blocks"] == len(hashes) > 0


@pytest.mark.usefixtures("forked_engines")
def test_an_engine_that_rests_wakes_for_an_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own it waits for requests, and none comes: it answers and writes to storage all the same.
    When it is killed, the next one takes its place."""
    from vllm import LLM

    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONHASHSEED": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    socket = str(tmp_path / "admin.sock")
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "backup": "on_eviction"}
    ours = {"write_policy": "write_through", "admin": {"socket": socket}, "storage": storage}
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "block_size": BLOCK_SIZE}
    options |= {"num_gpu_blocks_override": 40, "enforce_eager": True, "max_num_seqs": 8}
    llm = LLM(**options, **weights("dense", tmp_path), kv_transfer_config=transfer_config(ours))
    try:
        client = AdminClient("", socket, TOKEN.encode())
        (prompt,) = prompts(1)
        llm.generate([{"prompt_token_ids": prompt}], _params(), use_tqdm=False)
        assert client.call("GET", "/v1/pins") == {"pins": []}
        assert client.call("POST", "/v1/drain", {"wait_s": 60}) == {"done": True, "remaining_blocks": 0}
        storage_stats = client.call("GET", "/v1/stats")["tiers"]["storage"]
        assert storage_stats["backed_up_blocks"] == len(prompt) // BLOCK_SIZE
        for process in llm.llm_engine.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert Path(socket).exists()
    listen(AdminConfig(socket=socket), 0).close()


def _params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
