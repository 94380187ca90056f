"""A real vLLM server with SmolLM2 on the CPU, and clients that talk to it over HTTP as users do.

One is started as `vllm serve` starts it, but through the module: builds for the CPU lack the metadata that the command
asks for. The others have forks for processes (`vllm_server`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration.models.smollm2 import default_folder, is_converted
from integration.servers import free_ports
from kv_connector.cli import main
from tests.waiting import until

pytest.importorskip("vllm")

import torch

from kv_connector.engines.vllm.groups import TELLS_STATES

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)"),
]

BY_MODULE = """{"kv_connector": "TieredKVConnector", "kv_connector_module_path": "kv_connector.engines.vllm",
 "kv_role": "kv_both", "kv_connector_extra_config":
 {"host_memory": "1GiB", "storage": STORAGE}}"""
BY_NAME = """{"kv_connector": "TieredKVConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"host_memory": "256MiB", "storage": STORAGE}}"""
STORAGE = {"capacity": "1GiB", "prefetch": "wait_complete"}
MISSPELT = BY_NAME.replace("256MiB", '256MiB", "write_polcy": "write_back')
READY = "Application startup complete"
NUM_BLOCKS = 24  # of 32 tokens: about two chats
VLLM_LEFTOVER = re.compile(
    r"vllm_dist_.*|psm_.*|sem\..*|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\w{52}\.(h|h\.gch|lock)"
)
ROOT = Path(__file__).parents[2]
FORKING = Path(__file__).with_name("vllm_server.py")
FORKS = TELLS_STATES and not torch.cuda.is_available()
"""Only of vLLM 0.32 and newer: older versions bind threads in ways of their own."""
FACTS = "Lyon lies where two rivers meet. Its old town is known for covered passages, silk and good food. "


class Server:
    """A server process of its own group; `log` is what it has printed. It starts at once, `settle` waits for it. Where
    it `spawns`, each of its processes imports vLLM, and finds our plugin, by itself."""

    def __init__(
        self, transfer_config: str, folder: Path, port: int = 0, num_blocks: int = NUM_BLOCKS, spawns: bool = False
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.folder = folder
        module = [str(FORKING)] if FORKS and not spawns else ["-m", "vllm.entrypoints.openai.api_server"]
        command = [sys.executable, *module, "--model", str(default_folder())]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "smollm2"]
        command += ["--dtype", "float32", "--max-model-len", "512", "--block-size", "32", "--enforce-eager"]
        command += ["--num-gpu-blocks-override", str(num_blocks), "--max-num-seqs", "8"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", transfer_config]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings["PYTHONHASHSEED"] = "0"  # they share a folder, and old versions name blocks by it
        settings |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # several share the machine
        # All cores for each, or all servers start on the same one. "nobind" would say so, but crashes 0.20.
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | settings | {"TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._settled = threading.Event()  # ready, or ended
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def settle(self) -> None:
        """Until it answers, or has ended."""
        self._settled.wait(500)
        # The line comes just before the socket.
        until(lambda: not self.is_ready or self.process.poll() is not None or self._listens(), told=lambda: self.log)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def is_ready(self) -> bool:
        return READY in self.log

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                self._settled.set()
        self._settled.set()

    def _listens(self) -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.port), timeout=60).close()
            return True
        return False

    def members(self) -> list[int]:
        """All processes of the group."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
                if os.getpgid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
        return found

    def end(self, how: signal.Signals) -> None:
        """Signal the whole group and wait until every process of it has closed the log."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, how)
        self.process.wait(60)
        self._reader.join(60)
        assert not self._reader.is_alive(), "a process of the server outlives it"
        assert self.process.stdout is not None
        self.process.stdout.close()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """The response's text; anything but 200 fails the test."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, f"{path}: {response.status} {text}"
        connection.close()
        return text

    def complete(self, prompt: str, num_tokens: int = 8) -> str:
        """What the model writes next."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        return str(json.loads(self.call("POST", "/v1/completions", body))["choices"][0]["text"])

    def chat(self, messages: list[dict[str, str]]) -> str:
        """The assistant's next message."""
        body = {"model": "smollm2", "messages": messages, "max_tokens": 12, "temperature": 0}
        return str(json.loads(self.call("POST", "/v1/chat/completions", body))["choices"][0]["message"]["content"])

    def leave_in_the_middle(self, prompt: str) -> None:
        """Ask for a long answer and hang up after its first piece."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().readline().startswith(b"data:")
        connection.close()

    def metric(self, name: str) -> float:
        """Sum over labels of a counter or gauge."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.call("GET", "/metrics"), re.MULTILINE)
        assert values, f"/metrics has no {name}"
        return sum(map(float, values))


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All servers of these tests, started together: a start is mostly imports, in one process after the other."""
    servers: dict[str, Server] = {}
    try:
        storage = json.dumps(STORAGE | {"path": str(tmp_path_factory.mktemp("shared") / "store")})
        for config in (BY_MODULE, BY_NAME, MISSPELT):
            folder, spawns = tmp_path_factory.mktemp("server"), config is BY_NAME
            servers[config] = Server(config.replace("STORAGE", storage), folder, spawns=spawns)
        yield servers
    finally:
        for server in servers.values():
            server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def server(starts: dict[str, Server]) -> Server:
    starts[BY_MODULE].settle()
    assert starts[BY_MODULE].is_ready, starts[BY_MODULE].log
    return starts[BY_MODULE]


def about(topic: str) -> str:
    """A prompt of about 250 tokens, a third of the device."""
    return f"Notes of {topic}. {FACTS * 10}Question: what is the capital of France? Answer: The capital of France is"


def fill_the_device(server: Server) -> None:
    """Other users' prompts push everything off the device."""
    for name in ("Ada", "Grace", "Edith", "Emmy"):
        server.complete(about(name), 1)


def test_an_answer_from_the_host_is_the_answer(server: Server) -> None:
    first = server.complete(about("Marie"))
    assert "Paris" in first
    fill_the_device(server)
    before = server.metric("vllm:kv_tiered_host_hit_tokens_total")
    assert server.complete(about("Marie")) == first
    assert server.metric("vllm:kv_tiered_host_hit_tokens_total") - before >= 128, "the prefix was computed again"


def test_a_chat_hits_the_host_from_its_second_round_on(server: Server) -> None:
    """Under the default policy, and whoever else asked meanwhile."""
    hits = "vllm:kv_tiered_host_hit_tokens_total"
    messages = [{"role": "system", "content": "You help Emilie. " + FACTS * 6}]
    for question in ("Where is Lyon?", "What is it known for?", "How many rivers meet there?"):
        messages.append({"role": "user", "content": question})
        before = server.metric(hits)
        messages.append({"role": "assistant", "content": server.chat(messages)})
        assert len(messages) == 3 or server.metric(hits) - before >= 128, f"{question}: its history was computed again"
        fill_the_device(server)


def test_chats_go_on_while_others_hang_up(server: Server) -> None:
    """Four users at once, more than fits on the device; two more leave while their answer is written."""

    def talk(user: str) -> list[str]:
        messages = [{"role": "system", "content": f"You help {user}. " + FACTS * 4}]
        for question in ("Where is Lyon?", "What is it known for?", "How many rivers meet there?"):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": server.chat(messages)})
        return [message["content"] for message in messages[2::2]]

    users = ["Ada", "Grace", "Edith", "Emmy"]
    with ThreadPoolExecutor(6) as pool:
        together = [pool.submit(talk, user) for user in users]
        leavers = [pool.submit(server.leave_in_the_middle, about(f"leaver {i}")) for i in range(2)]
        answers = [future.result() for future in together]
        for leaver in leavers:
            leaver.result()
    assert [talk(user) for user in users] == answers, "a chat that is repeated alone says something else"
    assert server.metric("vllm:kv_tiered_host_hit_tokens_total") > 0


def test_metrics_tell_where_tokens_came_from(server: Server) -> None:
    server.complete(about("Rosalind"))
    fill_the_device(server)
    server.complete(about("Rosalind"))
    text = server.call("GET", "/metrics")
    for name in ("requests", "queries_tokens", "saved_blocks", "loaded_blocks", "sync_loads", "saved_bytes"):
        assert server.metric(f"vllm:kv_tiered_{name}_total") > 0, name
    assert server.metric("vllm:kv_tiered_host_cached_blocks") > 0
    assert server.metric("vllm:kv_tiered_failed_load_jobs_total") == 0
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
    source = r'^vllm:prompt_tokens_cached_by_source_total\{[^}]*source="host"[^}]*\} (\S+)$'
    from_host = re.findall(source, text, re.MULTILINE)
    if "cached_by_source" in text:  # versions from 0.26 on
        assert from_host and float(from_host[0]) > 0, "vLLM's own counters do not name the host as the source"


def test_what_the_readme_asks_shows_a_hit_from_the_host(server: Server) -> None:
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (script,) = (block for block in blocks if "ask()" in block)
    script = script.replace("localhost:8000", f"127.0.0.1:{server.port}").replace("MODEL", "smollm2")
    before = server.metric("vllm:kv_tiered_host_hit_tokens_total")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    cached = [int(number) for number in re.findall(r'"cached_tokens":(\d+)', done.stdout)]
    assert cached[-1] == 256 and sum(cached[:-1]) == 0, done.stdout
    (total,) = re.findall(r"host_hit_tokens_total\{[^}]*\} (\S+)", done.stdout)
    assert float(total) == before + 256


def test_top_shows_what_the_server_counts(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The names that vLLM serves are those that `kv-connector top` reads."""
    server.complete(about("Vera"))
    fill_the_device(server)
    server.complete(about("Vera"))
    assert main(["top", f"http://127.0.0.1:{server.port}", "--once"]) == 0
    shown = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    hits, queries = (server.metric(f"vllm:kv_tiered_{name}_tokens_total") for name in ("host_hit", "queries"))
    storage = server.metric("vllm:kv_tiered_storage_hit_tokens_total")
    assert hits > 0 and shown["from the host"][0] == f"{hits - storage:,.0f}"
    assert shown["prompt tokens"][0] == f"{queries:,.0f}"
    assert int(shown["host blocks cached"][0].replace(",", "")) > 0


def test_another_server_answers_from_the_folder_they_share(server: Server, starts: dict[str, Server]) -> None:
    """Both run, and the second has never seen the prompt."""
    first = server.complete(about("Hypatia"))
    saved, backed_up = (f"vllm:kv_tiered_{name}_blocks_total" for name in ("saved", "backed_up"))
    for turn in range(200):
        server.complete(f"{turn}", 1)  # counters are told with answers, and old versions rest without requests
        if server.metric(backed_up) == server.metric(saved):
            break
    other = starts[BY_NAME]
    other.settle()
    assert other.is_ready, other.log
    assert other.complete(about("Hypatia")) == first
    other.complete("And?", 1)
    assert other.metric("vllm:kv_tiered_storage_hit_tokens_total") >= 128, "the prompt was computed"


def test_a_reset_forgets_the_host(server: Server) -> None:
    first = server.complete(about("Lise"))
    said = server.call("POST", "/reset_prefix_cache?reset_external=true")
    assert json.loads(said or '{"success": true}') == {"success": True}, "0.20 says nothing"
    before = server.metric("vllm:kv_tiered_host_hit_tokens_total")
    assert server.complete(about("Lise")) == first
    assert server.metric("vllm:kv_tiered_host_hit_tokens_total") == before, "the host still knew the prefix"


def test_a_killed_server_leaves_nothing_behind(starts: dict[str, Server]) -> None:
    """Found by its short name alone, as a plugin of vLLM; then it is killed in the middle of its work."""
    server = starts[BY_NAME]
    server.settle()
    assert server.is_ready, server.log
    assert "Paris" in server.complete(about("Marie"))
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in server.members()]
    shared = {Path(name) for text in maps for name in re.findall(r"/dev/shm/\S+", text)}
    server.leave_in_the_middle(about("Ada"))
    server.end(signal.SIGKILL)
    left = {path.name for path in (*shared, *server.folder.rglob("*")) if path.exists() and not path.is_dir()}
    for path in shared:
        path.unlink(missing_ok=True)
    # vLLM's own channels between its processes stay where it is killed, and what it compiles for later.
    assert not {name for name in left if not VLLM_LEFTOVER.fullmatch(name)}, left


def test_a_wrong_setting_ends_the_start(starts: dict[str, Server]) -> None:
    server = starts[MISSPELT]
    server.settle()
    assert not server.is_ready
    assert server.process.wait(60) > 0, "it did not end by itself"
    assert "unknown setting 'write_polcy' (did you mean 'write_policy'?)" in server.log, server.log
