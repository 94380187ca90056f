"""The table of newest figures: of the newest results, beside the best of the others whoever that is, and what misses
its goal or is behind shows it."""

from __future__ import annotations

import copy
import subprocess
from typing import Any

import pytest

from integration.bench.peers import PEERS
from integration.figures import newest
from integration.figures.results import RESULTS, ROOT, Result, read, rows_of

Found = dict[str, Any]


def results() -> list[Found]:
    return [copy.deepcopy(read(name)) for name in newest.RESULTS]


def lines(found: list[Found]) -> dict[str, list[str]]:
    """Cells by what a line is of."""
    cells = [line.strip("|").split(" | ") for line in newest.table(*found) if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in others] for first, *others in cells}


def line(found: list[Found], *parts: str) -> list[str]:
    (cells,) = [cells for what, cells in lines(found).items() if all(part in what for part in parts)]
    return cells


def hits(result: Found, tokens: int) -> dict[str, Any]:
    rows = rows_of("hits", result)
    return {row["connector"]: row for row in rows if (row["kind"], row["tokens"]) == ("host_hit", tokens)}


def kinds(result: Result) -> set[tuple[Any, ...]]:
    """What a result measured of ours by default beside someone else; nothing where that was only to trace it, or to
    tell two versions of ours apart."""
    engine = next((name for name in ("vllm", "sglang") if name in result.get("software", {})), None)
    rows = [row for row in result.get("rows", ()) if "void" not in row]
    if rows and (rows[0].get("trace") or any("variant=" in str(row.get("connector")) for row in rows)):
        return set()
    beside: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        if row.get("part") == "regime":
            beside[engine, "chats", row["host_share"], row["answer"]] = set(row["engines"])
        elif row.get("part") == "chats" and "host_share" in row:
            beside.setdefault((engine, "chats", row["host_share"], row["answer"]), set()).add(row["connector"])
        elif row.get("kind") == "host_hit" and "connector" in row:
            beside.setdefault((engine, "host_hit", row["tokens"]), set()).add(row["connector"])
        elif row.get("part") == "misses":
            beside.setdefault((engine, "misses"), set()).add(row["connector"])
    return {kind for kind, names in beside.items() if "ours" in names and names & set(PEERS)}


def test_no_later_result_has_what_the_table_has() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "log", "--format=%H"], capture_output=True, text=True)
    places = {commit[:7]: place for place, commit in enumerate(reversed(listed.stdout.split()))}
    chosen = {name: read(name) for name in newest.RESULTS}
    if any(result["commit"][:7] not in places for result in chosen.values()):
        pytest.skip("the history of the repository is not here")
    others = {path.stem: read(path.stem) for path in RESULTS.glob("*.json") if path.stem not in chosen}
    last = {kind: name for name, result in chosen.items() for kind in kinds(result)}
    for name, result in chosen.items():
        shown = {kind for kind in kinds(result) if last[kind] == name}
        assert shown, name
        place = places[result["commit"][:7]]
        later = {
            other: both
            for other, found in others.items()
            if places.get((found.get("commit") or "")[:7], -1) > place and (both := kinds(found) & shown)
        }
        assert not later, f"{name} is older than these"


def test_the_soonest_of_the_others_is_beside_ours_for_each_length() -> None:
    found = results()
    first = found[newest.RESULTS.index("vllm_ttft_0320_graphs_h200")]
    peers = {tokens: hits(first, tokens) for tokens in (2048, 8192, 32768)}
    valid = [{name: row["ms"] for name, row in of.items() if "void" not in row} for of in peers.values()]
    best = [min((ms, name) for name, ms in of.items() if name in PEERS) for of in valid]
    ours = [of["ours"] for of in valid]
    cells = line(found, "vLLM", "first token")
    (name,) = {name for _, name in best}
    assert cells[1] == " / ".join(f"{ms:.1f}" for ms, _ in best) + f" ({PEERS[name]})", "one name, as it is one peer"
    assert cells[2].replace("**", "") == " / ".join(f"{ms / of:.3f}" for ms, (of, _) in zip(ours, best, strict=True))
    assert cells[3] == "\u2264 0.75 / 0.75 / 0.9", "the strictest goal of each length, whoever is the soonest"


def test_a_peer_that_is_sooner_than_the_best_takes_its_place_and_ours_is_behind() -> None:
    found = results()
    first = found[newest.RESULTS.index("vllm_ttft_0320_graphs_h200")]
    ours = hits(first, 8192)["ours"]["ms"]
    hits(first, 8192)["offloading"]["ms"] = ours / 2
    cells = line(found, "vLLM", "first token")
    assert f"{ours / 2:.1f} (OffloadingConnector) / " in cells[1]
    assert "**2.000**" in cells[2]


def test_hits_that_are_void_are_beside_nothing() -> None:
    found = results()
    first = found[newest.RESULTS.index("vllm_ttft_0320_graphs_h200")]
    hits(first, 8192)["lmcache"]["ms"] = 1.0
    assert "LMCache" not in line(found, "vLLM", "first token")[1]


@pytest.mark.parametrize("name", ["offloading", "lmcache"])
def test_turns_are_beside_the_peer_with_the_most(name: str) -> None:
    found = results()
    chats = found[newest.RESULTS.index("vllm_serving_0320_launch_h200")]
    windows = [row for row in rows_of("chats", chats) if (row["host_share"], row["answer"]) == (1.0, 8)]
    (ours,) = [row["turns_per_second"] for row in windows if row["connector"] == "ours"]
    for window in windows:
        if window["connector"] == name:
            window["turns_per_second"] = 99.0
    cells = line(found, "vLLM", "turns", "host 1x")
    assert cells[1].startswith("99.00 ") and cells[1].partition("(")[2].startswith(f"{PEERS[name]})")
    ratio = ours / 99
    assert cells[2].startswith(f"**{ratio:.3f}** / "), "behind, and bold"


def test_turns_in_sglang_are_in_the_order_of_their_answers() -> None:
    found = results()
    chats = found[newest.RESULTS.index("sglang_serving_h200")]
    before = line(found, "SGLang", "host 1x")
    for row in rows_of("chats", chats):
        if (row["host_share"], row["answer"], row["connector"]) == (1, 32, "ours"):
            row["turns_per_second"] = 0.01
    after = line(found, "SGLang", "host 1x")
    assert [cell.split(" / ")[0] for cell in after[:3]] == [cell.split(" / ")[0] for cell in before[:3]]
    assert after[0].endswith(" / 0.01") and after[2].endswith("**0.002**")


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_where_nothing_is_hit_a_peer_that_loses_less_shows(engine: str) -> None:
    found = results()
    name = {"vLLM": "vllm_misses_0320_h200", "SGLang": "sglang_misses_h200"}[engine]
    rows = {row["connector"]: row for row in rows_of("misses", found[newest.RESULTS.index(name)])}
    peer = "hicache" if engine == "SGLang" else "lmcache"
    rows[peer]["over_none"], rows["ours"]["over_none"] = 1.0, 0.5
    assert line(found, engine, "nothing is hit")[:3] == ["**0.5000**", f"1.0000 ({PEERS[peer]})", "0.500"]


def test_results_of_several_gpus_are_no_table() -> None:
    found = results()
    found[0]["hardware"] = found[0]["hardware"] | {"gpu": "another"}
    with pytest.raises(AssertionError, match="another"):
        newest.table(*found)
