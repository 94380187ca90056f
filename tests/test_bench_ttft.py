"""Times to first token: what is no hit is no figure, and each goal is over what was measured in the same run."""

from __future__ import annotations

from typing import Any

import pytest

from integration.bench.vllm_engine import Sample
from integration.bench.vllm_ttft import OVER_OFFLOADING, TAIL, claim_length, no_hit, same_tokens
from integration.report import Report


def row(connector: str, kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"part": "hits", "connector": connector, "tokens": 8192, "kind": kind, "ms": ms} | more


def claims(*rows: dict[str, Any]) -> dict[str, float]:
    report = Report("vllm_ttft", rows=[{"part": "options"}, *rows])
    claim_length(report, 8192, link_seconds=0.020)
    return {name: claim["value"] for name, claim in report.claims.items()}


def test_prompts_are_no_whole_chunks_of_lmcache() -> None:
    assert all(tokens % 256 == 0 and (tokens + TAIL) % 256 for tokens in OVER_OFFLOADING)


def test_a_hit_is_whole_and_brings_the_tokens_that_were_computed() -> None:
    computed = [Sample(50.0, 0, token) for token in (7, 8, 9, 10)]
    hits = [Sample(10.0, 8192, token) for token in (7, 8, 9, 11)]
    assert (same_tokens(computed, computed), same_tokens(hits, computed)) == (4, 3)
    whole = {"cached_tokens": 8192, "prompts": 4}
    assert no_hit(whole | {"tokens_as_computed": 3}, 8192, same_on_device=4) == "", "one differs by rounding"
    assert "1 of 4 tokens" in no_hit(whole | {"tokens_as_computed": 1}, 8192, same_on_device=4)
    assert no_hit(whole | {"tokens_as_computed": 1}, 8192, same_on_device=2) == "", "as device hits do"
    assert "8191 of 8192" in no_hit(whole | {"cached_tokens": 8191, "tokens_as_computed": 4}, 8192, same_on_device=4)


def test_goals_are_over_peers_and_over_the_engine_without_a_connector() -> None:
    none = [row("none", "computed", 200), row("none", "device_hit", 15)]
    peers = [row("offloading", "host_hit", 40), row("lmcache", "host_hit", 50)]
    ours = [row("ours", "device_hit", 30), row("ours", "host_hit", 28)]
    found = claims(*none, *peers, *ours)
    assert found == {
        "ours_host_hit_over_nones_device_hit_plus_link_8192": pytest.approx(28 / 35),
        "ours_host_hit_over_offloading_8192": pytest.approx(0.7),
        "ours_host_hit_over_lmcache_8192": pytest.approx(0.56),
    }


def test_a_void_hit_is_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    void = row("lmcache", "host_hit", 1, void="0 of 6 tokens are those that were computed")
    assert set(claims(void, row("ours", "host_hit", 28))) == set()
    assert "no host hit of lmcache" in capsys.readouterr().out
    assert claims(row("offloading", "host_hit", 40), row("ours", "host_hit", 28, void="not all")) == {}
