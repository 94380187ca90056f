"""The replay of traces under policies: each policy on traces that can be followed by hand, and two laws for all."""

from __future__ import annotations

import json
import random
from itertools import chain, combinations
from pathlib import Path

import pytest

from integration.bench import policies
from integration.bench.policies import OURS
from integration.bench.policy_baselines import GDSF, LRU, S3FIFO, SLRU, Belady, HostCache, PrefixCache
from integration.bench.policy_traces import NIGHTS, nightly, synthetic_traces
from kv_connector.errors import ConfigError
from kv_connector.replay import Trace, read_trace, write_through_lru, write_through_selective
from kv_connector.types import BlockHash


def path(text: str) -> list[BlockHash]:
    """The blocks of a prompt, a letter each: a block is named by all letters up to its own."""
    return [BlockHash(text[: index + 1].encode()) for index in range(len(text))]


def hits(host: HostCache, prompts: str, first: int = 0) -> list[int]:
    """What a host finds of prompts that come one after the other, on a device that has `first` blocks of each."""
    return [host.request(path(prompt), first, now) for now, prompt in enumerate(prompts.split())]


def random_trace(seed: int, num_requests: int = 60, letters: str = "ab", most: int = 5) -> Trace:
    """Prompts of a small tree, on a device that holds a few blocks."""
    rng = random.Random(seed)
    prompts = ["".join(rng.choices(letters, k=rng.randint(1, most))) for _ in range(num_requests)]
    return Trace.of(f"random {seed}", [path(prompt) for prompt in prompts], device_blocks=rng.randint(1, 6))


def test_lru_lets_the_leaf_go_that_was_used_least_recently() -> None:
    assert hits(PrefixCache(LRU(3)), "ab c ab d c ab") == [0, 0, 2, 0, 0, 1], "d took the place of c, and c that of b"
    assert hits(PrefixCache(LRU(3)), "ab c ab d ab c") == [0, 0, 2, 0, 2, 0]


def test_a_tail_goes_before_its_prefix_and_nothing_goes_for_its_own_tail() -> None:
    assert hits(PrefixCache(LRU(3)), "abc d ab") == [0, 0, 2]
    assert hits(PrefixCache(LRU(3)), "abcdef abcdef") == [0, 3]


def test_what_the_device_has_is_no_hit_of_the_host_and_is_used_all_the_same() -> None:
    assert hits(PrefixCache(LRU(3)), "abc abc", first=1) == [0, 2]
    host = PrefixCache(LRU(2))
    assert [host.request(path(p), first, now) for now, (p, first) in enumerate([("a", 0), ("b", 0), ("a", 1)])] == [
        0
    ] * 3
    assert host.request(path("c"), 0, 3) == 0
    assert host.request(path("a"), 0, 4) == 1, "b has gone: a was used on the device"


def test_slru_keeps_what_was_asked_for_twice_through_a_scan() -> None:
    scan = "a a b c d e a"
    assert hits(PrefixCache(LRU(2)), scan) == [0, 1, 0, 0, 0, 0, 0]
    assert hits(PrefixCache(SLRU(2)), scan) == [0, 1, 0, 0, 0, 0, 1]


def test_slru_protects_a_ghost_at_once() -> None:
    assert hits(PrefixCache(SLRU(2)), "a b c a d e a") == [0, 0, 0, 0, 0, 0, 1], "a was a ghost when it came back"


def test_slru_protects_a_share_only() -> None:
    host = PrefixCache(SLRU(4, protected=0.5))
    assert hits(host, "a b c a b c d e b c a") == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0], "a was pushed out of protection"


def test_s3_fifo_moves_on_what_was_asked_for_and_is_a_queue_otherwise() -> None:
    assert hits(PrefixCache(S3FIFO(2)), "a a b c d e a") == [0, 1, 0, 0, 0, 0, 1]
    assert hits(PrefixCache(S3FIFO(3)), "a b a c d b") == [0, 0, 1, 0, 0, 0], "b is the oldest that nobody asked for"


def test_gdsf_keeps_what_is_asked_for_often_and_what_lies_deep() -> None:
    assert hits(PrefixCache(GDSF(2)), "a a a b c d a") == [0, 1, 1, 0, 0, 0, 1]
    assert hits(PrefixCache(GDSF(3)), "ab c d ab") == [0, 0, 0, 2], "c was newer and less deep than b"


def test_selective_saves_when_a_second_request_asks_again() -> None:
    assert hits(write_through_selective(8), "ab ab abc ab abc") == [0, 0, 0, 2, 2]
    assert hits(write_through_lru(8), "ab ab abc ab abc") == [0, 2, 2, 2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_lru_and_our_host_tier_hold_the_same_blocks_after_every_request(seed: int) -> None:
    trace = random_trace(seed)
    model, tier = PrefixCache(LRU(7)), write_through_lru(7)
    for now, (hashes, first) in enumerate(zip(trace.requests, trace.device_hits, strict=True)):
        assert model.request(hashes, first, now) == tier.request(hashes, first, now)
        tier.tree.check()
        tier.host.check()
        for block in {block for request in trace.requests[: now + 1] for block in request}:
            node = tier.tree.get(block)
            assert (block in model) == (node is not None and tier.host.resident_prefix([node]) == 1)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_nothing_beats_belady(seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    bound = policies.num_hits(trace, Belady(capacity, trace.requests, trace.device_hits))
    for rival in policies.RIVALS.values():
        assert policies.num_hits(trace, PrefixCache(rival(capacity))) <= bound
    for make in OURS.values():
        assert policies.num_hits(trace, make(capacity)) <= bound


def most_hits(trace: Trace, capacity: int) -> int:
    """The best of all ways to keep any `capacity` of the blocks that are cached or asked for."""
    best: dict[frozenset[BlockHash], int] = {frozenset(): 0}
    for hashes, first in zip(trace.requests, trace.device_hits, strict=True):
        after: dict[frozenset[BlockHash], int] = {}
        for cached, found in best.items():
            total = found + len(cached.intersection(hashes[first:]))
            blocks = sorted(cached.union(hashes))
            for kept in map(frozenset, combinations(blocks, min(capacity, len(blocks)))):
                after[kept] = max(after.get(kept, 0), total)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(40))
def test_belady_hits_what_the_best_of_all_ways_hits(seed: int) -> None:
    trace = random_trace(seed, num_requests=9, most=3)
    for capacity in (1, 2, 3):
        bound = policies.num_hits(trace, Belady(capacity, trace.requests, trace.device_hits))
        assert bound == most_hits(trace, capacity)


def test_a_trace_is_read_and_played_through_the_device(tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    lines = [[0, 1, 2], [0, 1, 3], [0, 1, 2, 4]]
    file.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in lines))
    trace = read_trace(file)
    assert (trace.name, trace.num_blocks, trace.num_distinct, trace.device_blocks) == ("short", 10, 5, 100)
    assert list(trace.device_hits) == [0, 2, 3]
    assert list(read_trace(file, share=0.7).device_hits) == [0, 2]
    file.write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match=r"short\.jsonl, line 1: give one JSON object a line, with hash_ids"):
        read_trace(file)
    file.write_text('{"hash_ids": [0, 1]}\n{"hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match="request 1: block 1 follows None and elsewhere 0"):
        read_trace(file)


@pytest.mark.parametrize("name", NIGHTS)
def test_documents_are_read_every_night_behind_another_day(name: str) -> None:
    _, day, documents, num_blocks, _ = NIGHTS[name]
    requests = nightly(NIGHTS[name]._replace(num_nights=2))
    night = requests[day : day + documents]
    assert len({tuple(document) for document in night}) == documents and requests[-documents:] == night
    assert {len(document) for document in night} == {num_blocks}
    days = requests[:day], requests[day + documents : -documents]
    assert days[0] != days[1] and len(days[1]) == day
    assert {block for document in night for block in document}.isdisjoint(chain.from_iterable(chain(*days)))


def test_synthetic_traces_are_the_same_every_time() -> None:
    found = [(trace.num_blocks, trace.num_distinct, sum(trace.device_hits)) for trace in synthetic_traces(0.05)]
    assert found == [
        (17948, 4943, 6052),
        (48764, 39970, 2869),
        (90094, 85312, 1429),
        (16000, 2216, 3948),
        (16000, 2224, 3940),
        (19200, 5416, 3948),
        (15000, 5032, 2992),
        (23000, 5256, 4996),
        (11000, 9312, 880),
    ]


def test_a_small_run_says_the_worst_row_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "policies.json", tmp_path / "policies.png"
    arguments = ["--share", "0.02", "--sizes", "5", "25", "--json", str(result), "--picture", str(picture)]
    assert policies.main(arguments) == 0
    written = json.loads(result.read_text())
    margins = [row["margin"] for row in written["rows"]]
    assert len(margins) == 18 and margins == sorted(margins)
    for row in written["rows"]:
        found = row["host_hits_percent"]
        assert list(found) == [*policies.RIVALS, *OURS, policies.BOUND]
        assert max(found.values()) == found[policies.BOUND]
    claims = written["claims"]
    assert claims["default_to_best_rival_in_the_worst_row"]["value"] == margins[0]
    assert set(claims) == {"default_to_best_rival_in_the_worst_row", "default_to_lru_on_average"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"{margins[0]:+9.2f}" in capsys.readouterr().out.split("margin")[-1].splitlines()[1]
