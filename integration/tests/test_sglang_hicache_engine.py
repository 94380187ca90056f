"""Real SGLang engines on the CPU whose own host tier has our storage behind it, over restarts. Copies between device
and host are stood for: `sglang_cpu_copies.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.tests.sglang_cpu_copies import write_plugin
from integration.tests.sglang_engines import PAGE_SIZE, SglangEngine, running_alone
from integration.tests.sglang_host_tiers import BACKEND
from kv_connector.storage.filesystem.survey import survey
from kv_connector.testing.engine_contract import Expected, evict, prompts
from tests.waiting import until

PROMPT = 200
HIT = PROMPT // PAGE_SIZE * PAGE_SIZE


@contextmanager
def storing(models: Path, folder: Path, layout: str, **options: Any) -> Iterator[SglangEngine]:
    """An engine that keeps blocks in this folder."""
    settings = BACKEND | {"prefetch_threshold": PAGE_SIZE, "storage": {"path": str(folder), "capacity": "256MiB"}}
    own = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(settings),
    }
    with running_alone(models, **own, **options) as engine:
        yield engine


def num_stored(folder: Path) -> int:
    """Blocks in the folder."""
    return sum(len(pack.header.keys) for pack in survey(folder) if pack.header is not None)


@pytest.mark.parametrize(
    ("layout", "blocks_a_page", "options"),
    [("page_first_direct", 2, {}), ("layer_first", 2, {"tp_size": 2})],
    ids=["pages as they lie", "pages put together, two ranks"],
)
def test_what_was_stored_is_found_after_a_restart(
    models: Path,
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    blocks_a_page: int,
    options: dict[str, Any],
) -> None:
    """With the tokens of an engine without us. Another salt finds nothing, nor does anybody after a clear."""
    write_plugin(tmp_path / "plugin")
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))
    if "tp_size" in options:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    folder = tmp_path / "kv"
    with storing(models, folder, layout, **options) as engine:
        asked = prompts(engine, 3, seed="restart", length=PROMPT)
        answers = expected(asked, 8)
        assert [answer.token_ids for answer in engine.generate(asked)] == answers
        salted = engine.generate(asked[:1], salt="mine")
        assert [answer.token_ids for answer in salted] == answers[:1]
        assert salted[0].num_hit == 0
        until(lambda: num_stored(folder) >= 4 * blocks_a_page * HIT // PAGE_SIZE)
    with storing(models, folder, layout, **options) as engine:
        for salt, num_hit in (("", HIT), ("other", 0), ("mine", HIT)):
            (said,) = engine.generate(asked[:1], salt=salt)
            assert said.token_ids == answers[0]
            assert said.num_hit == num_hit
        said = engine.generate(asked)
        assert [answer.token_ids for answer in said] == answers
        assert [answer.num_hit for answer in said] == [HIT] * 3
        evict(engine, 0)
        assert [answer.token_ids for answer in engine.generate(asked)] == answers
        clear(engine)
        (one,) = engine.generate(asked[:1])
        assert (one.token_ids, one.num_hit) == (answers[0], 0)


def clear(engine: SglangEngine) -> None:
    """Forget what is on the device, on the host, and in storage."""
    manager, loop = engine.engine.tokenizer_manager, engine.engine.loop
    assert loop.run_until_complete(manager.flush_cache(timeout_s=30.0)).success
    assert loop.run_until_complete(manager.clear_hicache_storage()).success
