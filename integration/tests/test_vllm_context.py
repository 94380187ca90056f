"""Ranks that share out a context: a block's tokens lie on several of them, and the block is what comes and goes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from integration.tests.vllm_context import BLOCK_SIZE, KEEPS_COPIES, Group, Sizes, cache_of, config_of, entries_of
from integration.tests.vllm_engines import prompts
from integration.tests.vllm_ranks import sharing
from kv_connector.engines.vllm.groups import tokens_per_block
from kv_connector.engines.vllm.identity import read_identity
from kv_connector.errors import TransferError
from kv_connector.types import Direction
from tests.waiting import until

SHAPES = [
    Sizes(tensor=2, decode=2),
    Sizes(tensor=2, decode=2, interleave=BLOCK_SIZE),
    Sizes(tensor=4, decode=2, interleave=4),
    Sizes(tensor=4, decode=4),
    Sizes(tensor=1, decode=1, prefill=2),
    Sizes(tensor=1, decode=2, prefill=2),
    Sizes(tensor=2, decode=4, prefill=2),
]


def name_of(sizes: Sizes) -> str:
    return f"tp{sizes.tensor}-dcp{sizes.decode}-pcp{sizes.prefill}-{sizes.interleave}"


@pytest.mark.parametrize("choice", ["sync", "async"])
@pytest.mark.parametrize("sizes", SHAPES, ids=name_of)
def test_every_rank_has_its_part_of_every_block_back(tmp_path: Path, sizes: Sizes, choice: str) -> None:
    """Prompts that end within a block: the tokens behind the last whole one are computed again."""
    asked = prompts(3, 420)
    with sharing(tmp_path, sizes, load_choice=choice) as engine:
        before = engine.stats()
        computed = engine.ask(asked)
        from_device = engine.ask(asked)
        engine.drain()
        saved = engine.stats()["saved_blocks"] - before["saved_blocks"]
        engine.forget_device()
        from_host = engine.ask(asked)
        stats = engine.stats()
        engine.check_all_free()
    assert engine.wrong == []
    assert computed == from_device == from_host
    assert engine.connector._scheduler.shape.block_sizes == (sizes.span,)
    assert saved == 3 * (423 // sizes.span), "a block that is not full has no name, and is not saved"
    assert stats["host_hit_tokens"] == 3 * (419 // sizes.span * sizes.span)
    assert stats[f"{choice}_loads"] > 0


@pytest.mark.parametrize("sizes", [Sizes(4, 4), Sizes(1, 1, 2), Sizes(2, 4, 2)], ids=name_of)
def test_latents_are_shared_out_like_keys_and_values(tmp_path: Path, sizes: Sizes) -> None:
    """MLA, of which vLLM serves all of these."""
    asked = prompts(3, 420)
    with sharing(tmp_path, sizes, (Group(is_latent=True),)) as engine:
        computed = engine.ask(asked)
        engine.forget_device()
        assert engine.ask(asked) == computed
        assert engine.stats()["host_hit_tokens"] == 3 * (419 // sizes.span * sizes.span)
        engine.check_all_free()
    assert engine.wrong == []


@pytest.mark.parametrize("sizes", SHAPES[:6:2], ids=name_of)
def test_requests_lose_their_blocks_and_come_back(tmp_path: Path, sizes: Sizes) -> None:
    """More at once than the device can hold as they grow; prompts share a beginning, and are computed in chunks."""
    (shared,), tails = prompts(1, 200), prompts(6, 150, seed=1)
    asked = [[*shared, *tail] for tail in tails]
    with sharing(tmp_path, sizes) as engine:
        expected = engine.ask(asked, 100)
    with sharing(tmp_path, sizes, num_blocks=1200 // sizes.span) as engine:
        rounds = [engine.ask(asked, 100) for _ in range(3)]
        stats = engine.stats()
        engine.check_all_free()
    assert engine.wrong == []
    assert rounds == [expected] * 3
    assert stats["host_hit_tokens"] > 1000


@pytest.mark.parametrize("sizes", [Sizes(2, 2), Sizes(1, 1, 2)], ids=name_of)
def test_a_load_that_fails_on_one_rank_is_computed_by_all(tmp_path: Path, sizes: Sizes) -> None:
    asked = prompts(2, 420)
    with sharing(tmp_path, sizes, load_choice="async") as engine:
        expected = engine.ask(asked)
        engine.forget_device()
        queue = engine.ranks[1].connector._worker.half._engine._queues[Direction.LOAD]
        whole, queue.paths = queue.paths, (SimpleNamespace(copy=_fail, close=lambda: None),)
        assert engine.ask(asked) == expected
        assert engine.stats()["failed_load_jobs"] > 0
        queue.paths = whole
        engine.forget_device()
        assert engine.ask(asked) == expected
        engine.check_all_free()
    assert engine.wrong == []


def _fail(copy: Any) -> None:
    raise TransferError("the link is down")


@pytest.mark.skipif(not KEEPS_COPIES, reason="older versions share out every layer, or serve none")
@pytest.mark.parametrize("shared_out_first", [True, False])
def test_layers_that_are_not_shared_out_have_smaller_blocks_and_are_copied_whole(
    tmp_path: Path, shared_out_first: bool
) -> None:
    """As a draft's are: vLLM keeps a copy on each rank, in blocks of as many tokens as a rank's part of the others."""
    groups = [Group(is_shared_out=shared_out_first), Group(is_shared_out=not shared_out_first)]
    asked = prompts(3, 420)
    with sharing(tmp_path, Sizes(4, 2, interleave=8), groups) as engine:
        computed = engine.ask(asked)
        engine.forget_device()
        assert engine.ask(asked) == computed
        assert engine.stats()["host_hit_tokens"] == 3 * 416
        assert sorted(engine.connector._scheduler.shape.block_sizes) == [BLOCK_SIZE, 2 * BLOCK_SIZE]
        engine.check_all_free()
    assert engine.wrong == []


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
def test_the_next_engine_of_the_same_sizes_answers_from_storage_and_no_other(tmp_path: Path) -> None:
    """Engines that take turns in one folder. What differs in how tokens are shared out finds nothing, though its blocks
    have as many tokens and bytes."""
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    asked = prompts(2, 420)
    shapes = [Sizes(4, 2), Sizes(4, 2), Sizes(4, 2, interleave=4), Sizes(2, 2), Sizes(4, 2)]
    found, answers = [], []
    for sizes in shapes:
        with sharing(tmp_path, sizes, storage=storage) as engine:
            answers.append(engine.ask(asked))
            engine.check_all_free()
            found.append(engine.stats()["storage_hit_tokens"])
        assert engine.wrong == []
    assert found == [0, 2 * 416, 0, 0, 2 * 416]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
@pytest.mark.parametrize(("there", "is_sent"), [(Sizes(4, 2), True), (Sizes(4, 2, interleave=4), False)])
def test_an_engine_of_the_same_sizes_is_sent_every_part_and_another_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, there: Sizes, is_sent: bool
) -> None:
    """Rank by rank. Between engines that differ, the request is computed, and the log says what differs."""
    deadline = 60_000 if is_sent else 100  # the producer waits for a consumer until then
    peer = {"secret": "a secret of these tests only", "deadline_ms": deadline, "timeout_ms": 60_000}
    (prompt,) = prompts(1, 420)
    with (
        sharing(tmp_path, Sizes(4, 2), peer=peer | {"role": "producer"}) as prefill,
        sharing(tmp_path, there, peer=peer | {"role": "consumer"}) as decode,
    ):
        prefill.ask([prompt], 1, {"do_remote_decode": True})
        (params,) = prefill.transfers
        (answer,) = decode.ask([prompt], 4, params, beside=[prefill])
        assert (decode.stats()["received_blocks"] > 0) is is_sent
        assert (decode.stats()["failed_receive_jobs"] > 0) is not is_sent
        assert prefill.ask([prompt]) == [answer]
        until(lambda: not prefill.half.has_pending_push_work(), prefill.step, prefill.stats)
        prefill.check_all_free()
        decode.check_all_free()
    assert prefill.wrong == decode.wrong == []
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    named = [line for line in warned if "settings is" in line and '"interleave": 4' in line]
    assert bool(named) is not is_sent


def test_which_tokens_a_rank_has_is_named(tmp_path: Path) -> None:
    """In the words of vLLM's settings, of which the older one for the interleave goes first; the same in processes that
    have carried it over and in those that have not."""

    def settings(sizes: Sizes, older: int = 1) -> str:
        config = config_of(tmp_path, sizes, {})
        config.parallel_config.dcp_kv_cache_interleave_size = older
        cache, _, hash_size = cache_of(config, entries_of([Group()]), 60)
        return read_identity(config, cache, hash_size).settings

    assert "context_parallel" not in settings(Sizes(4, 1))
    named = [settings(sizes) for sizes in (Sizes(4, 2), Sizes(4, 4), Sizes(2, 2), Sizes(4, 2, interleave=4))]
    named += [settings(Sizes(2, 1, 2)), settings(Sizes(1, 2, 2))]
    assert len(set(named)) == 6
    assert '"context_parallel": {"decode": 2, "interleave": 4, "prefill": 1, "tensor": 4}' in named[3]
    assert settings(Sizes(4, 2), older=4) == settings(Sizes(4, 2, interleave=4), older=4) == named[3]


@pytest.mark.parametrize("sizes", SHAPES, ids=name_of)
def test_a_block_spans_what_vllm_says(tmp_path: Path, sizes: Sizes) -> None:
    config = config_of(tmp_path, sizes, {})
    cache, scheduler_size, hash_size = cache_of(config, entries_of([Group()]), 60)
    (group,) = cache.kv_cache_groups
    assert tokens_per_block(group.kv_cache_spec, config.parallel_config) == scheduler_size == hash_size
    assert hash_size == sizes.span


@pytest.mark.parametrize("choice", ["sync", "async"])
@pytest.mark.parametrize("sizes", [Sizes(2, 2), Sizes(1, 1)], ids=name_of)
def test_steps_that_are_reported_before_their_saves(tmp_path: Path, sizes: Sizes, choice: str) -> None:
    """As vLLM does where a drafter runs behind the model: what a step has saved is told with a later one's report."""
    asked = prompts(3, 420)
    with sharing(tmp_path, sizes, finalizes_late=True, load_choice=choice) as engine:
        computed = engine.ask(asked)
        engine.forget_device()
        assert engine.ask(asked) == computed
        assert engine.stats()["host_hit_tokens"] == 3 * 416
        engine.check_all_free()
    assert engine.wrong == []


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
@pytest.mark.parametrize("sizes", [Sizes(1, 1, 2), Sizes(2, 2)], ids=name_of)
def test_what_has_ended_during_a_sleep_is_told_with_the_next_step(tmp_path: Path, sizes: Sizes) -> None:
    """vLLM 0.33 asks ranks after a sleep what they have ready, and hears one of those that have one key: the end of a
    job would be lost that way."""
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB"}
    asked = prompts(2, 420)
    with sharing(tmp_path, sizes, storage=storage) as engine:
        engine.ask(asked)
        assert [rank.connector._worker.get_handshake_metadata() for rank in engine.ranks] == [None, None]
        engine.check_all_free()
        assert not engine.half.has_pending_push_work()
        assert engine.stats()["backed_up_blocks"] > 0
