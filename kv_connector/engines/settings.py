"""Settings of engines that look a request up once, and load a hit in the step that needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import Config, HostFormName, LoadChoice, Prefetch, WritePolicy
from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """An engine's connector interface, and why some settings do not work with it; each reason ends with the fix.

    unit: what the engine calls blocks. example: how `host_memory` is given. prefetches: those for which requests may
    wait, or that keep none of them waiting.
    """

    engine: str
    unit: str
    example: str
    why_no_peer: str
    why_no_async: str
    prefetches: Collection[Prefetch]
    why_no_wait: str


def read_config(given: Mapping[str, Any], slot: Slot) -> Config:
    """The settings: loads are synchronous, and requests do not wait for storage by default. Raises ConfigError, naming
    the fix, for settings that are unknown or that the interface does not allow."""
    if given.get("peer") is not None:
        raise ConfigError(f"peer: {slot.why_no_peer}")
    if given.get("admin") is not None:
        raise ConfigError(f"admin: {slot.engine} is not steered through an endpoint yet: leave it out")
    config = Config.from_mapping(given)
    if not config.host_memory:
        raise ConfigError(f"host_memory=0: there is nothing to cache in; {slot.example}")
    if config.load_choice is LoadChoice.ASYNC:
        raise ConfigError(f"load_choice='async': {slot.why_no_async}")
    if config.write_policy is WritePolicy.WRITE_BACK:
        raise ConfigError(
            f"write_policy='write_back': {slot.engine} does not say which {slot.unit} it will reuse: give 'adaptive', "
            "'write_through' or 'write_through_selective'"
        )
    if config.record_trace:
        raise ConfigError(f"record_trace: requests of {slot.engine} are not recorded, those of vLLM are: leave it out")
    return replace(_with_prefetch(config, given, slot), load_choice=LoadChoice.SYNC)


def needs_identity(config: Config) -> bool:
    """Whether the cache needs an identity: for storage, or for `host_form="auto"`, which remembers its choice."""
    return config.storage is not None or config.host_form is HostFormName.AUTO


def _with_prefetch(config: Config, given: Mapping[str, Any], slot: Slot) -> Config:
    if config.storage is None:
        return config
    storage = given["storage"]
    if not isinstance(storage, Mapping) or "prefetch" not in storage:
        return replace(config, storage=replace(config.storage, prefetch=Prefetch.BEST_EFFORT))
    if config.storage.prefetch not in slot.prefetches:
        raise ConfigError(f"storage.prefetch={config.storage.prefetch.value!r}: {slot.why_no_wait}")
    return config
