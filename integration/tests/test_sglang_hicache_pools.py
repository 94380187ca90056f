"""Several host pools of SGLang on our storage, and those of several ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.tests.sglang_host_tiers import (
    BACKEND,
    TOKENS,
    Make,
    fill,
    holds,
    host_tiers,
    launched,
    make_host_pool,
    page_hashes,
    slots_of,
)
from kv_connector.engines.sglang import TieredKVStorage, hicache


@pytest.fixture
def make(models: Path, tmp_path: Path) -> Iterator[Make]:
    with host_tiers(models, tmp_path / "kv") as make:
        yield make


def rank_of(settings: dict[str, Any], pool: Any, **config: Any) -> TieredKVStorage:
    """The storage of one of several ranks."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    known = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    known |= {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m"}
    storage = TieredKVStorage(HiCacheStorageConfig(**(known | config), extra_config=BACKEND | settings), {})
    storage.register_mem_pool_host(pool)
    return storage


@pytest.mark.parametrize("is_latent", [False, True], ids=["heads of their own", "the same on all"])
def test_ranks_read_what_is_theirs(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_latent: bool
) -> None:
    """A rank's heads are nobody else's. What is the same on all is written by the first, and read by all; states are a
    rank's own even there."""
    monkeypatch.setattr("kv_connector.engines.sglang.hicache._common_salt", lambda config: bytes([3] * 32))
    settings = {"storage": {"path": str(tmp_path), "capacity": "64MiB"}}
    hashes = page_hashes(TOKENS)
    with launched(models):
        ranks = []
        for rank in range(2):
            pool = make_host_pool("page_first", is_latent)
            storage = rank_of(settings, pool, tp_rank=rank, tp_size=2, is_mla_model=is_latent)
            storage.register_mem_host_pool_v2(make_host_pool("layer_first"), "mamba")
            ranks.append(storage)
        fill(ranks[0].mem_pool_host, hashes, range(1, 7))
        states: Any = SimpleNamespace(name="mamba", keys=hashes[-1:], host_indices=slots_of([1]))
        states.hit_policy = "trailing_pages"
        assert all(ranks[0].batch_set_v1(hashes, slots_of(range(1, 7))))
        assert ranks[0].batch_set_v2([states]) == {"mamba": [True]}
        assert ranks[1].batch_exists(hashes) == (6 if is_latent else 0)
        assert ranks[1].batch_get_v1(hashes, slots_of(range(8, 14))) == [is_latent] * 6
        assert [rank.batch_exists_v2(hashes, [states]).kv_hit_pages for rank in ranks] == [6, 0]
        assert ranks[1].batch_get_v2([states]) == {"mamba": [False]}
        if is_latent:
            assert holds(ranks[1].mem_pool_host, hashes, range(8, 14)) == [True] * 6
            for rank in ranks:
                rank.clear()
            assert [rank.batch_exists(hashes) for rank in ranks] == [0, 0]
            assert all(ranks[0].batch_set_v1(hashes, slots_of(range(1, 7))))
            assert [rank.batch_exists(hashes) for rank in ranks] == [6, 6]
        for stage in range(2):
            own: dict[str, Any] = {"tp_size": 2, "pp_rank": stage, "pp_size": 2, "is_mla_model": is_latent}
            other = rank_of(settings, ranks[0].mem_pool_host, **own)
            assert other.batch_exists(hashes) == 0
            other.close()
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("seed", range(4))
def test_several_pools_are_found_as_sglangs_own_backend_finds_them(make: Make, tmp_path: Path, seed: int) -> None:
    """Whatever is stored of each: all pages of one, windows of another, single states of a third."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolTransfer

    chance = random.Random(seed)
    pools = {"kv": make_host_pool("page_first")}
    pools |= {name: make_host_pool("layer_first", width=24) for name in ("swa", "mamba", "indexer")}
    tier = make(pools["kv"], {name: pool for name, pool in pools.items() if name != "kv"})
    theirs: Any = HiCacheFile(tier.controller.storage_config, str(tmp_path / "theirs"))
    for name, pool in pools.items():
        theirs.register_mem_host_pool_v2(pool, name)
    policies = {"swa": (PoolHitPolicy.TRAILING_PAGES, 3), "mamba": (PoolHitPolicy.TRAILING_PAGES, 1)}
    for turn in range(12):
        hashes = page_hashes([turn * 1000 + seed * 100_000 + token for token in TOKENS + TOKENS])
        stored = []
        for name in pools:
            share = chance.choice((0.5, 0.9, 1.0))
            pages = [i for i in range(len(hashes)) if chance.random() < share]
            keys = [hashes[i] for i in pages]
            stored.append(PoolTransfer(name, slots_of([1 + i for i in pages]), keys=keys))
        stored = [transfer for transfer in stored if transfer.keys]
        assert tier.storage.batch_set_v2(stored) == theirs.batch_set_v2(stored)
        asked = []
        for name in chance.sample(("swa", "mamba", "indexer"), chance.randint(0, 3)):
            policy, window = policies.get(name, (PoolHitPolicy.ALL_PAGES, len(hashes)))
            asked.append(PoolTransfer(name, keys=hashes[-window:], hit_policy=policy))
        ours, expected = (each.batch_exists_v2(hashes, asked) for each in (tier.storage, theirs))
        assert ours.kv_hit_pages == expected.kv_hit_pages
        assert (ours.restorable_prefix_pages or []) == (expected.restorable_prefix_pages or [])
        assert ours.extra_pool_hit_pages == expected.extra_pool_hit_pages


def test_states_and_windows_come_back_byte_for_byte(make: Make) -> None:
    """A state is of pieces of two types, and a page of one token slot."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    hashes = page_hashes(TOKENS)[-2:]
    first, second = ({"swa": make_host_pool("page_first"), "mamba": make_state_pool()} for _ in range(2))
    fill(first["swa"], hashes, [4, 5])
    states = [torch.rand_like(buffer.float()).to(buffer.dtype) for buffer in first["mamba"].get_hybrid_pool_buffer()]
    for buffer, content in zip(first["mamba"].get_hybrid_pool_buffer(), states, strict=True):
        buffer.copy_(content)

    def transfers(pages: list[int], slots: list[int]) -> list[PoolTransfer]:
        where = {"swa": slots_of(pages), "mamba": torch.tensor(slots)}
        return [PoolTransfer(name, indices, keys=hashes) for name, indices in where.items()]

    stored = {"swa": [True] * 2, "mamba": [True] * 2}
    assert make(others=first).storage.batch_set_v2(transfers([4, 5], [2, 7])) == stored
    assert make(others=second).storage.batch_get_v2(transfers([8, 3], [6, 1])) == stored
    assert holds(second["swa"], hashes, [8, 3]) == [True] * 2
    for buffer, content in zip(second["mamba"].get_hybrid_pool_buffer(), states, strict=True):
        assert torch.equal(buffer[[6, 1]], content[[2, 7]])


def make_state_pool() -> Any:
    """A host pool of SGLang's for recurrent states, of 17 slots."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(temporal=torch.zeros(2, 8, 3, 5), conv=(torch.zeros(2, 8, 7, dtype=torch.bfloat16),))
    with host_memory_budget_scope(1 << 30):
        return MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")


def test_ranks_that_share_pages_forget_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rank writes after a clear is what the others look for. Others ask nobody."""
    said = []
    monkeypatch.setattr(hicache, "get_parallel", lambda: SimpleNamespace(attn_tp_group=SimpleNamespace(cpu_group=5)))
    exchange = SimpleNamespace(exchange=lambda salt: [b"of rank 0", said.append(salt)])
    monkeypatch.setattr(hicache, "Ranks", lambda group: exchange if group == 5 else None)
    config: Any = SimpleNamespace(is_mla_model=True, tp_size=2)
    assert hicache._common_salt(config) == b"of rank 0"
    alone: Any = SimpleNamespace(is_mla_model=False, tp_size=2)
    assert len({hicache._common_salt(alone), hicache._common_salt(alone), *said}) == 3
