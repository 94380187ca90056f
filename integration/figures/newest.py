"""One table of what was measured last of each kind: ours, the best of the others, and the ratio that has a goal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from integration.bench.peers import PEERS
from integration.figures.markdown import bold_unless, head, line
from integration.figures.results import Result, Row, rows_of

RESULTS = (
    "vllm_regimes_choice_075x_0320_h200",
    "vllm_regimes_choice_0320_h200",
    "vllm_ttft_0320_alone_h200",
    "vllm_misses_0320_h200",
    "sglang_serving_1x_h200",
    "sglang_serving_2x_h200",
    "sglang_ttft_alone_h200",
    "sglang_misses_h200",
)


def table(*results: Result) -> list[str]:
    """A line for each kind of measurement; `results` are `RESULTS`, in order."""
    small, large, first, misses, *in_sglang, first_in_sglang, misses_in_sglang = results
    titles = ("", "ours", "best of the others", "ratio", "goal", "commit")
    return [
        *head(line(*titles)),
        *(each for result in (small, large) for each in _chats_in_vllm(result)),
        _first_tokens("vLLM", "offloading", first),
        _misses("vLLM", misses),
        *(_chats_in_sglang(result) for result in in_sglang),
        _first_tokens("SGLang", "hicache", first_in_sglang),
        _misses("SGLang", misses_in_sglang),
    ]


def _chats_in_vllm(result: Result) -> Iterator[str]:
    rows = sorted(rows_of("regime", result), key=lambda row: (row["host_share"], row["answer"]))
    for host in dict.fromkeys(row["host_share"] for row in rows):
        found = [row for row in rows if row["host_share"] == host]
        ours = [f"{row['engines']['ours']['turns_per_second']:.2f}" for row in found]
        best = [(row["engines"][row["best_peer"]]["turns_per_second"], PEERS[row["best_peer"]]) for row in found]
        claims = [
            claim
            for row in found
            for name, claim in result["claims"].items()
            if name.startswith("turns_") and f"_host_{host:g}x_answers_{row['answer']}_" in name
        ]
        yield line(
            _chats("vLLM", host, [row["answer"] for row in found]),
            _listed(ours),
            _listed(f"{turns:.2f} ({name})" for turns, name in best),
            *_ratios(claims),
            result["commit"][:7],
        )


def _chats_in_sglang(result: Result) -> str:
    rows = rows_of("chats", result)
    answers = list(dict.fromkeys(row["answer"] for row in rows))
    found = {(row["answer"], row["connector"]): row["turns_per_second"] for row in rows}
    ours, peer = ([f"{found[answer, name]:.2f}" for answer in answers] for name in ("ours", "hicache"))
    claims = [claim for name, claim in result["claims"].items() if name.startswith("turns_over_best")]
    what = _chats("SGLang", rows[0]["host_share"], answers)
    return line(what, _listed(ours), f"{_listed(peer)} (HiCache)", *_ratios(claims), result["commit"][:7])


def _chats(engine: str, host_share: float, answers: Sequence[int]) -> str:
    return f"{engine}, turns a second: host {host_share:.3g}x, answers of {_listed(map(str, answers))} tokens"


def _first_tokens(engine: str, peer: str, result: Result) -> str:
    hits = {(row["tokens"], row["connector"]): row for row in rows_of("hits", result) if row["kind"] == "host_hit"}
    lengths = sorted({tokens for tokens, _ in hits})
    ours, theirs = ([f"{hits[tokens, name]['ms']:.1f}" for tokens in lengths] for name in ("ours", peer))
    claims = [result["claims"][f"ours_host_hit_over_{peer}_{tokens}"] for tokens in lengths]
    what = f"{engine}, ms to the first token of a host hit: {_listed(f'{tokens:,}' for tokens in lengths)} tokens"
    return line(what, _listed(ours), f"{_listed(theirs)} ({PEERS[peer]})", *_ratios(claims), result["commit"][:7])


def _misses(engine: str, result: Result) -> str:
    shares = {row["connector"]: row["over_none"] for row in rows_of("misses", result) if "over_none" in row}
    name = max((name for name in shares if name in PEERS), key=shares.__getitem__)
    claims = [claim for what, claim in result["claims"].items() if what.startswith("miss_path")]
    what = f"{engine}, nothing is hit: throughput over that without a host cache"
    ratio, goal = _ratios(claims, 4)
    return line(what, ratio, f"{shares[name]:.4f} ({PEERS[name]})", "", goal, result["commit"][:7])


def _ratios(claims: Sequence[Row], digits: int = 3) -> tuple[str, str]:
    """Of each claim its value, bold where the goal is missed, and the goals: one, where it is the same for all."""
    goals = [f"{claim['goal']:g}" for claim in claims]
    values = _listed(bold_unless(claim["holds"], f"{claim['value']:.{digits}f}") for claim in claims)
    return values, goals[0] if len(set(goals)) == 1 else _listed(goals)


def _listed(texts: Iterable[str]) -> str:
    return " / ".join(texts)
