"""Phrases of documents with figures of the newest results of engines, and of what other hosts lost, for
`test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from integration.figures.markdown import marked
from integration.figures.results import Row, rows_of
from tests.figures_of_sglang import ALONE, BESIDE, over_hicache
from tests.kept_results import (
    LENGTHS,
    answered_otherwise,
    by_regime,
    claim,
    goal,
    least_over_none,
    load_rate,
    over_none,
    result,
    rows,
)

NOW, TWELVE = "vllm_regimes_0320_twelve_h200", "vllm_serving_0320_twelve_h200"
MENDED, LAUNCH = "vllm_regimes_0320_launch_h200", "vllm_serving_0320_launch_h200"
HERE, ELSEWHERE = "vllm_regimes_0320_h200", "vllm_regimes_choice_0320_h200"
PARTS = ("vllm_serving_0320_24_12_h200", "vllm_serving_0320_16_6_h200")
MISSES, RANKS = "vllm_misses_0320_h200", "vllm_replicas_h200"
MISSES_BEFORE = ("vllm_misses_earlier_0320_h200", "vllm_misses_later_0320_h200")
DECODING, WAYS = "vllm_decoding_0320_h200", "vllm_decoding_ways_0320_h200"
SYNC = "vllm_serving_0320_sync_1x_h200"
IN_STEP = 'ours:load_choice="sync"'
CHOICE = ("vllm_serving_0320_choice_1x_h200", "vllm_serving_0320_choice_2x_h200")
IN_BACKGROUND = 'ours:load_choice="async"'
TTFT, TTFT_ALONE = "vllm_ttft_0320_graphs_h200", "vllm_ttft_0320_alone_h200"
WRITE_THROUGH = "ours:write_through"
OLDER = "vllm_ttft_0320_h200"


def windows(name: str, connector: str) -> list[Row]:
    return [row for row in result(name)["rows"] if row["part"] == "chats" and row["connector"] == connector]


def turns(name: str, connector: str) -> list[str]:
    return [f"{row['turns_per_second']:.2f}" for row in windows(name, connector)]


def on_other_hosts() -> Iterator[str]:
    yield f"had {over_two_peers()} times the turns of the better of two peers"
    which = "ours_host_hit_over_offloading_32768"
    yield f"{marked(result(OLDER)['claims'][which])} of OffloadingConnector's time to the first token"
    assert goal(OLDER, which) == "0.9"
    both = by_regime(HERE)[2, 32]["engines"]
    yield "and {:.2f} and {:.2f} turns".format(*(both[name]["turns_per_second"] for name in ("ours", WRITE_THROUGH)))
    assert round(both["ours"]["cached_share"], 2) == round(both[WRITE_THROUGH]["cached_share"], 2) == 0.98
    yield "took {}, {} and {} of HiCache's time".format(*over_hicache(ALONE, 3))
    yield "beside chats on another GPU {}, {} and {} (`sglang_ttft_beside".format(*over_hicache(BESIDE, 3))


def num_turns(row: Row) -> float:
    """Of a window, its lead included, by the rate of what counts."""
    return float(row["turns_per_second"] * (row["lead"] + row["seconds"]))


def prompt_steps(row: Row) -> float:
    """Steps that compute a prompt, for each turn."""
    steps: int = row["phases"]["steps"] - row["phases"]["decode_steps"]
    return steps / num_turns(row)


def calls_ms(row: Row) -> float:
    """Of a connector's calls in the engine's thread, for each turn."""
    phases = row["phases"]
    of_a_step: float = sum(ms for which, ms in phases.items() if which.startswith("call_"))
    return of_a_step * float(phases["steps"]) / num_turns(row)


def many(rows: Iterable[Row]) -> str:
    """Steps that compute a prompt for each turn, the least and the most."""
    found = sorted(map(prompt_steps, rows))
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def by_regime_now() -> Iterator[str]:
    over = {regime: row["over_best_peer"] for regime, row in by_regime(NOW).items()}
    assert [regime for regime, ratio in over.items() if ratio < 0.99] == [(0.5, 128)]
    assert [regime for regime, ratio in over.items() if 0.99 < ratio < 1.01] == [(2, 128)] and len(over) == 12
    assert sum(ratio < 1.05 for ratio in over.values()) == 5
    yield "in ten regimes, as many as the others in one, and fewer in one**, and misses 1.05 in five"
    every = [row for row in result(TWELVE)["rows"] if row["part"] == "chats"]
    ended = {(row["host_share"], row["connector"]): counted_turns(row) for row in every if row["answer"] == 128}
    yield f"it has {min(ended.values())} to {max(ended.values())} turns, so one turn is 2 to 3 %"
    yield f"it had {ended[0.5, 'ours']}, and OffloadingConnector {ended[0.5, 'offloading']}"
    yield from cached_where_the_host_is_small(every)
    ours, peer = (windows(TWELVE, name) for name in ("ours", "lmcache"))
    launches = [row["phases"]["launch_prompts_ms"] for row in ours]
    yield f"and {min(launches):.0f} to {max(launches):.0f} ms here, beside"
    assert all(row["counted"]["async_loads"] <= 1 for row in ours)
    yield f"in {many(ours)} steps with prompts for each turn"
    assert min(map(prompt_steps, peer[:5])) > 0.9
    yield f"in {many(row for row in peer if row['host_share'] >= 1)}: two fit on the device"
    yield from slow_windows(every)
    phases = next(row["phases"] for row in ours if (row["host_share"], row["answer"]) == (2, 128))
    yield f"25 ms of the {round(phases['prefill_ms'] + phases['decoding_ms'], -1):.0f} for which a turn prefills"
    cached = sorted(100 * one["cached_share"] for one in by_regime(NOW)[2, 128]["engines"].values())
    yield f"and {cached[0]:.0f} to {cached[-1]:.0f} % is cached"
    load_ms = [row["counted"]["load_milliseconds"] / row["counted"]["sync_loads"] for row in ours]
    yield f"takes as long as the {min(load_ms):.0f} to {max(load_ms):.0f} ms of a load"


def counted_turns(row: Row) -> int:
    """Of a window, its lead left out."""
    return round(row["turns_per_second"] * row["seconds"])


def cached_where_the_host_is_small(every: Sequence[Row]) -> Iterator[str]:
    told = {0.5: "{} to {} % of the prompts' tokens at 0.5x, and others {} to {} %", 0.75: "{} to {} % and {} to {} %"}
    for share, form in told.items():
        here = [(row["connector"], row["answer"], row["cached_share"]) for row in every if row["host_share"] == share]
        ours = {answer: cached for name, answer, cached in here if name == "ours"}
        others = [(answer, cached) for name, answer, cached in here if name != "ours"]
        assert all(cached < ours[answer] for answer, cached in others)
        ends = (*(f(ours.values()) for f in (min, max)), *(f(cached for _, cached in others) for f in (min, max)))
        yield form.format(*(f"{100 * end:.0f}" for end in ends))


def slow_windows(every: Sequence[Row]) -> Iterator[str]:
    ms = {(row["connector"], row["host_share"], row["answer"]): row["phases"]["decode_step_ms"] for row in every}
    slow = [("simple", 1.0, 128), ("simple", 2.0, 8), ("ours", 0.75, 8)]
    found = [ms.pop(window) for window in slow]
    yield "Decoding steps took {:.2f} and {:.2f} ms in".format(*found[:2]) + " SimpleCPUOffloadConnector's windows"
    yield f"and {found[2]:.2f} ms in ours at 0.75x, 8; in all others they took {min(ms.values()):.2f} to"
    yield f"they took {min(ms.values()):.2f} to {max(ms.values()):.2f}."
    assert "simple" not in [by_regime(NOW)[window[1:]]["best_peer"] for window in slow[:2]]


def by_launch() -> Iterator[str]:
    found = by_regime(MENDED)
    both = {
        regime: [row["engines"][name]["turns_per_second"] for name in ("ours", IN_BACKGROUND)]
        for regime, row in found.items()
    }
    more = {regime: 100 * (default / background - 1) for regime, (default, background) in both.items()}
    assert round(more[1, 128]) == round(more[2, 128]) == 0
    yield "the background**, {:.0f} and {:.0f} % more with answers of 8 tokens, {:.0f} and {:.0f} % with 32".format(
        *(more[regime] for regime in ((1, 8), (2, 8), (1, 32), (2, 32)))
    )
    ours = windows(LAUNCH, "ours")
    assert {row["counted"]["async_loads"] for row in ours} == {1}
    assert not any(row["counted"]["sync_loads"] for row in windows(LAUNCH, IN_BACKGROUND))
    yield f"one by one, in {many(ours)} steps with prompts for each turn"
    launches = [row["phases"]["launch_prompts_ms"] for row in ours]
    load_ms = [row["counted"]["load_milliseconds"] / (row["counted"]["sync_loads"] + 1) for row in ours]
    yield f"took {min(launches):.0f} to {max(launches):.0f} ms of the engine's thread"
    yield f"a load {min(load_ms):.0f} to {max(load_ms):.0f}, so"
    every = [row for row in result(LAUNCH)["rows"] if row["part"] == "chats" and row["answer"] == 128]
    assert {row["connector"] for row in every} == {"ours", IN_BACKGROUND, "offloading", "simple", "lmcache"}
    yield "a window has {} or {} turns**".format(*sorted({counted_turns(row) for row in every}))
    sooner = [100 - 100 * found[share, 128]["p50_over_soonest_peer"] for share in (1, 2)]
    yield "came {:.0f} and {:.0f} % sooner than that of the soonest peer".format(*sooner)


def by_regime_here() -> Iterator[str]:
    found = by_regime(HERE)
    over = {regime: row["over_best_peer"] for regime, row in found.items()}
    level = {regime for regime, ratio in over.items() if round(ratio, 2) == 1}
    missed = {regime for regime, ratio in over.items() if 1.01 < ratio < 1.05}
    assert len(over) == 12 and [regime for regime, ratio in over.items() if ratio < 0.99] == [(1, 8)]
    assert level == {(2, 32)} and missed == {(1, 128), (2, 128)}
    yield "Ours was behind in one line, level in another one, and missed 1.05 in two more"
    assert all(prompt_steps(row) > 0.9 for name in PARTS for row in result(name)["rows"] if is_ours(row))
    few = [{name: one["cached_share"] for name, one in found[share, 8]["engines"].items()} for share in (0.5, 0.75)]
    assert all(max(shares, key=shares.__getitem__) == "ours" for shares in few)
    yield "with answers of 8 it also has the largest share cached there"
    (worst,) = [row for row in windows(PARTS[0], "ours") if (row["host_share"], row["answer"]) == (1, 8)]
    engines = found[1, 8]["engines"]
    assert engines["lmcache"]["turns_per_second"] > engines["ours"]["turns_per_second"]
    yield f"behind `write_through`, which has {engines[WRITE_THROUGH]['turns_per_second']:.2f} turns"
    declined = worst["counted"]["declined_saves_blocks"]
    yield f"declines {declined:,.0f} of the {declined + worst['counted']['saved_blocks']:,.0f} blocks that are"
    began_anew = by_regime(ELSEWHERE)[1, 8]["engines"]
    ratio = began_anew["ours"]["turns_per_second"] / began_anew["lmcache"]["turns_per_second"]
    yield f"it had {ratio:.2f} times LMCache's turns"
    assert max(row["counted"]["async_loads"] for name in PARTS for row in result(name)["rows"] if is_ours(row)) == 1


def decoding_steps() -> Iterator[str]:
    steps: dict[tuple[str, int], float] = {
        (name, row["answer"]): row["phases"]["decode_step_ms"]
        for name in ("ours", "lmcache", "offloading", "simple")
        for row in windows(PARTS[1], name)
        if row["host_share"] == 2
    }
    yield f"took {steps['ours', 128]:.2f} ms with ours and {steps['lmcache', 128]:.2f} with LMCache"
    yield f"and {steps['offloading', 128]:.2f} and {steps['simple', 128]:.2f} with OffloadingConnector and SimpleCPU"
    yield f"{steps['ours', 8]:.2f} with ours and {steps['offloading', 8]:.2f} with OffloadingConnector. In a trace"
    found = {row["connector"]: row for row in rows_of("timeline", result(DECODING))}
    ours, peer = found["ours"], found["offloading"]
    first, last = (ours[f"graph_{which}_us"] / 1e3 for which in ("first", "last"))
    yield f"took {first:.2f} ms without attention at first and {last:.2f} at last"
    yield f"beside the model for {ours['beside_us'] / 1e3:.2f} ms"
    assert peer["beside_us"] == 0.0
    yield "none did, {:.2f} and {:.2f}".format(*(peer[f"graph_{which}_us"] / 1e3 for which in ("first", "last")))
    names = ("offloading", "ours", 'ours:copy_path="runs"', 'ours:variant="b"')
    ways = [f"{windows(WAYS, name)[0]['phases']['decode_step_ms']:.2f}" for name in names]
    yield "OffloadingConnector took {} as well, ours {}, ours by DMA alone {}".format(*ways[:3])
    yield f'(`variant="b"`) {ways[3]}: it is not the kernels'


def first_tokens() -> Iterator[str]:
    claims = result(TTFT)["claims"]
    beside = [claims[f"ours_host_hit_over_offloading_{size}"] for size in LENGTHS]
    assert all(one["holds"] for one in beside)
    yield "hold at all lengths, {:.3f}, {:.3f} and {:.3f} of its time".format(*(one["value"] for one in beside))
    soonest = claim(TTFT, "ours_host_hit_over_simple_2048")
    assert soonest > beside[0]["goal"]
    yield f"as SimpleCPUOffloadConnector was sooner there: **{soonest:.3f}**"
    (row,) = [
        row
        for row in rows_of("hits", result(TTFT))
        if (row["tokens"], row["kind"], row["connector"]) == (32768, "device_hit", "ours")
    ]
    yield f"device hits of ours took {min(row['all_ms']):.1f} to {max(row['all_ms']):.1f} ms at 32,768 tokens"
    link = [claim(TTFT, f"ours_load_over_link_{size}") for size in (2048, 8192)]
    yield "Loads of ours moved at **{:.3f}** and **{:.3f}** of the link at 2,048 and 8,192 tokens".format(*link)
    which = "ours_host_hit_over_nones_device_hit_plus_link_"
    before = [marked(result(TTFT_ALONE)["claims"][f"{which}{size}"]) for size in LENGTHS]
    yield "a host hit took {}, {} and {} of a device hit without a connector".format(*before)
    alone = [result(TTFT_ALONE)["claims"][f"ours_host_hit_over_offloading_{size}"] for size in LENGTHS]
    assert max(one["value"] for one in alone) == alone[0]["value"]
    yield f"{marked(alone[0])} of OffloadingConnector's time was the worst of the three"
    others = [answered_otherwise(TTFT, size) for size in (2048, 8192)]
    yield "for {} of 24 prompts of 2,048 tokens and {} of 12 of 8,192".format(*others)


def over_two_peers() -> str:
    """The least and the most of ours over the better of two peers, where the host has room for all chats."""
    claims = [one for which, one in result(ELSEWHERE)["claims"].items() if which.startswith("turns_over_best_of_2_")]
    least, *_, most = sorted(claims, key=lambda one: one["value"])
    assert len(claims) == 6
    return f"{marked(least)} to {marked(most)}"


def is_ours(row: Row) -> bool:
    return row["part"] == "chats" and row["connector"] in ("ours", WRITE_THROUGH)


def by_where_it_loads() -> Iterator[str]:
    in_step, default = windows(SYNC, IN_STEP), windows(SYNC, "ours")
    more = [one["turns_per_second"] / other["turns_per_second"] for one, other in zip(in_step, default, strict=True)]
    yield "loads in the step had {:.2f} and {:.2f} times the turns of those in the background".format(*more)
    (seconds,) = {f"{row['seconds']:.1f}" for row in (*in_step, *default)}
    yield f"two windows of {seconds} s with room for all"
    (ratio,) = [one for name, one in result(SYNC)["claims"].items() if name.startswith("turns_over_best_of")]
    assert not ratio["holds"]
    yield f"had {marked(ratio)} of LMCache's turns"
    yield "two by two, in {:.2f} and {:.2f} steps with prompts for each turn".format(*map(prompt_steps, in_step))
    others = [*default, *(row for name in CHOICE for row in result(name)["rows"] if row["part"] == "chats")]
    assert all(prompt_steps(row) > 0.9 for row in others if row["connector"].startswith("ours"))


def by_choice() -> Iterator[str]:
    background, default = (zip(*(turns(name, who) for name in CHOICE), strict=True) for who in (IN_BACKGROUND, "ours"))
    forms = (
        "**more turns, {} and {} a second against {} and {}**",
        "with 32 {} and {} against {} and {}",
        "with 128 {} and {} against {} and {}",
    )
    for form, one, other in zip(forms, background, default, strict=True):
        yield form.format(*one, *other)


def misses() -> Iterator[str]:
    over, ours = over_none(MISSES), rows(MISSES, "connector")["ours"]
    yield f"**{over['ours']:.4f}** ({ours['over_none_p10']:.3f} to {ours['over_none_p90']:.3f})"
    yield (
        f"OffloadingConnector {over['offloading']:.3f}, SimpleCPUOffloadConnector {over['simple']:.3f} and LMCache "
        f"{over['lmcache']:.3f}"
    )
    shares = ours["all_over_none"]
    yield "in a row ours had {:.3f}, {:.3f} and {:.3f}".format(*shares[4:7])
    assert min(shares[:4] + shares[7:]) > max(shares[4], shares[6])
    yield f"in the last five {min(shares[-5:]):.3f} to {max(shares[-5:]):.3f}"
    yield "it was **{:.4f}** (`{}.json`, afee881) and **{:.4f}** (`{}.json`)".format(
        *(part for name in MISSES_BEFORE for part in (over_none(name)["ours"], name))
    )
    yield f"Older code had **{least_over_none():.3f}** at worst"


def ranks() -> Iterator[str]:
    found = rows(RANKS, "ranks")
    spread = (value for number in (1, 2) for value in (min(found[number]["load_ms"]), max(found[number]["load_ms"])))
    yield "took {:.1f} to {:.1f} ms on one rank and {:.1f} to {:.1f} on two".format(*spread)
    yield f"**{claim(RANKS, 'load_of_two_ranks_over_one'):.2f}** times as long in the median (goal 1.1)"
    (tokens,) = {row["host_tokens"] for row in found.values()}
    yield f"the host holds {tokens:,} tokens of both"


WINDOWS = (SYNC, *CHOICE)


def load_rates(names: Iterable[str], kind: str) -> list[float]:
    """GB/s of our loads in windows of which nine of ten are of this kind."""
    found = []
    for row in (row for name in names for row in result(name)["rows"] if row["part"] == "chats"):
        if row["connector"].startswith("ours"):
            counted = row["counted"]
            if counted[f"{kind}_loads"] > 0.9 * (counted["sync_loads"] + counted["async_loads"]):
                found.append(load_rate(row))
    return found


def in_the_background() -> Iterator[str]:
    background = load_rates(WINDOWS, "async")
    yield f"Loads in the background moved at {min(background):.0f} to {max(background):.0f} GB/s on both"


TOLD = (
    on_other_hosts,
    by_regime_now,
    by_launch,
    by_regime_here,
    decoding_steps,
    first_tokens,
    in_the_background,
    by_choice,
    by_where_it_loads,
    misses,
    ranks,
)
