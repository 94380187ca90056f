"""SGLang's server with SmolLM2 on the CPU, started by the command line of docs/sglang.md and asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.bench.sglang_engine import ROOT, SHIMS
from integration.models.smollm2 import default_folder, is_converted
from integration.servers import HOST, free_ports
from tests.waiting import ANSWER_SECONDS, until

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(  # it is imported by the server alone: without the shims it cannot be, on a CPU
        find_spec("sglang") is None, reason="real SGLang runs in a virtual environment of its own: make test-sglang"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang's shims are for the CPU"),
    pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)"),
]

ON_THE_CPU = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph --max-total-tokens 2048 --page-size 16 --mem-fraction-static 0.6 --log-level warning"
)
PROMPT = "Lyon lies where two rivers meet. " * 40
NUM_TOKENS, NUM_FULL = 282, 272
"""Of the prompt, and of its whole pages."""


def command(port: int, **settings: Any) -> list[str]:
    """As the document has it, with a model and settings that fit this machine."""
    text = (ROOT / "docs" / "sglang.md").read_text()
    block, *_ = re.findall(r"```\n(python -m sglang\.launch_server.*?)```", text, re.S)
    words = shlex.split(block.replace("\\\n", ""))
    config = json.loads(words[-1])
    config["linker_extra_config"] = {"host_memory": "256MiB"} | settings
    words[0], words[words.index("MODEL")], words[-1] = sys.executable, str(default_folder()), json.dumps(config)
    return [*words, *shlex.split(ON_THE_CPU), "--host", HOST, "--port", str(port)]


@contextmanager
def started(folder: Path, words: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server in a group of its own, and the file of its log."""
    log = folder / "log"
    paths = {"PYTHONPATH": f"{SHIMS}:{ROOT}", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            words, env=os.environ | paths, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
    try:
        yield server, log
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def call(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def is_healthy(port: int) -> bool:
    with suppress(OSError):
        return call(port, "GET", "/health")[0] == 200
    return False


def test_what_the_device_has_forgotten_comes_from_the_host(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with started(tmp_path, command(port, keep_on_flush=True)) as (server, log):
        until(lambda: is_healthy(port) or server.poll() is not None, told=log.read_text, seconds=ANSWER_SECONDS)
        answers = []
        for _ in range(2):
            asked = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
            status, body = call(port, "POST", "/generate", asked)
            assert status == 200, log.read_text()
            answers.append(json.loads(body))
            until(lambda: call(port, "POST", "/flush_cache")[0] == 200, told=log.read_text)  # it refuses while one runs
    first, second = (answer["meta_info"] for answer in answers)
    assert answers[0]["text"] == answers[1]["text"] != ""
    assert [(one["prompt_tokens"], one["cached_tokens"]) for one in (first, second)] == [
        (NUM_TOKENS, 0),
        (NUM_TOKENS, NUM_FULL),
    ]
    assert second["cached_tokens_details"]["host"] == NUM_FULL


def test_a_misspelt_setting_ends_the_start_with_the_right_one(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with started(tmp_path, command(port, write_polcy="write_through")) as (server, log):
        until(lambda: server.poll() is not None, told=log.read_text, seconds=ANSWER_SECONDS)
    assert server.returncode != 0
    assert "unknown setting 'write_polcy' (did you mean 'write_policy'?)" in log.read_text()
