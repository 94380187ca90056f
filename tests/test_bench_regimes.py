"""Who is ahead in which regime, from rows as `vllm_serving` writes them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from integration.bench import regimes
from integration.bench.peers import LOSSLESS
from integration.bench.regimes import host_bytes, merged, misses_table, rotated, table, window_seconds
from kv_connector.errors import ConfigError

GIB = 2**30


def chats(connector: str, turns: float, p50: float = 100.0, share: float = 1.0, answer: int = 8, **more: Any) -> Any:
    """A row of one engine in one window."""
    row = {"part": "chats", "connector": connector, "vllm": "0.25.1", "host_share": share, "answer": answer}
    row |= {"users": 12, "at_once": 6, "rate": None, "seconds": 30.0}
    row |= {"turns_per_second": turns, "ttft_p50_ms": p50, "ttft_p99_ms": 2 * p50}
    return row | {"cached_share": 0.9, "waiting": 0, "arrived": 100} | more


def result(*rows: Any, commit: str | None = "c" * 40) -> Any:
    """A file of `vllm_serving`."""
    about: dict[str, Any] = {"name": "vllm_serving", "date": "2026-11-23", "arguments": []}
    about |= {"hardware": {"gpu": "H200"}, "software": {}, "commit": commit}
    return about | {"rows": [{"part": "options", "host_shares": [1.0]}, *rows]}


def test_a_host_is_a_size_or_a_multiple_of_what_the_chats_hold() -> None:
    assert host_bytes("0.5x", 15 * GIB) == int(7.5 * GIB)
    assert host_bytes("2x", 15 * GIB) == 30 * GIB
    assert host_bytes("24GiB", 15 * GIB) == 24 * GIB
    for wrong in ("much", "halfx", "-1x"):
        with pytest.raises(ConfigError, match="--host-memory"):
            host_bytes(wrong, 15 * GIB)


def test_each_engine_is_equally_often_at_every_place() -> None:
    names = ["offloading", "simple", "lmcache", "ours"]
    places = Counter((name, place) for turn in range(8) for place, name in enumerate(rotated(names, turn)))
    assert len(places) == 16 and set(places.values()) == {2}
    assert rotated([], 3) == []


@pytest.mark.parametrize("left", [30.0, 200.0, 440.0, 1e4])
def test_windows_fit_into_what_is_left_and_are_no_longer_than_asked_for(left: float) -> None:
    seconds = window_seconds(30.0, left, 15, lead=2.0)
    assert seconds <= 30.0 and 15 * (seconds + 2.0) <= left
    assert seconds == 30.0 or 15 * (seconds + 6.0) > left, "as long as they can be"


def test_the_worst_regime_comes_first_and_a_loss_is_a_claim_that_is_missed() -> None:
    small = {"share": 0.5}
    lost = result(chats("offloading", 10, 50, **small), chats("simple", 8, 80, **small), chats("ours", 9, 90, **small))
    won = result(chats("offloading", 10, 140), chats("simple", 12, 150), chats("ours", 18, 100))
    report = merged([won, lost])
    worst, best = [row for row in report.rows if row["part"] == "regime"]
    assert (worst["host_share"], worst["best_peer"], worst["over_best_peer"]) == (0.5, "offloading", 0.9)
    assert (best["host_share"], best["best_peer"], best["over_best_peer"]) == (1.0, "simple", 1.5)
    assert best["p50_over_soonest_peer"] == pytest.approx(100 / 140), "the soonest peer, which need not be the fastest"
    holds = {name: claim["holds"] for name, claim in report.claims.items()}
    assert holds == {
        "turns_over_best_of_2_peers_host_0.5x_answers_8_vllm_0251": False,
        "p50_over_best_of_2_peers_host_0.5x_answers_8_vllm_0251": False,
        "turns_over_best_of_2_peers_host_1x_answers_8_vllm_0251": True,
        "p50_over_best_of_2_peers_host_1x_answers_8_vllm_0251": True,
        "turns_over_best_peer_median_of_2_regimes": True,
    }
    assert report.claims["turns_over_best_peer_median_of_2_regimes"]["value"] == pytest.approx(1.2)
    _, _, first, second = table([worst, best])
    assert (
        "| 0.5x | 8 tokens | 30 s | **0.90** | **1.80** |" in first
        and "| 1x | 8 tokens | 30 s | 1.50 | 0.71 |" in second
    )


def test_a_peer_that_is_void_or_did_not_start_is_named_and_not_compared() -> None:
    failed = {"part": "failed", "connector": "simple", "reason": "did not start", "vllm": "0.25.1", "host_share": 1.0}
    elsewhere = failed | {"connector": "offloading:block_size=64", "host_share": 2.0}
    void = chats("lmcache", 99, 1, void="no token came from its host memory")
    report = merged([result(chats("offloading", 10), void, chats("ours", 20), failed, elsewhere)])
    regime = report.rows[0]
    assert (regime["num_peers"], regime["over_best_peer"]) == (1, 2.0)
    assert regime["missing"] == {"simple": "did not start", "lmcache": "no token came from its host memory"}
    assert any("best_of_1_peers" in claim for claim in report.claims), "nobody takes it for all of them"
    assert "did not start" in table([regime])[2] and "no token came" in table([regime])[2]


def test_where_the_default_or_all_peers_are_missing_the_regime_comes_first_without_a_claim() -> None:
    report = merged([
        result(chats("offloading", 10), chats("ours", 20)),
        result(chats("offloading", 10, answer=32), chats("ours:write_through", 20, answer=32)),
    ])  # fmt: skip
    first = report.rows[0]
    assert first["answer"] == 32 and "over_best_peer" not in first, "write_through is not the default"
    assert not any("answers_32" in claim for claim in report.claims)
    assert "| 32 tokens | 30 s | **none** | **none** |" in table([first])[2]


def test_several_windows_of_a_regime_count_with_their_medians() -> None:
    windows = [chats("ours:adaptive", turns) for turns in (10, 30, 20)]
    report = merged([result(*windows[:2], chats("offloading", 10)), result(windows[2], chats("offloading", 10))])
    assert report.rows[0]["over_best_peer"] == 2.0
    assert report.rows[0]["engines"]["ours:adaptive"]["all_turns_per_second"] == [10, 30, 20]


def test_a_median_that_is_only_a_lower_bound_claims_nothing() -> None:
    cut = chats("ours", 20, 90, lower_bounds=["ttft_p50_ms", "ttft_p99_ms"])
    report = merged([result(chats("offloading", 10), cut)])
    assert not any(claim.startswith("p50") for claim in report.claims)
    assert "at least 90 ms" in table(report.rows[:1])[2]


def test_a_median_that_has_waited_longer_than_any_peer_is_missed() -> None:
    cut = chats("ours", 20, 9000, lower_bounds=["ttft_p50_ms", "ttft_p99_ms"])
    report = merged([result(chats("offloading", 10), cut)])
    assert [claim["holds"] for name, claim in report.claims.items() if name.startswith("p50")] == [False]


def test_results_of_two_gpus_are_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for gpu in ("one", "another"):
        content = result(chats("offloading", 10), chats("ours", 20)) | {"hardware": {"gpu": gpu}}
        files.append(tmp_path / f"{gpu}.json")
        files[-1].write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        regimes.main(list(map(str, files)))
    assert "of several engines, GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["users", "at_once"])
def test_a_regime_is_of_one_number_of_users(tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    """What the host holds of the chats may be the same, and yet others ask, or more of them at a time."""
    files = []
    for count in (24, 12):
        rows = chats("offloading", 10, **{number: count}), chats("ours", 20, **{number: count})
        files.append(tmp_path / f"{count}.json")
        files[-1].write_text(json.dumps(result(*rows, chats("ours", 20, share=0.5, **{number: 2 * count}))))
    with pytest.raises(SystemExit):
        regimes.main(list(map(str, files)))
    assert "several numbers of users in host_1x_answers_8_vllm_0251" in capsys.readouterr().err
    assert regimes.main([str(files[0])]) == 0, "by the same engines other shares are of other users"


def test_a_table_of_several_commits_is_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for commit in ("a" * 40, "b" * 40):
        files.append(tmp_path / f"{commit[0]}.json")
        files[-1].write_text(json.dumps(result(chats("offloading", 10), chats("ours", 20), commit=commit)))
    target = tmp_path / "merged.json"
    assert regimes.main([*map(str, files), "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert written["commit"] is None and "several commits" in capsys.readouterr().out
    assert [row["commit"] for row in written["rows"] if row["part"] == "source"] == ["a" * 40, "b" * 40]
    assert regimes.main([str(files[0]), "--json", str(target)]) == 0
    assert json.loads(target.read_text())["commit"] == "a" * 40
    picture = tmp_path / "pictures" / "regimes.png"
    assert regimes.main([str(files[0]), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_result_without_regimes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = tmp_path / "older.json"
    older.write_text(json.dumps({"name": "vllm_serving", "rows": [{"part": "options"}]}))
    with pytest.raises(SystemExit):
        regimes.main([str(older)])
    assert "measure it again" in capsys.readouterr().err


def test_where_nothing_is_hit_the_default_is_measured_against_no_connector() -> None:
    missed = {"part": "misses", "vllm": "0.32.0", "connector": "ours", "over_none": 0.98, "calls_ms": 0.4}
    missed |= {"over_none_p10": 0.97, "over_none_p90": 0.99, "all_over_none": [0.98] * 15}
    coded = missed | {"connector": LOSSLESS, "over_none": 0.991}
    report = merged([result(missed, missed | {"connector": "lmcache", "over_none": 0.9}, coded)])
    assert [row["connector"] for row in report.rows if row["part"] == "misses"] == ["lmcache", "ours", LOSSLESS]
    assert {name: claim["holds"] for name, claim in report.claims.items()} == {
        "miss_path_throughput_vllm_0320": False,
        "miss_path_throughput_lossless_vllm_0320": True,
    }
    _, _, worst, ours, _ = misses_table([row for row in report.rows if row["part"] == "misses"])
    assert worst.startswith("| vllm 0.32.0 | lmcache | **0.900** |")
    assert ours == "| vllm 0.32.0 | ours | **0.980** | 0.970 to 0.990 | 15 | 0.400 ms |"
