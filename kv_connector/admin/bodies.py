"""Request bodies of the endpoint: each is checked field by field before the engine is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..config.mapping import from_mapping
from ..errors import ConfigError
from ..types import BlockHash
from ..values import is_one_line, parse_size, shown
from .base import Owner, Prefix, Prefixes

_B = TypeVar("_B", "PrefixBody", "PinBody", "ResizeBody", "WaitBody", "NoBody")
_MOST_TOKEN_ID = 1 << 31
_MOST_TEXT = 1 << 18
"""Characters: the engine's tokenizer reads them in a fraction of a second."""
_MOST_SALT = 4096
_MOST_SECONDS = 1e9
MOST_WAIT_SECONDS = 60.0


def read(kind: type[_B], body: object) -> _B:
    """The body as this kind. Raises ConfigError for what is none."""
    if not isinstance(body, Mapping):
        raise ConfigError(f'the body {shown(body)} is no object: send one such as {{"token_ids": [1, 2, 3]}}')
    return from_mapping(kind, body, word="field")


@dataclass(frozen=True, slots=True)
class NoBody:
    """Of calls that take none."""


@dataclass(frozen=True, slots=True)
class PrefixBody:
    """A prefix, by its tokens, as the text of a prompt, or by the hashes of its blocks in hexadecimal digits.
    `cache_salt`: of the requests whose prefix it is. `tenant`: whose it is; the salt says so where it is left out."""

    token_ids: Any = None
    text: Any = None
    hashes: Any = None
    cache_salt: str = ""
    tenant: Any = None

    def prefix(self, prefixes: Prefixes) -> Prefix:
        """Its full blocks, one at least. Raises ConfigError and Refusal."""
        given = [name for name in ("token_ids", "text", "hashes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"{' and '.join(given) or 'no prefix'} given: give one of token_ids, text and hashes")
        is_text = isinstance(self.cache_salt, str) and is_one_line(self.cache_salt)
        if not is_text or len(self.cache_salt) > _MOST_SALT:
            raise ConfigError(f"cache_salt={shown(self.cache_salt)} is no line of at most {_MOST_SALT} characters")
        if self.hashes is not None:
            if self.cache_salt:
                raise ConfigError("cache_salt beside hashes: leave it out, the hashes have it in them")
            return Prefix(_hashes(self.hashes), are_given=True)
        token_ids = _token_ids(self.token_ids) if self.text is None else prefixes.token_ids(_text(self.text))
        found = tuple(prefixes.hashes(token_ids, self.cache_salt))
        if not found:
            raise ConfigError(f"a prefix of {len(token_ids)} tokens fills no block: give at least one block of tokens")
        return Prefix(found, are_given=False)

    def owner(self) -> Owner:
        """Whose it is. Raises ConfigError."""
        if self.tenant is not None and not isinstance(self.tenant, str):
            raise ConfigError(f"tenant={shown(self.tenant)} is not text: give a name in quotes")
        return Owner(self.tenant, self.cache_salt)


@dataclass(frozen=True, slots=True)
class PinBody(PrefixBody):
    """A prefix to keep, for so many seconds if `ttl_s` is given."""

    ttl_s: Any = None

    def seconds(self) -> float | None:
        """How long it is kept; None until it is unpinned. Raises ConfigError."""
        return None if self.ttl_s is None else _seconds("ttl_s", self.ttl_s, _MOST_SECONDS)


@dataclass(frozen=True, slots=True)
class ResizeBody:
    """The host memory to use from now on; null for all that the engine was started with."""

    host_memory: Any = ""

    def num_bytes(self) -> int | None:
        """Raises ConfigError."""
        if self.host_memory is None:
            return None
        num_bytes = parse_size(self.host_memory, "host_memory")
        if num_bytes < 0:
            raise ConfigError(f"host_memory={shown(self.host_memory)} is too small: give 0 or more")
        return num_bytes


@dataclass(frozen=True, slots=True)
class WaitBody:
    """How many seconds to wait for the end of what is asked for; then the answer says how far it is."""

    wait_s: Any = 30.0

    def seconds(self) -> float:
        """Raises ConfigError."""
        is_zero = self.wait_s == 0 and self.wait_s is not False
        return 0.0 if is_zero else _seconds("wait_s", self.wait_s, MOST_WAIT_SECONDS)


def _seconds(name: str, value: object, most: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:  # type: ignore[operator]  # NaN is in no range
        raise ConfigError(f"{name}={shown(value)}: give a number of seconds over 0 and of at most {most:g}")
    return float(value)  # type: ignore[arg-type]


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ConfigError(f"token_ids={shown(value)} is no list: give numbers such as [1, 2, 3]")
    for token_id in value:
        if type(token_id) is not int or not 0 <= token_id < _MOST_TOKEN_ID:
            raise ConfigError(f"token_ids has {shown(token_id)}: give integers of 0 and more")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ConfigError(f"text={shown(value)}: give text of at most {_MOST_TEXT} characters, or send token_ids")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError("text has halves of characters (surrogates), which no tokenizer reads: leave them out")
    return value


def _hashes(value: object) -> tuple[BlockHash, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"hashes={shown(value)}: give a list of hexadecimal digits, one hash at least")
    try:
        found = tuple(BlockHash(bytes.fromhex(digits)) for digits in value)
    except (TypeError, ValueError):
        raise ConfigError("hashes has what is no hash: give each as hexadecimal digits") from None
    lengths = {len(block_hash) for block_hash in found}
    if len(lengths) > 1 or not lengths <= set(range(1, 65)):
        raise ConfigError(f"hashes have {sorted(lengths)} bytes: give those of one engine, which are equally long")
    return found
