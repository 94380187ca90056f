"""Phrases of README.md with figures of results, for `test_docs_figures.py`."""

from __future__ import annotations

from collections.abc import Iterator

from integration.figures.markdown import marked
from tests.figures_of_latest import HERE, OLDER, over_two_peers
from tests.figures_of_sglang import ALONE, BESIDE, over_hicache
from tests.kept_results import by_regime, goal, least_over_none, over_none, result


def policies() -> Iterator[str]:
    """Of regimes whose host holds all chats."""
    engines = [row["engines"] for (share, _), row in by_regime(HERE).items() if share >= 1]
    ahead = sum(of["ours"]["turns_per_second"] >= of["ours:write_through"]["turns_per_second"] for of in engines)
    assert (ahead, len(engines)) == (4, 6)
    yield "the default had as many turns or more in four of six measurements of that"


def losses() -> Iterator[str]:
    which = "turns_over_best_of_3_peers_host_1x_answers_8_vllm_0320"
    yield f"chats in vLLM behind others had {marked(result(HERE)['claims'][which])} of LMCache's turns (ad5cab4)"
    yield f"had {over_two_peers()} times the turns of the better of two peers"
    which = "ours_host_hit_over_offloading_32768"
    asked = goal(OLDER, which)
    share = marked(result(OLDER)["claims"][which])
    yield f"took {share} of OffloadingConnector's time at 32,768 tokens (e8175df, goal {asked})"
    yield f"where nothing is hit was **{over_none('vllm_misses_0251_h200')['ours']:.3f}** in vLLM 0.25.1"
    slow = result("sglang_serving_turns_2x_h200")["claims"].items()
    worst = min((one for which, one in slow if which.startswith("turns_over")), key=lambda one: one["value"])
    yield f"chats had {marked(worst)} of HiCache's turns at worst"
    yield "took {}, {} and {} of its time at 2,048, 8,192 and 32,768 tokens".format(*over_hicache(ALONE, 2))
    yield "and {}, {} and {} beside chats (778f943)".format(*over_hicache(BESIDE, 2))
    yield f"saving costs up to {100 * (1 - least_over_none()):.0f} % of the throughput"


TOLD = (policies, losses)
