"""CPU time of the scheduler's thread: a table of its steps, and how the index grows."""

from __future__ import annotations

from integration.figures.markdown import bold_unless, head, line, marked, wrapped
from integration.figures.results import Result, Row, held_or_bold, origin

STEPS = {
    "full_host_to_host_with_room": ("200 requests decode on a host without a free block", "full host", "full", "room"),
    "reset_of_a_full_host": ("reset of a full host, blocks in use", "reset", "no router listens", ""),
    "reset_of_a_full_host_with_routers_told": (
        "the same, with routers that are told of each block",
        "reset",
        "routers are told of each block",
        "",
    ),
    "pinned_host_to_host_with_room": (
        "64 requests decode, prompts unsaved: all of the host pinned",
        "no room",
        "pinned",
        "room",
    ),
    "leased_host_to_host_with_room": ("the same, all but one block leased", "no room", "leased", "room"),
    "write_back_64_steps_after_a_burst_to_before": (
        "`write_back`: 64 quiet steps after a burst of 12 prompts",
        "write_back",
        "the 64 steps after it",
        "before a burst",
    ),
    "write_back_later_to_before": ("`write_back`: the steps after those", "write_back", "later", "before a burst"),
    "a_hundred_waiting_requests_to_one": ("100 requests wait for one load", "riders", "100 waiting", "1 waiting"),
    "computed_block_of_two_groups_to_one": (
        "a block of a prompt that is computed and saved, of two block groups",
        "groups, computed",
        "two",
        "one",
    ),
    "hit_block_of_two_groups_to_one": ("the same, of a prompt that is hit", "groups, hit", "two", "one"),
    "storage_keys_to_one_sha256_a_block": (
        "storage keys of a prompt",
        "storage keys",
        "adopt_hashes",
        "one sha256 a block",
    ),
    "observed_step_to_one_that_is_not": (
        "a step with histograms, events and 1 % of the requests traced",
        "observed",
        "all on",
        "nothing on",
    ),
    "insert_to_flat_pool": ("index: insert a block", "insert", "kv_connector", "vllm"),
    "evict_to_flat_pool": ("index: evict a block", "evict", "kv_connector", "vllm"),
    "match_to_flat_pool": ("index: match a block", "match", "kv_connector", "vllm"),
}
"""By claim of `steps.json`: what is measured, its case, its side, and the side that it is compared with, if any."""
_AGAINST = {
    "nothing on": "with none of these",
    "room": "with room",
    "before a burst": "before it",
    "1 waiting": "one waits",
    "one": "of one group",
    "one sha256 a block": "one SHA-256 a block",
    "vllm": "vLLM's block pool",
    "flat_pool": "a model of vLLM's block pool",
    "": "",
}


def steps(result: Result) -> list[str]:
    """A table of all claims, those that are missed in bold."""
    rows = {(row["case"], row["side"]): row for row in result["rows"]}
    claims, hardware = result["claims"], result["hardware"]
    text = (
        f"`steps.json`, {origin(result)}: CPU time of the scheduler's thread on {hardware['cores']} cores of an "
        f"{hardware['cpu']}, median and in brackets p10 to p90; of fewer than ten samples all, and the "
        f"longest counts. {held_or_bold(claims)}"
    )
    lines = [*wrapped(text), "", *head("| | takes | against | ratio or longest | goal |")]
    for name, claim in claims.items():
        what, case, side, other = STEPS[name]
        other = other if not other or (case, other) in rows else "flat_pool"  # where vLLM is not installed
        value = bold_unless(claim["holds"], f"{claim['value']:.1f} ms") if claim["unit"] == "ms" else marked(claim)
        compared = f"{_AGAINST[other]}: {_taken(rows[case, other])}" if other else ""
        lines.append(line(what, _taken(rows[case, side]), compared, value, f"{claim['goal']:g}"))
        if noise := rows.get((case, f"{other}, again: more")):
            again, ratio = _taken(rows[case, f"{other}, again"]), f"{1 + noise['median'] / 100:.2f}"
            lines.append(line("what of that is noise: two equal sides", again, compared, ratio) + " |")
    return lines


def index(result: Result) -> list[str]:
    """How much longer a block takes among a million than among a thousand; bold misses the goal."""
    claims = [
        result["claims"][f"{operation}_growth_from_1e3_to_1e6_blocks"] for operation in ("match", "insert", "evict")
    ]
    match, insert, evict = map(marked, claims)
    times = (
        f"a match takes {match} times as long, an insertion {insert}, an eviction {evict} (goal {claims[0]['goal']})"
    )
    return wrapped(f"`index.json`, {origin(result)}: from 1,000 to 1,000,000 cached blocks {times}.")


def _taken(row: Row) -> str:
    low, high = (row["p10"], row["p90"]) if "p10" in row else (row["min"], row["max"])
    digits = 1 if row["unit"] == "ms" else 0
    return f"{row['median']:,.{digits}f} {row['unit']} ({low:,.{digits}f} to {high:,.{digits}f})"
