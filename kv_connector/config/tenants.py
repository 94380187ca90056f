"""Settings of tenants, who share the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..values import check_integer, check_text, parse_size, shown
from .mapping import from_mapping

DEFAULT_TENANT = "default"
_MOST_TENANTS = 32
_MOST_WEIGHT = 1000
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What one tenant may hold of the host's memory.

    weight: its share of the host is its weight over the sum of all tenants' weights: no other tenant's requests push it
        below. It may hold what others leave unused as well, until they need it.
    quota: the most bytes, over all ranks, that it may hold, also where there is room; 0 sets no limit.
    """

    weight: int = 1
    quota: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "quota", parse_size(self.quota, "tenants.NAME.quota"))
        check_integer("tenants.NAME.weight", self.weight, 1, _MOST_WEIGHT)
        check_integer("tenants.NAME.quota", self.quota, 0)


def tenants_of(given: object) -> Mapping[str, TenantConfig]:
    """Tenants by name, from a parsed JSON object. Raises ConfigError."""
    if given is None:  # as of the other settings that are objects
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'tenants={shown(given)} is not an object: give one such as {{"team-a": {{"weight": 3}}}}')
    if len(given) > _MOST_TENANTS:
        raise ConfigError(f"tenants has {len(given)} entries: give at most {_MOST_TENANTS}; all others are the default")
    tenants = {}
    for name, settings in given.items():
        check_text("the name of a tenant", name)
        if not 0 < len(name) <= LONGEST_NAME:
            raise ConfigError(f"tenants.{shown(name)} has a name of {len(name)} characters: give 1 to {LONGEST_NAME}")
        if not isinstance(settings, Mapping | TenantConfig):
            raise ConfigError(f'tenants.{name}={shown(settings)} is not an object: give one such as {{"weight": 3}}')
        tenants[name] = settings if isinstance(settings, TenantConfig) else _tenant_of(name, settings)
    return tenants


def _tenant_of(name: str, settings: Mapping[str, Any]) -> TenantConfig:
    """One tenant. Raises ConfigError, which names it."""
    try:
        return from_mapping(TenantConfig, settings, f"tenants.{name}.")
    except ConfigError as error:
        raise ConfigError(str(error).replace("tenants.NAME.", f"tenants.{name}.", 1)) from error
