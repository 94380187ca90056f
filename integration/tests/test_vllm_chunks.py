"""Attention that is local to chunks, as Llama 4 has it beside full attention: a hit needs what its next token sees.

vLLM makes a group of such layers, and full attention of them where `VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE`
is 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from vllm import envs
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from integration.tests.test_vllm_hybrid import ask, forget_device, zero_on_host
from integration.tests.vllm_context import BLOCK_SIZE, Group, Sizes
from integration.tests.vllm_engines import check_loaded_bytes_and_tokens, prompts, running, transfer_config
from integration.tests.vllm_ranks import sharing
from kv_connector.engines.vllm.steps import TELLS_FAILED_REQUESTS
from kv_connector.index import BlockGroup, Lookup
from tests.index.test_lookup import HASHES, host_with

CHUNK = 4 * BLOCK_SIZE
GROUPS = (Group(), Group(chunk=CHUNK))
ALONE = Sizes(tensor=1, decode=1)


def test_chunks_come_back_for_prompts_that_end_anywhere_in_them(tmp_path: Path) -> None:
    """The host gives what vLLM's own cache gives, and vLLM writes over what lies in front of the chunk."""
    lengths = [
        end + more for end in (CHUNK, 5 * BLOCK_SIZE, 2 * CHUNK, 7 * BLOCK_SIZE, 6 * CHUNK) for more in (-1, 0, 1)
    ]
    asked = [prompt[:length] for prompt, length in zip(prompts(len(lengths)), lengths, strict=True)]
    with sharing(tmp_path, ALONE, GROUPS, num_blocks=600) as engine:
        assert engine.connector._scheduler.shape.groups == (BlockGroup(), BlockGroup(chunk_blocks=4))

        def hits(source: str) -> list[int]:
            counts = []
            for prompt in asked:
                before = engine.stats()[f"{source}_hit_tokens"]
                engine.ask([prompt])
                counts.append(int(engine.stats()[f"{source}_hit_tokens"] - before))
            return counts

        hits("device")
        on_device = hits("device")
        engine.forget_device()
        on_host = hits("host")
        stats = engine.stats()
        engine.check_all_free()
    assert engine.wrong == []
    assert on_device == on_host == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths]
    assert bool(stats["async_loads"]) is TELLS_FAILED_REQUESTS, "of several groups, loads are those of requests"


def test_hits_end_where_those_of_vllm_do_whatever_is_left_of_a_chunk(tmp_path: Path) -> None:
    """Blocks of both groups by chance, in vLLM's pool and in ours."""
    rng = random.Random(3)
    lengths = set()
    with sharing(tmp_path, ALONE, GROUPS, num_blocks=100) as engine:
        coordinator = engine.scheduler.kv_cache_manager.coordinator
        for _ in range(300):
            held = [{block for block in range(12) if rng.random() < share} for share in (0.97, rng.choice([0.6, 0.9]))]
            most = rng.randrange(12 * BLOCK_SIZE + 1)
            named = [make_block_hash_with_group_id(HASHES[b], g) for g, blocks in enumerate(held) for b in blocks]
            taken = engine.pool.get_new_blocks(len(named))
            for block, name in zip(taken, named, strict=True):
                block._block_hash = name
                engine.pool.cached_block_hash_to_block.insert(name, block)
            expected = coordinator.find_longest_cache_hit(HASHES, most)[1]
            engine.pool.evict_blocks({block.block_id for block in taken})
            engine.pool.free_blocks(taken)
            grouped, tier = host_with(engine.connector._scheduler.shape.groups, held)
            assert Lookup(grouped, tier).find(HASHES, 0, most // BLOCK_SIZE) * BLOCK_SIZE == expected
            lengths.add(expected)
    assert len(lengths) > 10


@pytest.mark.usefixtures("stable_hashes", "slow_machine")
def test_the_next_engine_answers_from_storage(tmp_path: Path) -> None:
    storage = {"path": str(tmp_path / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    asked = [prompt[:length] for prompt, length in zip(prompts(3), (420, 6 * CHUNK + 1, 6 * CHUNK), strict=True)]
    found = []
    for _ in range(2):
        with sharing(tmp_path, ALONE, GROUPS, num_blocks=200, storage=storage) as engine:
            engine.ask(asked)
            engine.check_all_free()
            found.append(engine.stats()["storage_hit_tokens"])
        assert engine.wrong == []
    assert found == [0, 416 + 6 * CHUNK + 6 * CHUNK - BLOCK_SIZE]


@pytest.fixture(params=["1"])
def chunks_apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM makes a block group of them, unless it is told "0". Once an engine has started it does not look again."""
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", request.param)
    envs.disable_envs_cache()
    yield
    envs.disable_envs_cache()


@pytest.mark.usefixtures("chunks_apart")
@pytest.mark.parametrize("choice", ["sync", "async"])
def test_a_loaded_prefix_has_the_bytes_and_gives_the_tokens_of_a_cached_one(folder: Path, choice: str) -> None:
    check_loaded_bytes_and_tokens(folder, "chunks", choice)


@pytest.mark.usefixtures("chunks_apart")
@pytest.mark.parametrize(("num_tokens", "num_loaded"), [(420, 1), (385, 0), (513, 0), (484, 3)])
def test_a_hit_loads_the_chunk_that_its_next_token_is_in(folder: Path, num_tokens: int, num_loaded: int) -> None:
    """Chunks of four blocks; what is loaded decides the answer, and no more than that is loaded."""
    asked = [prompt[:num_tokens] for prompt in prompts(2, 600)]
    config = transfer_config({"write_policy": "write_through"}, kv_load_failure_policy="recompute")
    with running(folder, "chunks", num_blocks=160, kv_transfer_config=config) as engine:
        assert engine.half._grouped.groups == (BlockGroup(), BlockGroup(chunk_blocks=4))
        ask(engine, asked)
        from_device = ask(engine, asked)
        forget_device(engine)
        before = engine.stats()["loaded_blocks"]
        assert ask(engine, asked) == from_device
        num_full = (num_tokens - 1) // 32
        assert engine.stats()["loaded_blocks"] - before == 2 * (num_full + num_loaded)
        for group, changes in ((0, True), (1, num_loaded > 0)):
            forget_device(engine, overwrite=False)
            assert zero_on_host(engine, group)
            assert (ask(engine, asked) != from_device) is changes
            forget_device(engine, overwrite=False)
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            ask(engine, asked)
        engine.check_all_free()


@pytest.mark.parametrize("chunks_apart", ["0"], indirect=True)
@pytest.mark.usefixtures("chunks_apart")
def test_without_the_variable_all_layers_are_full_attention(folder: Path) -> None:
    with running(folder, "chunks") as engine:
        assert engine.half._grouped.groups == (BlockGroup(),)
    check_loaded_bytes_and_tokens(folder, "chunks", "sync")
