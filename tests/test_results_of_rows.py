"""Goals of results that are kept, of benchmarks that claim while they measure: each follows from the rows beside it.

`test_results.py` has those of benchmarks that claim what their rows say, when all have been measured."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from integration.bench import copies, steps
from integration.figures.results import rows_of
from tests.kept_results import result

Values = Iterator[tuple[str, float]]


def size(num_bytes: int) -> str:
    return copies.size(num_bytes).replace(" ", "")


def of_copies(found: dict[str, Any]) -> Values:
    link = {
        (row["piece_bytes"], row["direction"]): median(row["all_ms"])
        for row in found["rows"]
        if row.get("way") == "link"
    }
    for row in (row for row in found["rows"] if row.get("way") == "ours"):
        label, own = f"{row['direction']}_{size(row['piece_bytes'])}", median(row["all_ms"])
        yield f"share_of_link_{label}", link[row["piece_bytes"], row["direction"]] / own
        yield f"submitting_thread_share_{label}", row["cpu_share"]
    for row in (row for row in found["rows"] if row.get("part") == "duplex"):
        yield f"share_of_duplex_{size(row['piece_bytes'])}", median(row["link_ms"]) / median(row["all_ms"])


def of_submitting(found: dict[str, Any]) -> Values:
    for row in rows_of("long", found):
        yield f"launching_thread_for_a_long_{row['case']}", median(row["launching_us"])
        yield f"submitting_thread_share_of_a_long_{row['case']}", median(row["submitting_share"])
    for row in rows_of("step", found):
        yield f"launching_thread_for_{row['case']}", median(row["us"])
    for row in rows_of("first_group", found):
        yield f"first_group_late_{row['case']}", median(row["late_us"])
    for row in rows_of("awaited", found):
        yield f"share_of_link_of_an_awaited_load_{row['case']}", row["link_ms"] / median(row["all_ms"])
    for row in rows_of("beside_long", found):
        yield f"launching_thread_for_a_load_beside_a_long_one_{row['case']}", median(row["us"])


def of_awaited(found: dict[str, Any]) -> Values:
    for row in (row for row in found["rows"] if row["path"] == "auto"):
        load, waits = f"{row['num_bytes'] >> 20}_MiB", row["waits"].replace(" ", "_")
        claim = f"share_of_link_{load}_in_pieces_of_{row['piece_bytes'] >> 10}_KiB_waited_for_{waits}"
        yield claim, row["link_ms"] / median(row["all_ms"])


def of_interference(found: dict[str, Any]) -> Values:
    for row in (row for row in rows_of("products", found) if row["way"] == "ours"):
        yield f"products_slower_{row['case']}", median(row["beside_ms"]) / median(row["alone_ms"]) - 1
        yield f"share_of_link_beside_products_{row['case']}", median(row["link_ms"]) / median(row["copy_ms"])
    for row in rows_of("decode", found) + rows_of("prefill", found):
        ms = {beside.replace(" ", "_"): median(times) for beside, times in row["ms"].items()}
        for beside in ms.keys() - {"alone"}:
            yield f"{row['part']}_slower_by_{beside}_{row['case']}", ms[beside] / ms["alone"] - 1


def of_index(found: dict[str, Any]) -> Values:
    for operation in ("match", "insert", "evict"):
        rows = [row for row in found["rows"] if (row["index"], row["operation"]) == ("kv_connector", operation)]
        ours = [row["ns_per_block"] for row in sorted(rows, key=lambda row: row["cached_blocks"])]
        yield f"{operation}_growth_from_1e3_to_1e6_blocks", max(ours) / ours[0]


def of_lossless(found: dict[str, Any]) -> Values:
    for row in rows_of("whole", found):
        ms = {name: median(times[1:]) for name, times in row["ms"].items()}
        yield f"{row['direction']}_multiple_of_link", ms["link"] / ms["lossless"]
    for row in (row for row in rows_of("products", found) if row["form"] == "lossless"):
        yield f"products_lose_{row['direction']}", row["lost_ms_per_gb"]


def of_steps(found: dict[str, Any]) -> Values:
    sides: dict[str, dict[str, Any]] = {}
    for row in found["rows"]:
        sides.setdefault(row["case"], {})[row["side"]] = row
    middle = {case: {side: row["median"] for side, row in of.items()} for case, of in sides.items()}
    yield "full_host_to_host_with_room", middle["full host"]["full"] / middle["full host"]["room"]
    yield "reset_of_a_full_host", sides["reset"]["no router listens"]["max"]
    yield "reset_of_a_full_host_with_routers_told", sides["reset"]["routers are told of each block"]["max"]
    for name in ("pinned", "leased"):
        yield f"{name}_host_to_host_with_room", middle["no room"][name] / middle["no room"]["room"]
    soon, before = f"the {steps.QUIET_STEPS} steps after it", middle["write_back"]["before a burst"]
    yield f"write_back_{steps.QUIET_STEPS}_steps_after_a_burst_to_before", middle["write_back"][soon] / before
    yield "write_back_later_to_before", middle["write_back"]["later"] / before
    riders = middle["riders"]
    yield "a_hundred_waiting_requests_to_one", riders["100 waiting"] / riders["1 waiting"]
    for case in ("computed", "hit"):
        groups = middle[f"groups, {case}"]
        yield f"{case}_block_of_two_groups_to_one", groups["two"] / groups["one"]
    keys = middle["storage keys"]
    yield "storage_keys_to_one_sha256_a_block", keys["adopt_hashes"] / keys["one sha256 a block"]
    yield "observed_step_to_one_that_is_not", 1 + middle["observed"]["all on: more"] / 100
    for operation in ("insert", "evict", "match"):
        ours = middle[operation].pop("kv_connector")
        (flat,) = middle[operation].values()
        yield f"{operation}_to_flat_pool", ours / flat


OF_ROWS = {
    "copies_h200": (of_copies, 26),
    "copies_h100": (of_copies, 26),
    "copies_before_h200": (of_copies, 26),
    "submitting_h200": (of_submitting, 36),
    "submitting_h100": (of_submitting, 24),
    "awaited_h200": (of_awaited, 27),
    "awaited_up_front_h200": (of_awaited, 27),
    "interference_h200": (of_interference, 30),
    "interference_h100": (of_interference, 30),
    "index": (of_index, 3),
    "lossless_h200": (of_lossless, 4),
    "lossless_h100": (of_lossless, 4),
    "steps": (of_steps, 15),
}
"""What gives the values of claims by their names, and how many claims it must give."""


@pytest.mark.parametrize("name", OF_ROWS)
def test_goals_of_what_is_claimed_at_once_are_of_their_rows(name: str) -> None:
    found = result(name)
    give, number = OF_ROWS[name]
    values = dict(give(found))
    claims = {what: claim["value"] for what, claim in found["claims"].items() if what in values}
    assert len(claims) == number
    assert claims == {what: pytest.approx(values[what]) for what in claims}
