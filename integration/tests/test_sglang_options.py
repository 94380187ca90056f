"""The linker under other launch lines of SGLang, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration.tests.sglang_engines import SglangEngine, running
from kv_connector.engines.sglang import TieredKVLinker
from kv_connector.engines.sglang.launch import read_settings, refuse_groups
from kv_connector.errors import ConfigError
from kv_connector.storage.objects import groups
from kv_connector.storage.objects.groups import Groups
from kv_connector.storage.s3 import backend as s3
from kv_connector.testing import engine_contract
from kv_connector.testing.engine_contract import Expected, loadable, prompts


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"page_size": 1, "disable_overlap_schedule": True}, {"write_policy": "adaptive"}),
        (
            {"page_size": 64, "chunked_prefill_size": 128, "max_total_tokens": 2048, "sleep_on_idle": True},
            {"keep_on_flush": True},
        ),
        ({"tp_size": 2, "sleep_on_idle": True}, {}),
    ],
    ids=["page of one token, no overlap", "page of 64, in chunks", "two ranks"],
)
def test_other_launch_lines(
    models: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    if "tp_size" in options:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    with running(models, settings, **options) as engine:
        engine_contract.what_the_device_has_lost_is_loaded(engine, expected)
        engine_contract.a_chat_goes_on_behind_what_was_generated(engine, expected)
        engine_contract.requests_are_given_up_at_any_moment(engine, expected)
        engine_contract.a_load_that_fails_gives_no_wrong_token(engine, expected)
        check_flush(engine, expected, is_kept=bool(settings.get("keep_on_flush")))


def check_flush(engine: SglangEngine, expected: Expected, is_kept: bool) -> None:
    """A flush forgets what we have, or leaves it alone where the user has said so."""
    (prompt,) = prompts(engine, 1, seed="flush")
    answers = expected([prompt], 8)
    for num_loaded in (0, loadable(engine, prompt) if is_kept else 0):
        (said,) = engine.generate([prompt])
        assert [said.token_ids] == answers
        assert said.num_loaded == num_loaded
        engine.reset()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, 'give linker_extra_config .* a size such as {"host_memory": "64GiB"}'),
        ({"host_memori": "1GiB"}, "unknown setting .*host_memory"),
        ({"host_memory": "1GiB", "keep_on_flush": "yes"}, "keep_on_flush='yes' is not a boolean"),
        ({"host_memory": "1GiB", "write_policy": "write_back"}, "give 'adaptive'"),
        ({"host_memory": "1GiB", "load_choice": "async"}, "^load_choice=.* leave it out$"),
        ({"host_memory": "1GiB", "peer": {"role": "both"}}, "^peer: .* leave it out$"),
        (
            {"host_memory": "1GiB", "storage": {"path": "/kv", "capacity": "1GiB", "prefetch": "wait_complete"}},
            "give 'best_effort', or 'timeout' with a short timeout_ms",
        ),
    ],
)
def test_what_is_refused_is_said_with_its_fix(settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(settings)
    assert re.search(message, str(refused.value)), str(refused.value)


def test_nobody_waits_for_storage_who_was_not_told_to() -> None:
    """All requests of SGLang would wait."""
    storage = {"path": "/kv", "capacity": "1GiB"}
    given = read_settings({"host_memory": "1GiB", "storage": storage}).config.storage
    assert given is not None
    assert given.prefetch == "best_effort"
    given = read_settings({"host_memory": "1GiB", "storage": storage | {"prefetch": "timeout"}}).config.storage
    assert given is not None
    assert given.prefetch == "timeout"


@pytest.mark.parametrize("group_bytes", [groups.GROUP_BYTES, s3.GROUP_BYTES], ids=["mooncake", "s3"])
def test_pages_that_are_as_large_as_is_asked_for_are_stored(group_bytes: int) -> None:
    """Objects of S3 are larger than those of Mooncake, so what suffices for one is too little for the other."""
    page_bytes = 128 << 10
    with pytest.raises(ConfigError, match="give a --page-size") as refused:
        refuse_groups(Groups(b"", page_bytes, group_bytes).blocks_per_group)
    told = re.search(r"--page-size (\d+) times as large", str(refused.value))
    assert told is not None
    refuse_groups(Groups(b"", page_bytes * int(told[1]), group_bytes).blocks_per_group)


def test_models_that_are_not_served_are_refused_before_memory_is_taken() -> None:
    """Also a pipeline, whose stages do not agree on what is loaded."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    params: Any = SimpleNamespace(pp_size=2, attn_cp_size=1)
    settings = {"host_memory": "1GiB"}
    with pytest.raises(ConfigError, match="--pp-size 1"):
        TieredKVLinker(None, params, components={ComponentType.FULL}, extra_config=settings)  # type: ignore[arg-type]
    components = {ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA}
    with pytest.raises(ConfigError, match="MAMBA, SWA layers"):
        TieredKVLinker(None, params, components=components, extra_config=settings)  # type: ignore[arg-type]
