"""What SGLang's command line means for the halves; refuses at start-up what is not supported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_disagg, get_spec

from ...config import Config, Prefetch
from ...errors import ConfigError
from ..settings import Slot, read_config

_SLOT = Slot(
    engine="SGLang",
    unit="pages",
    example="give linker_extra_config in --unified-cache-external-linker-config a size such as "
    '{"host_memory": "64GiB"} (all ranks together)',
    why_no_peer="blocks of other engines are not asked for in SGLang: leave it out",
    why_no_async="SGLang loads what it has asked for in front of the step that needs it: leave it out",
    prefetches=(Prefetch.BEST_EFFORT, Prefetch.TIMEOUT),
    why_no_wait="all requests of SGLang would stand still for as long as storage does: give 'best_effort', or "
    "'timeout' with a short timeout_ms",
)
"""SGLang asks once and has no way to wait, so whoever waits holds up everybody."""


@dataclass(frozen=True, slots=True)
class LinkerSettings:
    """What a user gives in `linker_extra_config`: our `Config`, and what this slot alone has.

    keep_on_flush: what is cached on the host and in storage outlives /flush_cache. SGLang flushes after every update of
    weights, too, and does not say which: only for engines whose weights never change.
    """

    config: Config
    keep_on_flush: bool = False


def read_settings(extra_config: Mapping[str, Any]) -> LinkerSettings:
    """Raises ConfigError, naming the fix, for what is unknown or what this slot has no use for."""
    given = dict(extra_config)
    keep_on_flush = given.pop("keep_on_flush", False)
    if not isinstance(keep_on_flush, bool):
        raise ConfigError(f"keep_on_flush={keep_on_flush!r} is not a boolean: give true or false")
    return LinkerSettings(read_config(given, _SLOT), keep_on_flush)


def refuse_unsupported(params: Any, components: Collection[ComponentType]) -> None:
    """Raises ConfigError, naming the reason and what would help. `params`: SGLang's CacheInitParams."""
    others = sorted(component.name for component in components if component is not ComponentType.FULL)
    if others:
        raise ConfigError(
            f"models with {', '.join(others)} layers are not supported yet, only full attention is: start without "
            "--enable-unified-cache-external-linker"
        )
    if params.pp_size > 1:
        raise ConfigError(
            f"--pp-size {params.pp_size}: stages of a pipeline do not agree on what SGLang loads from outside: "
            "give --pp-size 1 and a larger --tp-size"
        )
    if params.attn_cp_size > 1:
        raise ConfigError(f"--attn-cp-size {params.attn_cp_size} is not supported yet: give 1")
    refuse_drafts()
    if get_disagg().disaggregation_mode != "null":
        mode = get_disagg().disaggregation_mode
        raise ConfigError(f"--disaggregation-mode {mode} is not supported yet: leave it out")


def refuse_groups(group_blocks: int) -> None:
    """Raise ConfigError where storage keeps so many blocks as one, not each by itself."""
    if group_blocks > 1:
        raise ConfigError(
            f"storage would keep {group_blocks} pages as one object here, and SGLang does not say where in its prefix "
            f"a page is: give a --page-size {group_blocks} times as large, or a folder (storage.path)"
        )


def refuse_drafts() -> None:
    """Raises ConfigError for a command line with a draft model, whose cache is in a pool of its own."""
    if get_spec().speculative_algorithm is not None:
        raise ConfigError(
            f"--speculative-algorithm {get_spec().speculative_algorithm}: the cache of a draft model is not kept yet: "
            "leave it out"
        )
