"""Phrases of pages of benchmarks with figures of results of storage, of demonstrations, of copies that nothing waits
for and of the index, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from integration.figures.markdown import marked, marked_beside_goal
from integration.figures.results import origin, rows_of
from tests.kept_results import claim, goal, result, rows


def spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def folder() -> Iterator[str]:
    yield f"`storage.json`, {of_a_xeon('storage')}: MB/s past"
    assert of_a_xeon("folder") == of_a_xeon("storage"), "the same day, code and kind of machine"
    claims = result("storage")["claims"]
    found = {(row["kind"], row["block_bytes"] >> 10): row for row in rows_of("throughput", result("storage"))}
    assert all(row["direct"] for row in found.values())
    sides = {key: (row["ours_bytes_per_second"], best_of_fio(row)) for key, row in found.items()}
    for kind, name in (
        ("write", "write"),
        ("read", "read, in the order they were written"),
        ("shuffled", "read, in random order"),
    ):
        cells = []
        for size in (1024, 128):
            ours, fio = (median(side) for side in sides[kind, size])
            over = claims[f"{kind}_over_fio_{size}_kib"]
            assert f"{over['value']:.4f}" == f"{ours / fio:.4f}"
            cells.append(f"{ours / 1e6:,.0f}, {fio / 1e6:,.0f}, {marked(over)}")
        yield f"| {name} | {' | '.join(cells)} |"
    goals = (goal("storage", f"_over_fio_{size}_kib") for size in (1024, 128))
    yield "The goal is {} of fio's rate with blocks of 1 MiB and {} with 128 KiB".format(*goals)
    kinds = {kind: [claims[f"{kind}_over_fio_{size}_kib"]["holds"] for size in (1024, 128)] for kind, _ in found}
    assert kinds == {"write": [True, True], "read": [True, True], "shuffled": [True, False]}
    yield "**Random reads of 128 KiB blocks lose to fio**"
    rounds = {key: [mine / its for mine, its in zip(*pair, strict=True)] for key, pair in sides.items()}
    yield f"medians of {len(rounds['write', 1024])} rounds"
    yield "{:.2f} to {:.2f} of its rate by round".format(min(rounds["shuffled", 128]), max(rounds["shuffled", 128]))
    before = result("storage_earlier")["claims"]
    lost = {which: one["value"] for which, one in before.items() if "_over_fio_" in which and not one["holds"]}
    yield "{:.2f} and {:.2f} of fio's rate in writes, {:.2f} and {:.2f} in reads of 128 KiB".format(*lost.values())
    assert [which.partition("_over_fio")[0] for which in lost] == ["write", "write", "read", "shuffled"]
    yield f"a write takes {claim('folder', 'full_over_empty_write'):.2f} times one into an empty folder"
    (start,) = rows_of("start", result("folder"))
    yield f"a new engine knows what lies there after {spread(start['seconds'], 2)[:-1]}".replace(" (", " s (")
    mini, vllm = (
        {row["kind"]: row["ms"] for row in result(f"storage_ttft_{engine}")["rows"]} for engine in ("mini", "vllm")
    )
    yield f"takes {median(mini['storage hit']):.0f} ms instead of {median(mini['computed']):,.0f} in the mini engine"
    hit, computed = (
        [f"{ms:,.0f}" for ms in (median(of), min(of), max(of))] for of in (vllm["storage hit"], vllm["computed"])
    )
    yield "{} ({} to {}, 4 samples) instead of {} ({} to {}) in vLLM 0.32".format(*hit, *computed)


def best_of_fio(row: dict[str, Any]) -> list[float]:
    """All rounds of the way that has the better median."""
    ways = (row[f"{way}_bytes_per_second"] for way in ("libaio", "psync"))
    return max(ways, key=median)


def mooncake() -> Iterator[str]:
    name = "storage_mooncake"
    yield f"2 cores of an Intel Xeon for everything (`{name}.json`, {of_a_xeon(name)})"
    found = {(row["side"], row["action"]): row for row in result(name)["rows"]}
    claims = result(name)["claims"]
    shares = (claims[f"{action}_of_{size}_kib_blocks"] for size in (2048, 128) for action in ("put", "get"))
    yield "blocks of 2 MiB {} and {}, of 128 KiB {} and {}".format(*(marked(share, 3) for share in shares))
    yield f"the goal is {goal(name, '_kib_blocks')}, and **puts of 128 KiB miss it**"
    others = (
        found[f"ours, blocks of {size} KiB", action]["share_of_client"]
        for size in (1024, 16)
        for action in ("put", "get")
    )
    yield "Other sizes have no goal: of 1 MiB {:.2f} and {:.2f}, of 16 KiB {:.2f} and {:.2f}.".format(*others)
    client = {
        action: [row["gb_per_s"] for (side, of), row in found.items() if "client" in side and of == action]
        for action in ("put", "get")
    }
    puts, gets = (f"{min(client[action]):.2f} and {max(client[action]):.2f}" for action in ("put", "get"))
    yield f"({puts} GB/s in, {gets} out)"
    assert claim(name, "longest_wait_for_a_dead_store") <= 1, "nobody waits longer than 1 ms"


def of_a_xeon(name: str) -> str:
    """When it was measured and of which code, which must have been on two cores of a Xeon."""
    hardware = result(name)["hardware"]
    assert (hardware["cpu"], hardware["cores"]) == ("Intel(R) Xeon(R) Processor", 2)
    return origin(result(name))


def lossless_from_storage() -> Iterator[str]:
    yield f"on two cores of an Intel Xeon (`storage_lossless.json`, {of_a_xeon('storage_lossless')}, SmolLM2's own"
    assert all(row["real_values"] and row["direct"] for row in result("storage_lossless")["rows"])
    assert {len(row["seconds"]) for row in result("storage_lossless")["rows"]} == {25}
    yield f"(goal {goal('storage_lossless', 'lossless_over_raw')}; bold misses it)"
    found = {(row["what"], row["form"]): row for row in result("storage_lossless")["rows"]}
    for what, place, blocks in (
        ("folder, blocks of 8B", "folder", "8B model's"),
        ("folder, blocks of SmolLM2", "folder", "SmolLM2's"),
        ("mooncake, blocks of 8B", "Mooncake over TCP", "8B model's"),
        ("mooncake, blocks of SmolLM2", "Mooncake over TCP", "SmolLM2's"),
    ):
        raw, coded = (found[what, form] for form in ("raw", "lossless"))
        times = (spread([1e3 * second for second in row["seconds"]]) for row in (raw, coded))
        name = f"{what.replace(', blocks of ', '_').lower()}_lossless_over_raw"
        share = result("storage_lossless")["claims"][name]
        sizes = f", {raw['block_bytes'] >> 10:,} and {coded['block_bytes'] >> 10:,} KiB" if place == "folder" else ""
        yield f"| {place}, {blocks} blocks{sizes} | {' | '.join(times)} | {marked_beside_goal(share)} |"


def s3() -> Iterator[str]:
    found = {(row["side"], row["action"]): row for row in result("storage_s3")["rows"]}
    yield f"(`storage_s3.json`, {of_a_xeon('storage_s3')}), MB/s beside"
    yield "({:,.0f} in, {:,.0f} out)".format(*(found["obstore", action]["mb_per_s"] for action in ("put", "get")))
    sizes = {64: "64 KiB", 512: "512 KiB", 4096: "4 MiB"}
    told = []
    for size, name in sizes.items():
        pair = (found[f"ours, blocks of {size} KiB", action]["mb_per_s"] for action in ("put", "get"))
        told.append("{} {:.0f} and {:.0f}".format(name, *pair))
    yield f"blocks of {', of '.join(told)}"
    shares = {
        action: [found[f"ours, blocks of {size} KiB", action]["share_of_obstore"] for size in sizes]
        for action in ("put", "get")
    }
    ends = (f"{min(of):.2f} to {max(of):.2f}" for of in shares.values())
    asked = goal("storage_s3", "_share_of_obstore")
    assert min(share for of in shares.values() for share in of) >= float(asked), "none is bold"
    yield "{} in and {} out (goal {}), checksums".format(*ends, asked)
    assert claim("storage_s3", "longest_wait_for_a_dead_server") <= 1, "nobody waits longer than 1 ms"


def demonstrations() -> Iterator[str]:
    for name, where, digits in (("demo", "CPU", 0), ("demo_h200", "H200", 0), ("demo_1000_h200", "H200", 1)):
        found = result(name)["rows"]
        computed = {(row["user"], row["turn"]): row["ttft"] for row in found if row["way"] == "no cache"}
        prompts = per_turn(found, "no cache", "prompt_tokens")
        times = (
            f"{1e3 * min(of):,.{digits}f} to {1e3 * max(of):,.{digits}f} ms"
            for of in (per_turn(found, way, "ttft") for way in ("no cache", "write_through"))
        )
        sooner = []
        for way in ("write_through", "write_back", "write_through_selective"):
            hits = [row for row in found if row["way"] == way and row["host_hit_tokens"] >= 1000]
            sooner.append(spread([computed[row["user"], row["turn"]] / row["ttft"] for row in hits], 1))
        tokens = f"{min(prompts):,.0f} to {max(prompts):,.0f} tokens"
        cells = [where, tokens, *times, sooner[0].replace(" (", " times ("), *sooner[1:]]
        yield f"| {' | '.join(cells)} |"


def per_turn(found: Sequence[dict[str, Any]], way: str, key: str) -> list[float]:
    """Medians over the users, of turns 2 to 5."""
    return [median(row[key] for row in found if row["way"] == way and row["turn"] == turn) for turn in range(1, 5)]


def overlap() -> Iterator[str]:
    found = result("overlap_h200")["rows"]
    waits = [row["exposed_wait_ms"] for row in found if "exposed_wait_ms" in row]
    one = {key: value for row in found if "group" not in row for key, value in row.items()}
    yield f"| step with the prefix on the device already | {one['compute_ms']:.1f} |"
    yield f"| step that loads it from the host | {one['with_load_ms']:.1f} |"
    yield f"| the load itself, beside the model | {one['load_ms']:.1f} |"
    assert max(waits[2:]) < 0.01
    yield f"and of each other one | {waits[0]:.1f}, {waits[1]:.1f}, below 0.01 |"
    yield f"to submit the load | {one['submit_ms']:.2f} |"
    more = one["with_load_ms"] - one["compute_ms"]
    share = 100 * claim("overlap_h200", "exposed_wait_of_layer_groups_over_load")
    yield f"The load stall is {share:.1f} % of the load (goal 3 %); the step is {more:.1f} ms or"
    slower = 100 * more / one["compute_ms"]
    yield f"{more:.1f} ms or {slower:.1f} % slower in all, of which layers wait for {sum(waits):.1f}."


def page_locking() -> Iterator[str]:
    (row,) = result("host_pool_h200")["rows"]
    beside, after = row["beside"], row["after"]
    rate = row["bytes"] / row["locked_s"] / 1e9
    yield f"serves after {row['usable_s']:.2f} s and is page-locked after {row['locked_s']:.1f} s, at {rate:.1f} GB/s"
    steps = [median(of["step_ms"]) for of in (beside, after)]
    yield f"each take {steps[0]:.1f} ms, {100 * (steps[0] / steps[1] - 1):.1f} % more than afterwards"
    launching = [sorted(of["launching_ms"]) for of in (beside, after)]
    middle, late = ([of[int(share * len(of))] for of in launching] for share in (0.5, 0.99))
    yield f"is {middle[0]:.1f} ms instead of {middle[1]:.1f}, and {late[0]:.1f} instead of {late[1]:.1f} for one step"


def between_engines() -> Iterator[str]:
    found = rows("pd_h200", "case")
    copies = median(found["2 MiB blocks"]["copy_gb_s"])
    large, small = (claim("pd_h200", f"{case}: rate against one large copy") for case in found)
    yield f"blocks of 2 MiB arrive at {large:.3f} of one large copy's {copies:.0f} GB/s"
    yield f"pieces of 64 KiB at {small:.3f} (goal 0.8)"
    sizes = (2048, 8192, 32768)
    added = (claim("vllm_pd_h200", f"added_to_the_first_token_at_{size}_tokens") for size in sizes)
    yield "answers {:.0f}, {:.0f} and {:.0f} ms later".format(*added)
    yield f"and {claim('vllm_pd_h200', 'hidden_behind_the_prefill_at_8192_tokens'):.2f} of the transfer hides"


def by_copy_path() -> Iterator[str]:
    found = rows("vllm_misses_paths_0251_h200", "connector")
    ways = {"ours": " by default", 'ours:copy_path="runs"': ' with `copy_path="runs"`', 'ours:copy_path="direct"': ""}
    for name, text in ways.items():
        row = found[name]
        yield f"{row['over_none']:.3f} ({row['over_none_p10']:.3f} to {row['over_none_p90']:.3f}){text}"


def two_gpus() -> Iterator[str]:
    shares = [one["value"] for one in result("copies_many_h200")["claims"].values()]
    yield f"Two GPUs of one host reach {min(shares):.2f} to {max(shares):.2f} of two large copies"


def awaited() -> Iterator[str]:
    found = rows_of("awaited", result("submitting_h200"))
    shares = [row["link_ms"] / median(row["all_ms"]) for row in found]
    assert max(shares) < 0.95
    yield "A load that a step waits for reaches {:.3f}, {:.3f}, **{:.3f}** and {:.3f} of the link".format(*shares)


def index() -> Iterator[str]:
    assert origin(result("steps")) == origin(result("index")), "one code"
    assert result("steps")["hardware"]["cpu"] == result("index")["hardware"]["cpu"] == "AMD EPYC"
    assert "vllm" in {row["side"] for row in result("steps")["rows"]}, "vLLM's own is beside it"
    claims = result("steps")["claims"]
    assert [claims[f"{what}_to_flat_pool"]["holds"] for what in ("insert", "evict", "match")] == [True, False, True]
    yield "**To evict a block misses its goal**"
    growth = [one for name, one in result("index")["claims"].items() if "_growth_" in name]
    assert [one["holds"] for one in growth] == [False, False, True]
    yield "**The more blocks are cached, the slower each gets, and two of three goals are missed**"


def memory_of_a_block() -> Iterator[str]:
    yield f"about {claim('index', 'memory_per_cached_block'):.0f} bytes"


TOLD = (
    folder,
    mooncake,
    lossless_from_storage,
    s3,
    demonstrations,
    overlap,
    page_locking,
    between_engines,
    by_copy_path,
    two_gpus,
    awaited,
    index,
    memory_of_a_block,
)
