"""Blocks of the documents whose lines are written: which there are, what writes each, and which are not as it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from integration.figures import copies, lossless, newest, scheduler, sglang, simulation, vllm
from integration.figures.reference import TABLES
from integration.figures.results import ROOT, read

_BLOCK = re.compile(
    r"(?m)^(?P<begin>(?P<indent> *)<!-- figures: (?P<name>\w+) -->\n)(?P<body>.*?)(?=^ *<!-- end of figures -->)", re.S
)

WRITERS: dict[str, tuple[str | tuple[str, ...], Callable[..., list[str]]]] = {
    "steps": ("steps", scheduler.steps),
    "index": ("index", scheduler.index),
    "simulation": ("simulation", simulation.long_run),
    "simulation_short": ("simulation", simulation.in_a_sentence),
    "mutants": ("mutants", simulation.mutants),
    "sglang_chats": ("sglang_serving_h200", sglang.chats),
    "sglang_misses": ("sglang_misses_h200", sglang.misses),
    "sglang_ttft": ("sglang_ttft_h200", sglang.host_hits),
    "sglang_ttft_beside": ("sglang_ttft_beside_h200", sglang.host_hits),
    "copies": ("copies_h200", copies.scattered),
    "copies_h100": ("copies_h100", copies.scattered),
    "awaited": ("awaited_h200", copies.awaited),
    "submitting": (("submitting_h100", "submitting_h200"), copies.submitting),
    "small_copies": ("interference_h200", copies.small_copies),
    "interference": ("interference_h200", copies.interference),
    "interference_h100": ("interference_h100", copies.interference),
    "lossless": ("lossless_h200", lossless.whole_copies),
    "lossless_ttft": ("vllm_lossless_0320_latest_h200", lossless.host_hits),
    "lossless_chats": ("vllm_serving_0320_075x_h200", lossless.chats),
    "regimes": ("vllm_regimes_0320_twelve_h200", vllm.regimes),
    "regimes_launch": ("vllm_regimes_0320_launch_h200", vllm.regimes),
    "regimes_before": ("vllm_regimes_0320_h200", vllm.regimes),
    "newest": (newest.RESULTS, newest.table),
    "ttft": ("vllm_ttft_0320_graphs_h200", vllm.host_hits),
}
"""By the name in a document: the result, or several, and what writes its lines."""


def with_figures() -> list[Path]:
    """Documents that have figures which are written."""
    every = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    return [path for path in every if _BLOCK.search(path.read_text())]


def stale() -> dict[Path, str]:
    """Documents that are not as the results and the code say, with the text that they should have."""
    found = {path: (path.read_text(), renewed(path.read_text())) for path in with_figures()}
    return {path: text for path, (old, text) in found.items() if text != old}


def renewed(text: str) -> str:
    """The text of a document, with its figures as the results and the code say."""

    def fill(block: re.Match[str]) -> str:
        return block["begin"] + "".join(f"{block['indent']}{line}".rstrip() + "\n" for line in written(block["name"]))

    return _BLOCK.sub(fill, text)


def written(name: str) -> list[str]:
    """The lines of a block, by its name in a document."""
    if name in TABLES:
        return TABLES[name]()
    results, write = WRITERS[name]
    return write(*map(read, [results] if isinstance(results, str) else results))


def written_lines(text: str) -> str:
    """What lies between the markers of a document."""
    return "".join(block["body"] for block in _BLOCK.finditer(text))
