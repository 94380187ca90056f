"""A trace that real vLLM recorded says what it served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM is needed")

from integration.tests.vllm_engines import BLOCK_SIZE, prompts, running, transfer_config
from kv_connector.replay import read_trace


def test_every_request_is_in_the_trace(tmp_path: Path) -> None:
    """Prompts, one of them twice, and one that goes on behind an earlier answer; no token of them."""
    file = tmp_path / "trace.jsonl"
    first, second = prompts(2, 100)
    settings = transfer_config({"record_trace": str(file)})
    with running(tmp_path / "model", kv_transfer_config=settings, warm_up=False) as engine:
        (answer,) = engine.generate([first], num_tokens=40)
        engine.alone([second, first, [*first, *answer, *second]], num_tokens=5)
        engine.drain()
    engine.half._observers._observers[-1]._observer._record.__self__.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["block_tokens"] == BLOCK_SIZE
    assert [(line["input_length"], line["output_length"]) for line in lines[1:]] == [
        (100, 40),
        (100, 5),
        (100, 5),
        (240, 5),
    ]
    assert [len(line["hash_ids"]) for line in lines[1:]] == [3, 3, 3, 7]
    trace = read_trace(file)
    assert list(trace.device_hits) == [0, 0, 3, 3]
    assert lines[1]["hash_ids"] == lines[4]["hash_ids"][:3]
