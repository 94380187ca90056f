"""What results that are kept say, for tests of what documents tell of them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from integration.figures.results import Row, read, rows_of

result = cache(read)

LENGTHS = (2048, 8192, 32768)
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Of Llama-3.1-8B's shape: keys and values, layers, heads, their size, bf16."""


def claim(name: str, which: str) -> float:
    return float(result(name)["claims"][which]["value"])


def goal(name: str, *parts: str) -> str:
    """The one goal of all claims of a result whose name has these parts."""
    claims = result(name)["claims"].items()
    (found,) = {claim["goal"] for which, claim in claims if all(part in which for part in parts)}
    return f"{found:g}"


def rows(name: str, key: str) -> dict[Any, Any]:
    """Rows of a result by one of their fields, those that have it."""
    return {row[key]: row for row in result(name)["rows"] if key in row}


def host_hits(name: str) -> dict[tuple[int, str, str], float]:
    """Milliseconds to the first token by tokens, kind and connector."""
    return {(row["tokens"], row["kind"], row["connector"]): row["ms"] for row in rows_of("hits", result(name))}


def host_hit(name: str, tokens: int, connector: str) -> Row:
    """The row of host hits of one length with one connector."""
    found = rows_of("hits", result(name))
    which = tokens, "host_hit", connector
    (row,) = [row for row in found if (row["tokens"], row["kind"], row["connector"]) == which]
    return row


def answered_otherwise(name: str, tokens: int) -> int:
    """How many prompts of one length got another token when hit than when computed: as many with every connector."""
    hits = [row for row in rows_of("hits", result(name)) if row["tokens"] == tokens and row["kind"] != "computed"]
    (number,) = {row["prompts"] - row["tokens_as_computed"] for row in hits if "void" not in row}
    return int(number)


def load_rate(row: Row) -> float:
    """GB/s of the loads of a window of chats."""
    return float(row["counted"]["loaded_bytes"] / row["counted"]["load_milliseconds"] / 1e6)


def over_none(name: str) -> dict[str, float]:
    """Throughput where nothing is hit, over that without a connector."""
    return {row["connector"]: row["over_none"] for row in result(name)["rows"] if "over_none" in row}


def by_regime(name: str) -> dict[tuple[float, int], Row]:
    """Regimes of chats in vLLM 0.32 by the host's share and the length of answers."""
    found = rows_of("regime", result(name))
    return {(row["host_share"], row["answer"]): row for row in found}


def older_chats() -> dict[tuple[str, str], float]:
    """Turns over those of others, by result and policy; of several lengths of answers the last."""
    rows = result("vllm_serving_older_h200")["rows"]
    return {
        (re.sub("vllm_serving_|_h200.json", "", row["result"]), row["policy"]): row["turns_over"]["value"]
        for row in rows
    }


def least_over_none() -> float:
    """Throughput where nothing is hit of the older run that lost most."""
    rows = result("vllm_serving_older_h200")["rows"]
    return min(float(row["over_none"]["value"]) for row in rows if "over_none" in row)


def lossless_over_raw() -> list[float]:
    name = "turns_lossless_over_raw_host_0.75x_answers_{}_vllm_0320"
    return [claim("vllm_serving_0320_075x_h200", name.format(answer)) for answer in (8, 32, 128)]


def rows_of_copies(direction: str, piece: int, name: str = "copies_h200") -> list[dict[str, Any]]:
    found = [row for row in result(name)["rows"] if "way" in row]
    return [row for row in found if (row["direction"], row["piece_bytes"]) == (direction, piece)]


def sglang_over_hicache(name: str, *sizes: int) -> list[float]:
    """What a host hit of each length takes of HiCache's."""
    lengths = sizes or (2048, 8192, 32768)
    return [claim(f"sglang_{name}_h200", f"ours_host_hit_over_hicache_{size}") for size in lengths]


def sglang_chats(name: str) -> dict[tuple[float, int, str], Row]:
    """Windows by size of the host, length of answers and connector."""
    chats = rows_of("chats", result(name))
    return {(row["host_share"], row["answer"], row["connector"]): row for row in chats}
