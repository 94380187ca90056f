"""The contract of adapters, kept by the linker in real SGLang engines, and what SGLang's /metrics says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.tests.sglang_engines import SglangEngine, running
from kv_connector.cli.top.metrics import read_values
from kv_connector.engines.sglang.metrics import PREFIX
from kv_connector.histograms import HISTOGRAMS
from kv_connector.metrics import DOCUMENTATION
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Check, Expected, evict, prompts


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """One for all checks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path_factory.mktemp("metrics")))
        with running(models, enable_metrics=True, extra_metric_labels={"zone": "a"}) as engine:
            yield engine


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, engine: SglangEngine, expected: Expected) -> None:
    check(engine, expected)


def test_who_asks_second_is_loaded_as_well(engine: SglangEngine, expected: Expected) -> None:
    """Where the host is small and all of it promised, nobody is told of what is not there by then."""
    asked = prompts(engine, 4, seed="small")
    answers = expected(asked, 8)
    engine.limit_host(64)
    try:
        for turn in range(4):
            assert [answer.token_ids for answer in engine.generate(asked)] == answers
            assert [answer.token_ids for answer in engine.generate(asked[::-1])] == answers[::-1]
            evict(engine, turn)
    finally:
        engine.limit_host(None)
    engine.check_idle()


def test_sglangs_metrics_have_ours(engine: SglangEngine) -> None:
    """All of them, with the labels of SGLang's own, and the values that our statistics have."""
    from prometheus_client.parser import text_string_to_metric_families

    asked = prompts(engine, 2, seed="metrics")
    engine.generate(asked)
    evict(engine, 0)
    engine.generate(asked)
    engine.check_idle()
    engine.tell("answer_advance")
    stats, text = engine.stats(), scraped()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    (own,) = families["sglang:page_size"]
    for name in DOCUMENTATION:
        (sample,) = families[f"{PREFIX}{name}"]
        assert sample.labels == own.labels, name
        assert sample.value == pytest.approx(stats.get(name, 0)), name
    assert own.labels["zone"] == "a" and stats["host_hit_tokens"] and stats["host_cached_blocks"]
    sums = {
        (name, sample.labels["tier"]): sample.value
        for name in HISTOGRAMS
        for sample in families[f"{PREFIX}{name}"]
        if sample.name.endswith("_sum")
    }
    assert sums.keys() == {(name, tier) for name, kind in HISTOGRAMS.items() for tier in kind.tiers}
    assert sums["hit_tokens", "host"] == pytest.approx(stats["host_hit_tokens"])
    assert read_values(text, "SGLang") == pytest.approx({name: stats.get(name, 0) for name in DOCUMENTATION})


def scraped() -> str:
    """What SGLang's server answers: its own route, to the files that the processes of the engine write."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils import add_prometheus_middleware

    app = FastAPI()
    add_prometheus_middleware(app)
    return str(TestClient(app).get("/metrics").text)
