"""Where the tokens of requests came from, as the statistics say."""

from __future__ import annotations

from dataclasses import replace

from kv_connector.base import SchedulerOutput
from kv_connector.types import StepReport
from tests.scheduler.test_half import Asked, admit, make_half, report, run, save

PROMPT = list(range(8))


def test_what_is_sooner_computed_than_loaded_is_counted_in_tokens() -> None:
    """A load of two blocks took an hour. What is on the host and is left there has not been missed."""
    half, _ = make_half(num_host_blocks=50, load_choice="auto")
    save(half, Asked("warm", [*PROMPT, 0]), first_block=40)
    assert admit(half, Asked("slow", [*PROMPT, 0])) == 8
    (load,) = half.build_connector_meta(SchedulerOutput()).loads
    hour = StepReport(2, 0, (load.job_id,), num_host_blocks=50, load_milliseconds=3.6e6)
    half.update_connector_output([hour])
    save(half, Asked("prefill", [5] * 100), first_block=60)  # takes some seconds
    assert admit(half, Asked("computes", [*PROMPT, 1])) == 0
    stats = half.get_kv_connector_stats()
    assert (stats["recomputed_tokens"], stats["missed_pending_tokens"]) == (8, 0)
    assert (stats["requests"], stats["queries_tokens"], stats["host_hit_tokens"]) == (4, 9 + 9 + 100 + 9, 8)


def test_what_comes_too_early_for_blocks_that_are_being_saved_is_counted_in_tokens() -> None:
    """Each request once, however often it is preempted; and no block that is on the host, or nowhere."""
    half, _ = make_half(num_host_blocks=50)
    save(half, Asked("warm", PROMPT[:4]), first_block=40)
    first = Asked("first", [*PROMPT, *range(8, 13)])
    admit(half, first)
    plan = run(half, first, computed=4)
    assert [job.device_ids.tolist() for job in plan.saves] == [[1, 2]]
    early = Asked("early", [*first.tokens, *range(13, 20)])
    for first_block in (10, 20):
        assert admit(half, early, first_block) == 4
        half.build_connector_meta(SchedulerOutput((), {"early"}))
    assert half.get_kv_connector_stats()["missed_pending_tokens"] == 8
    report(half, replace(plan, loads=()))
    assert admit(half, Asked("whole", first.tokens[:12]), 30) == 8, "a token is left to compute"
    assert half.get_kv_connector_stats()["missed_pending_tokens"] == 8


def test_how_far_apart_the_uses_of_a_prefix_are_is_counted_in_blocks_once_for_each_part_of_it() -> None:
    """In blocks that requests have asked for, by which an operator sees how large a host would have to be."""
    half, _ = make_half(num_host_blocks=50)
    distances = half.metrics.histograms["reuse_distance_blocks", "all"]
    save(half, Asked("chat", [*PROMPT, 0]), first_block=10)
    save(half, Asked("of 5 blocks", [5] * 21), first_block=20)
    assert distances.count == 0, "nobody has asked again"
    save(half, Asked("of 3 blocks, 2 of them known", [*PROMPT, *range(50, 57)]), first_block=30)
    assert (distances.count, sum(distances.sums)) == (1, 5)
    save(half, Asked("of 4 blocks", [6] * 17), first_block=40)
    save(half, Asked("the first block", [*PROMPT[:4], 0]), first_block=50)
    assert (distances.count, sum(distances.sums)) == (2, 5 + 7)
    save(half, Asked("chat again", [*PROMPT, 0]), first_block=60)
    assert (distances.count, sum(distances.sums)) == (4, 5 + 7 + 1 + 8), "its two blocks were not asked for at one time"


def test_what_the_device_serves_makes_no_use_of_the_host() -> None:
    """Of an engine that tells of blocks: the host would have been of use for what the device lacks alone."""
    half, _ = make_half(num_host_blocks=50)
    asked = Asked("chat", [*PROMPT, 0])
    save(half, asked, first_block=40)
    half.reuse.least_part = 1
    (node, _) = half.tree.match(asked.block_hashes)
    for on_device, is_worth in ((True, False), (False, True)):
        for _ in range(20):
            half.note_asked(asked.block_hashes, on_device)
            report(half, half.build_connector_meta(SchedulerOutput()))
        assert (half.reuse.worth(node) > 0) is is_worth


def test_what_a_request_teaches_is_learned_when_its_step_has_ended() -> None:
    """While it is looked up it waits."""
    half, _ = make_half(num_host_blocks=50)
    asked = Asked("chat", [*PROMPT, 0])
    save(half, asked, first_block=40)
    half.reuse.least_part = 1
    for _ in range(20):
        half.note_asked(asked.block_hashes)
    (node, _) = half.tree.match(asked.block_hashes)
    assert half.reuse.worth(node) == 0
    report(half, half.build_connector_meta(SchedulerOutput()))
    assert half.reuse.worth(node) > 0
