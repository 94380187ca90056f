"""Times to first token: what is no hit is no figure, and each goal is over what was measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from integration.bench import vllm_ttft
from integration.bench.engines import Engines, Ready, Sample
from integration.bench.first_tokens import (
    OVER_PEERS,
    TAIL,
    TIMED,
    claim_length,
    claim_loads,
    load_rates,
    measure_length,
    measure_part,
    no_hit,
    num_prompts,
    same_tokens,
)
from integration.bench.options import check_device
from integration.bench.vllm_engine import VllmOptions
from integration.report import Report


def row(connector: str, kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"part": "hits", "connector": connector, "tokens": 8192, "kind": kind, "ms": ms} | more


def claims(*rows: dict[str, Any]) -> dict[str, float]:
    report = Report("vllm_ttft", rows=[{"part": "options"}, *rows])
    claim_length(report, 8192, link_seconds=0.020)
    return {name: claim["value"] for name, claim in report.claims.items()}


def test_shorter_prompts_are_measured_more_often() -> None:
    lengths = (2048, 8192, 32768)
    assert [num_prompts(6, length, lengths) for length in lengths] == [24, 12, 6]
    assert num_prompts(4, 2048, [2048]) == 4, "the longest of those that are asked for"


def test_prompts_are_no_whole_chunks_of_lmcache() -> None:
    assert all(tokens % 256 == 0 and (tokens + TAIL) % 256 for tokens in OVER_PEERS["offloading"])


@pytest.mark.parametrize("tiny", [False, True])
def test_a_hit_on_the_device_ends_where_one_of_whole_chunks_does(tiny: bool) -> None:
    """At least one token is left to compute: with more behind the chunks than a block the device would hit that, too,
    and compute another number of tokens than hosts that keep chunks."""
    size = VllmOptions("none", 0, 0, 0, tiny).block_size
    assert all((tokens + TAIL - 1) // size * size == tokens for tokens in (256, 512, *OVER_PEERS["offloading"]))


def samples(tokens: Sequence[int], cached_tokens: int = 8192) -> list[Sample]:
    return [Sample(10.0, cached_tokens, token) for token in tokens]


def test_a_hit_is_whole_and_brings_each_token_of_the_device_s() -> None:
    tokens = (7, 8, 9, 10, 11, 12)
    assert same_tokens(samples(tokens), samples((7, 8, 9, 0, 11, 12))) == 5
    assert no_hit(samples(tokens), samples(tokens), 8192) == ""
    assert "5 of 6 tokens" in no_hit(samples((7, 8, 9, 10, 11, 0)), samples(tokens), 8192)
    one_short = samples(tokens[:5]) + samples(tokens[5:], 8176)
    assert no_hit(one_short, samples(tokens), 8192) == "8176 of 8192 tokens were a hit on the host"
    assert no_hit(samples(tokens), one_short, 8192) == "8176 of 8192 tokens were a hit on the device"
    assert "8208 of 8192" in no_hit(samples(tokens), samples(tokens, 8208), 8192), "which computed another shape"


def test_goals_are_over_peers_and_over_the_engine_without_a_connector() -> None:
    none = [row("none", "computed", 200), row("none", "device_hit", 15)]
    peers = [row("offloading", "host_hit", 40), row("lmcache", "host_hit", 50)]
    ours = [row("ours", "device_hit", 30), row("ours", "host_hit", 28), row(TIMED, "host_hit", 29)]
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


def test_loads_are_held_against_the_link_where_they_were_timed() -> None:
    assert load_rates([{}, {"loaded_bytes": 0.0, "load_milliseconds": 0.0}]) == {}
    counted = [{"loaded_bytes": loaded, "load_milliseconds": 2.0} for loaded in (90e6, 100e6, 104e6)]
    timed = row("ours", "host_hit", 28) | load_rates(counted)
    assert timed["load_bytes_per_second"] == pytest.approx(50e9)
    report = Report("sglang_ttft", rows=[{"part": "options"}, row("hicache", "host_hit", 30), timed])
    report.rows.append(row(TIMED, "host_hit", 29) | load_rates([{"loaded_bytes": 1e6, "load_milliseconds": 2.0}]))
    claim_loads(report, 8192, link=52e9)
    assert {name: claim["value"] for name, claim in report.claims.items()} == {
        "ours_load_over_link_8192": pytest.approx(50 / 52)
    }
    claim_loads(void := Report("sglang_ttft", rows=[timed | {"void": "not all"}]), 8192, link=52e9)
    assert not void.claims


def test_how_fast_the_loads_of_host_hits_went_is_kept_with_their_times() -> None:
    """Of all that our connector counts of a hit, behind it too, until all of it was saved."""
    calls: list[str] = []
    counted = {"loaded_bytes": 0.0, "load_milliseconds": 0.0}

    def generate(token_ids: Any) -> Sample:
        calls.append("generate")
        return Sample(5.0, 8192, 0)

    def settle() -> None:
        """A hit is what is asked for behind a device that was cleared."""
        if calls[-2:] == ["clear", "generate"]:
            counted["loaded_bytes"] += 50e6
            counted["load_milliseconds"] += 1.0

    server: Any = SimpleNamespace(
        options=SimpleNamespace(connector="ours"),
        generate=generate,
        settle=settle,
        clear_device=lambda: calls.append("clear") or "reset",
        stats=lambda: dict(counted),
    )
    engines = Engines()
    engine: Any = SimpleNamespace(name="ours", call=lambda function, *given: function(server, *given))
    engines["ours"] = engine
    measure_length(report := Report("sglang_ttft"), engines, 8192, 3)
    (row,) = [row for row in report.rows if row["kind"] == "host_hit"]
    assert row["all_load_bytes_per_second"] == [50e9] * 3 and "void" not in row


def test_a_start_tells_how_much_of_the_host_memory_its_first_token_found(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(wait_for_host=lambda: {"host_capacity_blocks": 400.0})
    engine: Any = SimpleNamespace(call=lambda function: function(server), close=lambda: None)
    engines = Engines()
    engines["ours"] = engine
    ready = {"ours": Ready(20.0, 21.0, {"host_capacity_blocks": 100.0})}
    monkeypatch.setattr(vllm_ttft, "start_engines", lambda wanted, timeout: (engines, ready))
    report = Report("vllm_ttft")
    vllm_ttft.measure_startup(report, VllmOptions("ours", 48 << 30, 0, 0), 1.0)
    assert report.claims["ours_host_memory_ready_at_first_token"]["value"] == 0.25
    (found,) = report.rows
    assert (found["first_capacity_blocks"], found["last_capacity_blocks"]) == (100.0, 400.0)


def test_prompts_of_which_a_part_is_on_the_host_come_to_each_engine_first_equally_often() -> None:
    asked: list[str] = []
    engines = Engines()

    def engine(name: str) -> Any:
        def call(*args: Any) -> Any:
            asked.append(name)
            return Sample(1.0, 6144, 0), {"load_milliseconds": 20.0, "load_stall_milliseconds": 3.0 * (name == TIMED)}

        return SimpleNamespace(name=name, call=call)

    engines.update({name: engine(name) for name in ("none", "ours", TIMED)})
    measure_part(report := Report("vllm_ttft"), engines, 8192, 5)
    assert asked[::2] == ["ours", TIMED] * 3 and sorted(asked) == ["ours"] * 6 + [TIMED] * 6
    found = {name: claim["value"] for name, claim in report.claims.items()}
    assert found == {"ours_exposed_wait_over_load_at_75_percent": 0.15}, "one that is not timed says 0"


def test_a_part_of_which_another_number_of_tokens_is_hit_is_void() -> None:
    engines = Engines()
    for name, cached in (("offloading", 6144), (TIMED, 6160)):
        sample = Sample(1.0, cached, 0), {"load_milliseconds": 20.0, "load_stall_milliseconds": 3.0}
        engine: Any = SimpleNamespace(name=name, call=lambda *given, sample=sample: sample)
        engines[name] = engine
    measure_part(report := Report("vllm_ttft"), engines, 8192, 2)
    void = {row["connector"]: row.get("void") for row in report.rows}
    assert void == {"offloading": None, TIMED: "6160 of 8192 tokens were a hit, not 6144"}
    assert not report.claims


@pytest.mark.parametrize(("gib", "tokens", "most"), [(79, 24576, 3), (79, 49152, 3), (140, 24576, 6), (140, 49152, 6)])
def test_engines_that_a_gpu_has_no_room_for_are_not_begun(
    monkeypatch: pytest.MonkeyPatch, gib: int, tokens: int, most: int
) -> None:
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    wanted = [VllmOptions(f"ours:{number}", 0, tokens, 0) for number in range(most + 1)]
    check_device(wanted[:most])
    with pytest.raises(SystemExit, match="give fewer"):
        check_device(wanted)
