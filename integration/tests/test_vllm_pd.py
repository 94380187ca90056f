"""Two real vLLM servers, one of which computes prompts that the other continues, and a proxy in front of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.models.smollm2 import default_folder, is_converted

pytest.importorskip("vllm")
from integration.tests.test_vllm_serve import Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)"),
]

NUM_REQUESTS = 200
NUM_BEFORE_KILL = 48
CONCURRENCY = 16
SECRET = "a secret of these tests only"
ROOT = Path(__file__).parents[2]


def config_of(role: str, port: int = 0) -> str:
    peer = {"secret_env": "PD_SECRET", "port": port, "deadline_ms": 30_000, "timeout_ms": 30_000}
    return json.dumps(
        {
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "kv_connector.engines.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"peer": peer},
        }
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Proxy:
    """A process of our proxy."""

    def __init__(self, prefill: str, decode: Server, port: int = 0) -> None:
        self.port = port or free_port()
        command = [sys.executable, "-m", "integration.pd_proxy", "--port", str(self.port), "--prefill", prefill]
        command += ["--decode", f"http://127.0.0.1:{decode.port}"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "serving" in self.process.stdout.readline()

    def complete(self, prompt: str, num_tokens: int = 6, stream: bool = False) -> str:
        """What is written next; raises OSError or HTTPException where the proxy or the answer breaks off."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": stream}))
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                raise ConnectionError(f"{response.status}: {text}")
        finally:
            connection.close()
        if not stream:
            return str(json.loads(text)["choices"][0]["text"])
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        parts = [json.loads(line) for line in lines]
        if any("error" in part for part in parts):
            raise ConnectionError(text)
        return "".join(part["choices"][0]["text"] for part in parts)

    def counts(self) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/health")
        counts: dict[str, int] = json.loads(connection.getresponse().read())
        connection.close()
        return counts

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Cluster:
    """A prefill and a decode server, and a proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peer_port = free_port()
        os.environ["PD_SECRET"] = SECRET
        self.prefill, self.decode = self.start("kv_producer"), self.start("kv_consumer")
        for server in (self.prefill, self.decode):
            server.settle()
            assert server.is_ready, server.log
        self.proxy = Proxy(f"http://127.0.0.1:{self.prefill.port}", self.decode)

    def start(self, role: str, port: int = 0) -> Server:
        folder = self.folder / f"{role}-{time.monotonic_ns()}"
        folder.mkdir()
        config = config_of(role, self.peer_port if role == "kv_producer" else 0)
        return Server(config, folder, port=port, num_blocks=64)

    def restart(self, role: str) -> None:
        """The same server again, at the same port."""
        old = self.prefill if role == "kv_producer" else self.decode
        new = self.start(role, old.port)
        new.settle()
        assert new.is_ready, new.log
        if role == "kv_producer":
            self.prefill = new
        else:
            self.decode = new

    def quiesce(self) -> None:
        """Wait until neither engine holds a block for anybody."""
        end = time.monotonic() + 60
        for server in (self.prefill, self.decode):
            while True:
                server.complete("Rest.", 1)
                jobs = server.metric("vllm:kv_tiered_jobs_in_flight")
                if not jobs and server.metric("vllm:kv_cache_usage_perc") == 0:
                    break
                assert time.monotonic() < end, f"{jobs} jobs are never done\n{server.log[-3000:]}"
                time.sleep(0.1)

    def close(self) -> None:
        self.proxy.end()
        for server in (self.prefill, self.decode):
            server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("pd"))
    try:
        yield cluster
    finally:
        cluster.close()


def question(number: int) -> str:
    """Prompts of 50 to 130 tokens; some share their beginnings."""
    facts = f"Note {number % 50}: the town of Vale {number % 50} has {number % 50 + 3} bridges and a mill. "
    return facts * (2 + number % 4) + f"Question {number}: how many bridges are there?"


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[str]:
    """What one engine alone says."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda n: cluster.decode.complete(question(n), 6), range(NUM_REQUESTS)))


def ask_all(cluster: Cluster, count: int = NUM_REQUESTS) -> list[str | Exception]:
    def ask(number: int) -> str | Exception:
        try:
            return cluster.proxy.complete(question(number), 6, stream=number % 2 == 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return error

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(ask, range(count)))


def forget(cluster: Cluster) -> None:
    """What the decode engine has cached must not answer for the prefill engine."""
    cluster.quiesce()
    for server in (cluster.prefill, cluster.decode):
        server.call("POST", "/reset_prefix_cache")


def test_tokens_are_those_of_one_engine(cluster: Cluster, expected: list[str]) -> None:
    forget(cluster)
    before = cluster.decode.metric("vllm:kv_tiered_received_blocks_total")
    assert ask_all(cluster) == expected
    cluster.quiesce()
    assert cluster.decode.metric("vllm:kv_tiered_received_blocks_total") - before >= NUM_REQUESTS
    assert cluster.decode.metric("vllm:kv_tiered_failed_receive_jobs_total") == 0
    assert cluster.prefill.metric("vllm:kv_tiered_expired_handovers_total") == 0
    assert cluster.proxy.counts()["handed_over"] >= NUM_REQUESTS


def test_both_engines_are_asked_at_once(cluster: Cluster, expected: list[str]) -> None:
    forget(cluster)
    before = cluster.decode.metric("vllm:kv_tiered_received_blocks_total")
    sequential, prefill = cluster.proxy, f"http://127.0.0.1:{cluster.prefill.port},127.0.0.1:{cluster.peer_port}"
    cluster.proxy = Proxy(prefill, cluster.decode)
    try:
        assert ask_all(cluster, 40) == expected[:40]
        cluster.quiesce()
    finally:
        cluster.proxy.end()
        cluster.proxy = sequential
    assert cluster.decode.metric("vllm:kv_tiered_received_blocks_total") - before >= 40


@pytest.mark.parametrize("victim", ["kv_producer", "kv_consumer", "proxy"])
def test_what_is_killed_in_the_middle_comes_back(cluster: Cluster, expected: list[str], victim: str) -> None:
    """Those that are left go on: a request is answered as ever, or ends with a clear error."""
    forget(cluster)
    answers: list[str | Exception] = []
    asking = threading.Thread(target=lambda: answers.extend(ask_all(cluster, NUM_BEFORE_KILL)))
    port = cluster.proxy.port
    asking.start()
    wait_for_traffic(cluster)
    if victim == "proxy":
        cluster.proxy.end()
        cluster.proxy = Proxy(f"http://127.0.0.1:{cluster.prefill.port}", cluster.decode, port)
    else:
        (cluster.prefill if victim == "kv_producer" else cluster.decode).end(signal.SIGKILL)
    asking.join(250)
    assert not asking.is_alive(), "a request hangs"
    right = [answer == good for answer, good in zip(answers, expected[:NUM_BEFORE_KILL], strict=True)]
    wrong = [a for a, ok in zip(answers, right, strict=True) if not ok]
    assert all(isinstance(answer, Exception) for answer in wrong), "an answer with other tokens"
    if victim == "kv_producer":
        assert not wrong, "the decode engine computes what never came"
    if victim != "proxy":
        cluster.restart(victim)
        time.sleep(2.5)  # the proxy leaves an engine that failed alone for two seconds
    cluster.quiesce()
    forget(cluster)
    before = cluster.decode.metric("vllm:kv_tiered_received_blocks_total")
    assert ask_all(cluster, 20) == expected[:20]
    assert cluster.decode.metric("vllm:kv_tiered_received_blocks_total") > before, "it is not used again"
    cluster.quiesce()


def wait_for_traffic(cluster: Cluster) -> None:
    end = time.monotonic() + 60
    first = cluster.proxy.counts()["handed_over"]
    while cluster.proxy.counts()["handed_over"] < first + 20:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_cannot_make_it_crash(cluster: Cluster) -> None:
    """`kv_transfer_params` come from whoever may send requests."""
    good = cluster.decode.complete(question(3), 6)
    for params in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "transfer_id": "x"},
        {"do_remote_prefill": True, "remote_host": ["a"], "remote_port": "b", "transfer_id": 5},
        {"do_remote_decode": "yes", "transfer_id": {"a": 1}},
        {"do_remote_decode": True, "do_remote_prefill": True, "remote_block_ids": "?"},
    ):
        for server in (cluster.prefill, cluster.decode):
            body: dict[str, Any] = {"model": "smollm2", "prompt": question(3), "max_tokens": 6, "temperature": 0}
            body |= {"ignore_eos": True, "kv_transfer_params": params}
            said = json.loads(server.call("POST", "/v1/completions", body))["choices"][0]["text"]
            assert said == good
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", cluster.peer_port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sock.recv(100)
    assert cluster.proxy.complete(question(3), 6) == good
