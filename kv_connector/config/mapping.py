"""Settings from a parsed JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

from ..errors import ConfigError
from ..values import shortened, shown


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


_S = TypeVar("_S", bound=_Dataclass)


def from_mapping(kind: type[_S], settings: Mapping[str, Any], prefix: str = "", word: str = "setting") -> _S:
    """An instance of this dataclass. Raises ConfigError for a key that it does not have, naming the nearest one, with
    `prefix` in front of it; `word` is what the message calls a key."""
    known = [field.name for field in fields(kind)]
    for key in settings:
        if key not in known:
            near = _suggest(key, known)
            given = shown(prefix + key if isinstance(key, str) else key)
            raise ConfigError(f"unknown {word} {given}{near}: known {word}s are {', '.join(known)}")
    return kind(**settings)


def object_of(kind: type[_S], value: object, name: str, example: str) -> _S | None:
    """A setting that is an object itself: made from a parsed JSON object, or as it is, or None. Raises ConfigError,
    with the example, for anything else."""
    if isinstance(value, Mapping):
        return from_mapping(kind, value, f"{name}.")
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={shown(value)} is not an object: give one such as {example}")
    return value


def _suggest(key: object, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(shortened(key).lower() if isinstance(key, str) else "", known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
