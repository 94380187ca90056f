"""One table of what was measured last of each kind: ours, the best of the others, whoever that is, and the goal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from integration.bench.peers import PEERS
from integration.bench.regimes import regimes
from integration.figures.markdown import bold_unless, head, line, wrapped
from integration.figures.results import Result, Row, rows_of

RESULTS = (
    "vllm_serving_0320_twelve_h200",
    "vllm_serving_0320_launch_h200",
    "vllm_ttft_0320_graphs_h200",
    "vllm_misses_0320_h200",
    "sglang_serving_h200",
    "sglang_ttft_h200",
    "sglang_misses_h200",
)


_SIGNS = {"higher": "≥", "lower": "≤"}


def table(*results: Result) -> list[str]:
    """A line for each kind of measurement, and below what all have in common; `results` are `RESULTS`, in order."""
    *in_vllm, first, misses, in_sglang, first_in_sglang, misses_in_sglang = results
    titles = ("", "ours", "best of the others", "ours over it", "goal", "commit")
    return [
        *head(line(*titles)),
        *_chats_in_vllm(*in_vllm),
        _first_tokens("vLLM", first),
        _misses("vLLM", misses),
        *_chats_in_sglang(in_sglang),
        _first_tokens("SGLang", first_in_sglang),
        _misses("SGLang", misses_in_sglang),
        "",
        *wrapped(_in_common(*results)),
    ]


def _in_common(*results: Result) -> str:
    """What the engines ran on, when, and how often each figure was measured."""
    gpus = {result["hardware"]["gpu"] for result in results}
    assert len(gpus) == 1, f"one line for results of {sorted(gpus)}"
    dates = sorted({result["date"][:10] for result in results})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    seconds = [row["seconds"] for row in rows_of("chats", *results)]
    prompts = sorted({len(row["all_ms"]) for row in rows_of("hits", *results)})
    rounds = sorted({len(row["all_over_none"]) for row in rows_of("misses", *results) if "over_none" in row})
    return (
        f"One {gpus.pop()} for the engines of a row, {days}. Turns: one window of {min(seconds):.0f} to "
        f"{max(seconds):.0f} s for each engine. First tokens: medians of {_either(prompts)} prompts. Nothing is hit: "
        f"medians of {_either(rounds)} rounds."
    )


def _chats_in_vllm(*results: Result) -> Iterator[str]:
    """A line for each size of the host, of the last result that has it."""
    lines: dict[float, str] = {}
    for result in results:
        rows = sorted(regimes(result["rows"]), key=lambda row: (row["host_share"], row["answer"]))
        for host in dict.fromkeys(row["host_share"] for row in rows):
            turns = {
                row["answer"]: {name: engine["turns_per_second"] for name, engine in row["engines"].items()}
                for row in rows
                if row["host_share"] == host
            }
            lines[host] = _chats("vLLM", host, turns, result)
    return (lines[host] for host in sorted(lines))


def _chats_in_sglang(result: Result) -> Iterator[str]:
    engines: dict[float, dict[int, dict[str, float]]] = {}
    for row in rows_of("chats", result):
        by_answer = engines.setdefault(row["host_share"], {}).setdefault(row["answer"], {})
        by_answer[row["connector"]] = row["turns_per_second"]
    for host, turns in engines.items():
        yield _chats("SGLang", host, turns, result)


def _chats(engine: str, host: float, turns: Mapping[int, Mapping[str, float]], result: Result) -> str:
    """`turns`: a second, by length of answers and engine."""
    peers = {answer: _peers(by_engine) for answer, by_engine in turns.items()}
    claims = [_only(result, "turns_over_best_of_", f"_host_{host:g}x_answers_{answer}_") for answer in turns]
    best = {answer: max(of, key=of.__getitem__) for answer, of in peers.items()}
    what = f"{engine}, turns a second{_beside(peers.values())}: host {host:.3g}x, answers of {_listed(map(str, turns))}"
    ours = _listed(f"{by_engine['ours']:.2f}" for by_engine in turns.values())
    theirs = _with_names([(f"{peers[answer][name]:.2f}", name) for answer, name in best.items()])
    ratios = [turns[answer]["ours"] / peers[answer][name] for answer, name in best.items()]
    goals = [(claim["goal"], claim["better"]) for claim in claims]
    return line(f"{what} tokens", ours, theirs, *_ratios(ratios, goals), result["commit"][:7])


def _first_tokens(engine: str, result: Result) -> str:
    """The soonest of the others for each length, whose hits are not void, and the strictest goal of that length."""
    ms: dict[int, dict[str, float]] = {}
    for row in rows_of("hits", result):
        if row["kind"] == "host_hit" and "void" not in row:
            ms.setdefault(row["tokens"], {})[row["connector"]] = row["ms"]
    peers = {tokens: _peers(ms[tokens]) for tokens in sorted(ms)}
    best = {tokens: min(of, key=of.__getitem__) for tokens, of in peers.items()}
    lengths = _listed(f"{tokens:,}" for tokens in peers)
    what = f"{engine}, ms to the first token of a host hit{_beside(peers.values())}: {lengths} tokens"
    ours = _listed(f"{ms[tokens]['ours']:.1f}" for tokens in peers)
    theirs = _with_names([(f"{peers[tokens][name]:.1f}", name) for tokens, name in best.items()])
    ratios = [ms[tokens]["ours"] / peers[tokens][name] for tokens, name in best.items()]
    goals = [
        (min(result["claims"][f"ours_host_hit_over_{name}_{tokens}"]["goal"] for name in of), "lower")
        for tokens, of in peers.items()
    ]
    return line(what, ours, theirs, *_ratios(ratios, goals), result["commit"][:7])


def _misses(engine: str, result: Result) -> str:
    """The goal is of ours alone, over an engine without a host cache."""
    shares = {row["connector"]: row["over_none"] for row in rows_of("misses", result) if "over_none" in row}
    peers = _peers(shares)
    name = max(peers, key=peers.__getitem__)
    claim = _only(result, "miss_path_throughput_", engine.lower())
    what = f"{engine}, nothing is hit{_beside([peers])}: throughput over that without a host cache"
    ours, goal = shares["ours"], f"ours {_SIGNS[claim['better']]} {claim['goal']:g}"
    told = bold_unless(ours >= claim["goal"], f"{ours:.4f}")
    ratio = f"{ours / peers[name]:.3f}"
    return line(what, told, f"{peers[name]:.4f} ({PEERS[name]})", ratio, goal, result["commit"][:7])


def _only(result: Result, *parts: str) -> Row:
    """The one claim whose name has these parts."""
    (found,) = [claim for name, claim in result["claims"].items() if all(part in name for part in parts)]
    return found


def _peers(figures: Mapping[str, float]) -> dict[str, float]:
    """Those of others' connectors."""
    return {name: figure for name, figure in figures.items() if name in PEERS}


def _beside(peers: Iterable[Mapping[str, float]]) -> str:
    """How many others, where there is more than one that there could be."""
    (number,) = {len(of) for of in peers}
    return f" beside {number} others" if number > 1 else ""


def _with_names(found: Sequence[tuple[str, str]]) -> str:
    """Figures with the names of their engines: one name, where all are of one."""
    names = [PEERS[name] for _, name in found]
    if len(set(names)) == 1:
        return f"{_listed(figure for figure, _ in found)} ({names[0]})"
    return _listed(f"{figure} ({name})" for (figure, _), name in zip(found, names, strict=True))


def _ratios(ratios: Sequence[float], goals: Sequence[tuple[float, str]]) -> tuple[str, str]:
    """Ratios, bold where the goal is missed, and the goals: one, where it is the same for all."""
    (better,) = {better for _, better in goals}
    sign = 1 if better == "higher" else -1
    told = [
        bold_unless(sign * ratio >= sign * goal, f"{ratio:.3f}") for ratio, (goal, _) in zip(ratios, goals, strict=True)
    ]
    values = list(dict.fromkeys(f"{goal:g}" for goal, _ in goals))
    goal = values[0] if len(values) == 1 else _listed(f"{goal:g}" for goal, _ in goals)
    return _listed(told), f"{_SIGNS[better]} {goal}"


def _either(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _listed(texts: Iterable[str]) -> str:
    return " / ".join(texts)
