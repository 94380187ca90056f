"""Phrases of documents with figures of the newest results of engines, and of what other hosts lost, for
`test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from integration.figures.markdown import marked
from integration.figures.results import Row, rows_of
from tests.figures_of_sglang import alone_over_hicache
from tests.kept_results import (
    LENGTHS,
    TOKEN_BYTES,
    answered_otherwise,
    by_regime,
    claim,
    goal,
    host_hits,
    least_over_none,
    load_rate,
    over_none,
    result,
    rows,
)

NOW, TOGETHER = "vllm_regimes_0320_12_6_h200", "vllm_serving_0320_12_6_h200"
HERE, ELSEWHERE = "vllm_regimes_0320_h200", "vllm_regimes_choice_0320_h200"
PARTS = ("vllm_serving_0320_24_12_h200", "vllm_serving_0320_16_6_h200")
MISSES, RANKS = "vllm_misses_0320_h200", "vllm_replicas_h200"
MISSES_AGAIN = "vllm_misses_later_0320_h200"
LATER = "vllm_serving_0320_24_12_later_h200"
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
    yield "took {}, {} and {} of HiCache's time".format(*alone_over_hicache(3))


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
    missed = {regime for regime, ratio in over.items() if ratio < 1.05}
    assert missed == {(1, 128), (2, 128)} and len(over) == 6
    ahead = sorted(ratio for regime, ratio in over.items() if regime not in missed)
    yield f"**Ours had {ahead[0]:.2f} to {ahead[-1]:.2f} times the best peer's turns in four of these, and misses"
    yield "ours would have had {:.2f}, {:.2f} and {:.2f} times the turns there".format(*over_peers_of_before())
    ours, peer, simple = (
        {(row["host_share"], row["answer"]): row for row in windows(TOGETHER, name)}
        for name in ("ours", "lmcache", "simple")
    )
    yield f"LMCache had {many(peer.values())} steps with prompts for each turn"
    yield f"Ours had {many(at_1x(LATER, 'ours').values())} at 778f943"
    yield f"and ours has {many(ours.values())}"
    assert not any(row["counted"]["async_loads"] for row in ours.values())
    yield f"1x, 128: {over[1, 128]:.2f} times the turns of SimpleCPUOffloadConnector"
    eager = at_1x(TOGETHER, WRITE_THROUGH)[128]
    yield f"`write_through` has {eager['turns_per_second']:.2f}"
    slow, usual = ours[1, 128]["phases"], ours[2, 128]["phases"]
    yield f"took {slow['decode_step_ms']:.2f} ms in that window"
    ours_ms, eager_ms = computing_step_ms(slow), computing_step_ms(eager["phases"])
    yield f"steps with prompts took {ours_ms:.0f} ms, and {eager_ms:.0f} with `write_through`"
    peer_ms = [computing_step_ms(peer[share, 128]["phases"]) for share in (1, 2)]
    yield "in LMCache's at 1x, 128 steps with prompts took {:.0f} ms, and {:.0f} at 2x".format(*peer_ms)
    assert [(ours[1, 128][what], peer[1, 128][what]) for what in ("number", "place")] == [(3, 3), (1, 0)], "one by one"
    short = [computing_step_ms(of[share, 8]["phases"]) for of in (ours, peer) for share in (1, 2)]
    yield "a step took {:.0f} and {:.0f} ms with ours, and {:.0f} and {:.0f} with LMCache".format(*short)
    calls = [calls_ms(of[share, 8]) for of in (peer, ours) for share in (1, 2)]
    yield "whose calls took the engine's thread {:.0f} and {:.0f} ms of each turn, and ours {:.0f} and {:.0f}".format(
        *calls
    )
    beside = simple[2, 8]
    assert beside["phases"]["loading_share"] == 1 and beside["turns_per_second"] < peer[2, 8]["turns_per_second"]
    yield f"had {prompt_steps(beside):.2f} of them for each turn at 2x, of {computing_step_ms(beside['phases']):.0f} ms"
    both = (
        f"took {eager['phases']['decode_step_ms']:.2f} with `write_through` and {usual['decode_step_ms']:.2f} with ours"
    )
    yield f"{both} at 2x"
    yield f"grew from {usual['decode_calls_ms']:.2f} to {slow['decode_calls_ms']:.2f} ms of each"
    before = at_1x(TOGETHER, "offloading")[32]
    assert (before["number"], before["place"]) == (2, 4), "the last window before LMCache's at 1x, 128"
    yield f"decoding steps of {before['phases']['decode_step_ms']:.2f} ms, and {before['turns_per_second']:.2f} turns"
    yield f"({at_1x(PARTS[0], 'offloading')[32]['turns_per_second']:.2f} in the older run below)"
    yield "{:.2f} and {:.2f}. So the machine".format(*(peer[share, 32]["turns_per_second"] for share in (2, 1)))
    cached = sorted(100 * one["cached_share"] for one in by_regime(NOW)[2, 128]["engines"].values())
    yield f"and {cached[0]:.0f} to {cached[-1]:.0f} % is cached"
    yield f"25 ms of the {round(usual['prefill_ms'] + usual['decoding_ms'], -1):.0f} for which a turn prefills"
    rates = [load_rate(row) for row in result(TOGETHER)["rows"] if is_ours(row)]
    yield f"in the step, at {min(rates):.0f} to {max(rates):.0f} GB/s"


def over_peers_of_before() -> list[float]:
    """At 2x: the turns of ours over those of the best peer of the older run, by the length of answers."""
    now, before = by_regime(NOW), by_regime(HERE)
    return [
        now[2, answer]["engines"]["ours"]["turns_per_second"]
        / before[2, answer]["engines"][before[2, answer]["best_peer"]]["turns_per_second"]
        for answer in (8, 32, 128)
    ]


def over_peers_later() -> list[float]:
    """At 1x, after other chats: the turns of ours over those of the best peer, by the length of answers."""
    claims = result(LATER)["claims"]
    return [
        claims[f"turns_over_best_of_3_peers_host_1x_answers_{answer}_vllm_0320"]["value"] for answer in (8, 32, 128)
    ]


def is_first(name: str, users: int) -> bool:
    """Whether so many chats are the first that the engines of this result serve."""
    (options,) = (row for row in result(name)["rows"] if row["part"] == "options")
    return bool(options["users"][0] == users)


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


def by_regime_later() -> Iterator[str]:
    claims = [one for which, one in result(LATER)["claims"].items() if which.startswith("turns_over_best_of_3_peers")]
    over = [marked(one, 3) for one in claims]
    yield "{}, {} and {} times the best peer's turns at 0.5x, {}, {} and {} at 1x".format(*over)
    seconds = sorted({f"{row['seconds']:.1f}" for row in windows(LATER, "ours")})
    yield "windows of {} and {} s".format(*seconds)
    ours, eager, peer = (at_1x(LATER, name)[8] for name in ("ours", WRITE_THROUGH, "lmcache"))
    declined = ours["counted"]["declined_saves_blocks"]
    yield f"declined {declined:,} blocks and had {100 * ours['cached_share']:.1f} % cached"
    yield f"LMCache had {100 * peer['cached_share']:.1f} % and {peer['turns_per_second']:.2f} turns against"
    yield f"against {ours['turns_per_second']:.2f}, `write_through` {100 * eager['cached_share']:.1f} %"
    yield f"% and {eager['turns_per_second']:.2f}: what is cached"
    assert is_first(TOGETHER, 12) and not is_first(LATER, 12)
    yield "had **{:.3f}**, {:.3f} and **{:.3f}** times the best peer's turns (778f943)".format(*over_peers_later())
    yield f"Ours had {prompt_steps(ours):.2f} steps with prompts for each turn, LMCache {prompt_steps(peer):.2f}"
    steps = [row["phases"]["decode_step_ms"] for row in (ours, peer)]
    yield "decoding steps took {:.2f} ms with ours and {:.2f} with LMCache, and why".format(*steps)
    few = [row for name in (LATER, PARTS[1]) for row in windows(name, "lmcache") if row["host_share"] < 1]
    assert all(prompt_steps(row) > 0.9 for row in few)


def at_1x(name: str, connector: str) -> dict[int, Row]:
    """Windows with room for all, by length of answers."""
    return {row["answer"]: row for row in windows(name, connector) if round(row["host_share"], 2) == 1}


def computing_step_ms(phases: Row) -> float:
    """Of a step that does more than decode."""
    decoding = phases["decode_steps"] * phases["decode_step_ms"]
    ms: float = (phases["steps"] * phases["step_ms"] - decoding) / (phases["steps"] - phases["decode_steps"])
    return ms


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
    ms = host_hits(TTFT)
    yield f"of the {ms[2048, 'host_hit', 'ours']:.1f} ms that a host hit takes there"
    yield f"{ms[2048, 'device_hit', 'ours']:.1f} are those of a device hit"
    peers = [ms[2048, "device_hit", name] for name in ("offloading", "simple", "lmcache")]
    assert ms[2048, "device_hit", "ours"] > max(peers)
    options = result(TTFT)["rows"][0]
    bytes_ms = 1e3 * 2048 * TOKEN_BYTES / options["link_bytes_per_second"]
    asked = float(goal(TTFT, "ours_host_hit_over_offloading_2048")) * ms[2048, "host_hit", "offloading"]
    bound = ms[2048, "device_hit", "ours"] + bytes_ms
    yield f"goal is {asked:.1f} ms here, and a device hit of ours and the bytes at the link's rate would be {bound:.1f}"
    yield f"(`ours:trace_loads=true`) had {ms[2048, 'host_hit', 'ours:trace_loads=true']:.1f} ms"
    which = "ours_host_hit_over_nones_device_hit_plus_link_"
    before = [marked(result(TTFT_ALONE)["claims"][f"{which}{size}"]) for size in LENGTHS]
    yield "a host hit took {}, {} and {} of a device hit without a connector".format(*before)
    yield f"{marked(result(TTFT_ALONE)['claims']['ours_host_hit_over_offloading_2048'])} of OffloadingConnector's time"
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
    again, ours = over_none(MISSES_AGAIN), rows(MISSES_AGAIN, "connector")["ours"]
    others = "{:.3f}, {:.3f} and {:.3f}".format(*(again[name] for name in ("offloading", "simple", "lmcache")))
    spread = f"({ours['over_none_p10']:.3f} to {ours['over_none_p90']:.3f})"
    yield f"it was **{again['ours']:.4f}** {spread}, with the others {others}"
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
    by_regime_here,
    by_regime_later,
    decoding_steps,
    first_tokens,
    in_the_background,
    by_choice,
    by_where_it_loads,
    misses,
    ranks,
)
