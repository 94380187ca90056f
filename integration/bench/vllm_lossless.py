"""vLLM with host blocks in a lossless form beside raw ones: time to first token of host hits, and what caches hold.

The weights are random, so the last part shows how the exponents of the engine's own caches spread, beside SmolLM2's
(`integration.models.smollm2_caches` writes them). Chats are `vllm_serving`'s, with `ours:host_form="lossless"` among
its connectors. Needs vLLM, and a GPU or `--tiny`.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch
from kv_connector.triton_kernels.coded_rows import CHUNK

from integration.bench.engines import Engines
from integration.bench.first_tokens import add_ttft_arguments, first_tokens, made_tiny
from integration.bench.options import add_arguments, unavailable
from integration.bench.peers import LOSSLESS
from integration.bench.vllm_engine import VllmOptions, VllmServer
from integration.models import smollm2_caches
from integration.report import Report

RAW = "ours"
GOALS = {8192: 0.85, 32768: 0.85}
"""A host hit's time over that of raw blocks, by tokens."""
GROUP = CHUNK // 4
"""Elements that share a lowest exponent."""
BLOCKS = 32  # of each layer


class Bf16Options(VllmOptions):
    """Also where it is tiny: nothing else is coded."""

    @property
    def dtype(self) -> str:
        return "bfloat16"


def claim_over_raw(report: Report) -> None:
    """The claims on host hits with lossless blocks over those with raw ones."""
    for length, goal in GOALS.items():
        ms = {
            row["connector"]: row["ms"]
            for row in report.rows
            if row.get("tokens") == length and row.get("kind") == "host_hit" and "void" not in row
        }
        if RAW in ms and LOSSLESS in ms:
            report.claim(f"lossless_host_hit_over_raw_{length}", ms[LOSSLESS] / ms[RAW], goal, "of 1", "lower")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(Bf16Options, parser, host_memory="16GiB", device_tokens=49152)
    add_ttft_arguments(Bf16Options, parser)
    parser.set_defaults(connectors=["none", RAW, LOSSLESS])
    options = made_tiny(parser.parse_args())
    if reason := unavailable(Bf16Options, options):
        print(reason)
        return 0
    report, _ = first_tokens("vllm_lossless", Bf16Options, options, add_spreads)
    claim_over_raw(report)
    report.write(options.json)
    return 0


def add_spreads(report: Report, engines: Engines) -> None:
    """A row for the caches of each engine that codes them, and one for SmolLM2's."""
    found = {name: spread for name, spread in engines.everywhere(cache_spread).items() if name == LOSSLESS}
    if smollm2_caches.DEFAULT.is_file():
        words = smollm2_caches.load(smollm2_caches.DEFAULT).flatten()
        found["SmolLM2"] = spread_of(words[: words.numel() // GROUP * GROUP].view(-1, GROUP))
    for name, spread in found.items():
        print(f"{name}: {spread['entropy_bits']:.2f} bits, {spread['out_of_reach']:.4%} out of the code's reach")
        report.rows.append({"part": "exponents", "of": name, **spread})


def cache_spread(server: VllmServer) -> dict[str, Any]:
    """Runs in the engine's process: of blocks that hold something, from all layers, of keys and of values."""
    groups = []
    for cache in server.kv_caches:
        pieces = cache.flatten(0, cache.dim() - 4).flatten(1)
        used = pieces[(pieces != 0).any(dim=1)]
        groups.append(used[:: max(1, len(used) // BLOCKS)].reshape(-1, GROUP))
    return spread_of(torch.cat(groups).cpu())


def spread_of(groups: torch.Tensor) -> dict[str, Any]:
    """How far exponents lie below the largest of their group, as shares of all; the last is out of the code's reach."""
    exponents = (groups.contiguous().view(torch.int16).int() >> 7) & 255
    below = (exponents.amax(dim=1, keepdim=True) - exponents).clamp(max=16)
    shares = (torch.bincount(below.flatten(), minlength=17) / below.numel()).tolist()
    entropy = -sum(share * math.log2(share) for share in shares if share)
    spread = {"groups": len(groups), "group": GROUP, "entropy_bits": entropy}
    return spread | {"out_of_reach": shares[16], "shares_below": shares}


if __name__ == "__main__":
    sys.exit(main())
