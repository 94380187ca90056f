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
from integration.servers import free_ports
from integration.tests.test_vllm_serve import Server
from tests.waiting import until

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)"),
]

NUM_REQUESTS = 100
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
            "kv_connector_extra_config": {"peer": peer, "host_memory": "64MiB"},
        }
    )


class Proxy:
    """A process of our proxy."""

    def __init__(self, prefill: str, decode: Server, port: int = 0) -> None:
        self.port = port or free_ports(1)[0]
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

    def num_transferred(self) -> int:
        """Requests that were passed on with what a prefill engine had computed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        name = 'pd_proxy_requests_total{outcome="transferred"} '
        return next((int(float(line.removeprefix(name))) for line in lines if line.startswith(name)), 0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Cluster:
    """A prefill and a decode server, and a proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peer_port = free_ports(1)[0]
        os.environ["PD_SECRET"] = SECRET
        self.prefill, self.decode = self.start("kv_producer"), self.start("kv_consumer")
        for server in (self.prefill, self.decode):
            server.settle()
        if not (self.prefill.is_ready and self.decode.is_ready):
            self._end_servers()
            pytest.fail(f"a server did not start:\n{self.prefill.log}\n{self.decode.log}")
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
        """Wait until neither engine holds a block for anybody, on its device or on the host."""
        for server in (self.prefill, self.decode):
            end = time.monotonic() + 60
            while held := self._held(server):
                assert time.monotonic() < end, f"never let go: {held}\n{server.log[-3000:]}"

    def _held(self, server: Server) -> dict[str, float]:
        """What is in use; a request of a token lets an engine that rests report."""
        server.complete("Rest.", 1)
        names = ("kv_tiered_jobs_in_flight", "kv_tiered_host_leased_blocks", "kv_cache_usage_perc")
        values = {name: server.metric(f"vllm:{name}") for name in names}
        return {name: value for name, value in values.items() if value}

    def forget(self) -> None:
        """Empty every cache: nothing that the decode engine has may answer for the prefill engine. An engine that
        would not give all its blocks back says so."""
        self.quiesce()
        for server in (self.prefill, self.decode):
            said = server.call("POST", "/reset_prefix_cache?reset_external=true")
            assert "false" not in said, server.log[-3000:]

    def wait_for_transfers(self, count: int = 1) -> None:
        """Until the proxy has seen so many more."""
        first = self.proxy.num_transferred()
        until(lambda: self.proxy.num_transferred() >= first + count, self._ask, lambda: "nothing is transferred", 60)

    def _ask(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.proxy.complete("Is anybody there? " * 8, 1)

    def close(self) -> None:
        self.proxy.end()
        self._end_servers()

    def _end_servers(self) -> None:
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


def rings(server: Server) -> set[str]:
    """Shared memory of links to other engines that the server's processes have mapped."""
    maps = "".join(Path(f"/proc/{member}/maps").read_text() for member in server.members())
    return {line.split()[4] for line in maps.splitlines() if "kv-peer" in line}


def what_differs(cluster: Cluster, expected: list[str]) -> dict[int, str | Exception]:
    """Of all that are asked through the proxy: answers that are not the expected ones, by number."""

    def ask(number: int) -> str | Exception:
        try:
            return cluster.proxy.complete(question(number), 6, stream=number % 2 == 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return error

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        said = pool.map(ask, range(len(expected)))
        return {number: text for number, text in enumerate(said) if text != expected[number]}


def test_tokens_are_those_of_one_engine(cluster: Cluster, expected: list[str]) -> None:
    cluster.forget()
    before = cluster.decode.metric("vllm:kv_tiered_received_blocks_total")
    assert what_differs(cluster, expected) == {}
    cluster.quiesce()
    assert cluster.decode.metric("vllm:kv_tiered_received_blocks_total") - before >= NUM_REQUESTS
    assert cluster.decode.metric("vllm:kv_tiered_failed_receive_jobs_total") == 0
    assert cluster.prefill.metric("vllm:kv_tiered_expired_transfers_total") == 0
    assert cluster.proxy.num_transferred() >= NUM_REQUESTS


def test_both_engines_are_asked_at_once(cluster: Cluster, expected: list[str]) -> None:
    cluster.forget()
    before = cluster.decode.metric("vllm:kv_tiered_received_blocks_total")
    sequential, prefill = cluster.proxy, f"http://127.0.0.1:{cluster.prefill.port},127.0.0.1:{cluster.peer_port}"
    cluster.proxy = Proxy(prefill, cluster.decode)
    try:
        assert what_differs(cluster, expected[:40]) == {}
        cluster.quiesce()
    finally:
        cluster.proxy.end()
        cluster.proxy = sequential
    assert cluster.decode.metric("vllm:kv_tiered_received_blocks_total") - before >= 40


class Clients:
    """They ask all questions at once. A client whose request breaks off asks again, when it is told that whatever was
    killed is back."""

    def __init__(self, cluster: Cluster) -> None:
        self.errors: list[Exception] = []
        self._cluster = cluster
        self._changed = threading.Condition()
        self._num_answered = 0
        self._is_whole = threading.Event()
        self._is_whole.set()
        self._pool = ThreadPoolExecutor(CONCURRENCY)
        self._answers = [self._pool.submit(self._ask, number) for number in range(NUM_REQUESTS)]

    def wait_for(self, num_answered: int) -> None:
        """Until so many are answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_answered >= num_answered, 250), "requests hang"

    @contextlib.contextmanager
    def without(self, victim: str) -> Iterator[None]:
        """Something is killed, and started again, meanwhile; each client may notice once."""
        known = len(self.errors)
        self._is_whole.clear()
        yield
        assert len(self.errors) - known <= CONCURRENCY, f"without {victim}: {self.errors[known:]}"
        self._is_whole.set()

    def answers(self) -> list[str]:
        """All of them."""
        with self._pool:
            return [answer.result(250) for answer in self._answers]

    def _ask(self, number: int) -> str:
        while True:
            try:
                text = self._cluster.proxy.complete(question(number), 6, stream=number % 2 == 1)
                break
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(error)
                assert self._is_whole.wait(250), "what was killed never came back"
        with self._changed:
            self._num_answered += 1
            self._changed.notify_all()
        return text


def test_what_is_killed_in_the_middle_comes_back(cluster: Cluster, expected: list[str]) -> None:
    """100 requests, in the middle of which the proxy, the decode and the prefill engine are killed and come back. Every
    request is answered as ever, or has first ended with an error that its client sees; those that are left go on."""
    cluster.forget()
    clients = Clients(cluster)
    clients.wait_for(15)
    with clients.without("the proxy"):
        cluster.proxy.end()
        cluster.proxy = Proxy(f"http://127.0.0.1:{cluster.prefill.port}", cluster.decode, cluster.proxy.port)
        assert len(clients.errors) <= CONCURRENCY
    clients.wait_for(30)
    with clients.without("the decode engine"):
        cluster.decode.end(signal.SIGKILL)
        cluster.restart("kv_consumer")
        cluster.wait_for_transfers()  # the proxy leaves an engine alone that failed until it has passed a check
    clients.wait_for(55)
    known = len(clients.errors)
    cluster.prefill.end(signal.SIGKILL)
    clients.wait_for(65)
    cluster.restart("kv_producer")
    cluster.wait_for_transfers()
    assert clients.answers() == expected
    assert clients.errors[known:] == [], "the decode engine computes what never came"
    cluster.forget()
    before = cluster.decode.metric("vllm:kv_tiered_received_blocks_total")
    assert what_differs(cluster, expected[:20]) == {}
    assert cluster.decode.metric("vllm:kv_tiered_received_blocks_total") > before, "it is not used again"
    cluster.quiesce()
    assert [len(rings(server)) for server in (cluster.prefill, cluster.decode)] == [1, 1], "of the link that is left"


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
