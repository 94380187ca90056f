"""The dashboard and the alert rules name nothing that a real engine does not expose, and Prometheus takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_engines import prompts, running, transfer_config

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
OURS = re.compile(r"vllm:kv_tiered_\w+")


def queries() -> Iterator[str]:
    """Of every panel for vLLM, and of the rules' file."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text().replace("${prefix}", "vllm"))
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable.get("definition", "") for variable in dashboard["templating"]["list"])
    yield (MONITORING / "alerts.yml").read_text()


def exposed(registry: Any) -> set[str]:
    """Names of samples, as a scrape has them."""
    from prometheus_client import generate_latest

    return set(OURS.findall(generate_latest(registry).decode()))


def test_every_metric_that_is_asked_for_exists(tmp_path: Path) -> None:
    from prometheus_client import REGISTRY

    with running(tmp_path, kv_transfer_config=transfer_config({"write_policy": "write_through"})) as engine:
        engine.alone(prompts(2))
        names = exposed(REGISTRY)
    asked = {name for query in queries() for name in OURS.findall(query)}
    assert len(asked) > 40
    assert asked <= names, f"{sorted(asked - names)} are not exposed"


def test_prometheus_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    checked = subprocess.run(
        [promtool, "check", "rules", str(MONITORING / "alerts.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
