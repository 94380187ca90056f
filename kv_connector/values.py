"""What a setting's value may be (layer 0): each check raises ConfigError with the value, the limit and the fix."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import unicodedata
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

from .errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("i", 1024), ("", 1024))
}
_E = TypeVar("_E", bound=Enum)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_MOST_INTEGER = 1 << 62
"""Of any setting: what is over it is no number of bytes, and cannot be turned into seconds."""
_LONGEST_SHOWN = 200
_LONGEST_SIZE = 1000
"""Characters of a size; Python itself refuses to read numbers of more than 4,300 digits."""


def parse_size(value: object, key: str = "size") -> int:
    """Bytes from an int or from text such as `"16GiB"`, `"512 MB"` or `"1.5g"` (a bare letter is binary, and so is
    `Gi`, as Kubernetes writes it).

    Raises ConfigError naming `key` where the text is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= _LONGEST_SIZE else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or (unit == 1 and "." in match[1]):
        raise ConfigError(
            f"{key}={shown(value)} is not a size: give bytes as an integer, or a number with a unit up to TiB in text "
            'such as "16GiB" or "512MB"'
        )
    return int(Fraction(match[1]) * unit)


def choice(kind: type[_E], value: object, key: str) -> _E:
    """The member with this value."""
    for member in kind:  # `kind(value)` would write the value into an error of its own, however deep it is
        if member.value == value:
            return member
    choices = ", ".join(repr(member.value) for member in kind)
    raise ConfigError(f"{key}={shown(value)} is unknown: give one of {choices}")


def check_integer(key: str, value: object, least: int, most: int = _MOST_INTEGER) -> None:
    """An integer within limits, both included."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{key}={shown(value)} is not an integer: give at least {least}")
    if value < least:
        raise ConfigError(f"{key}={shown(value)} is too small: give at least {least}")
    if value > most:
        raise ConfigError(f"{key}={shown(value)} is too large: give at most {most}")


def check_share(key: str, value: object) -> None:
    """A number from 0 to 1, both included."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{key}={shown(value)} is not a share: give a number from 0 to 1")


def check_text(key: str, value: object) -> None:
    """Text of one line that the operating system takes for a name: no control characters, no halves of a character."""
    if not isinstance(value, str):
        raise ConfigError(f"{key}={shown(value)} is not text: give it in quotes")
    if not is_one_line(value):
        raise ConfigError(f"{key}={shown(value)} has a control character, or half of one: leave it out")


def path_of(key: str, text: str) -> Path:
    """The path that a setting names; `~` in front is the user's home, `~name` another's. Raises ConfigError where it is
    nobody's."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{key}={shown(text)} begins with the home of nobody here: give an absolute path") from None


def open_at_once(path: str, flags: int) -> int:
    """An `opener` for a file that a setting names: of a pipe that nobody writes `open` alone would wait."""
    return os.open(path, flags | os.O_NONBLOCK)


def is_one_line(text: str) -> bool:
    """Whether it has no control character and no half of one."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def check_host(key: str, value: object) -> str:
    """A machine's name or address as the operating system takes it: an IPv6 address may be given in brackets, as in an
    URL, and is returned without them."""
    check_text(key, value)
    host = str(value)
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    has_more = any(character.isspace() or character in "[]/" for character in host)
    if has_more or (":" in host and not _is_ipv6(host)):
        raise ConfigError(
            f"{key}={shown(value)} is no host: give a name or an address, without scheme, port, blanks and brackets"
        )
    return host


def is_any_address(host: str) -> bool:
    """Whether it stands for every address of a machine, or for none: in full, or as short as "0"."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        pass
    try:
        return socket.inet_aton(host) == bytes(4)
    except (OSError, ValueError):
        return False


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def shown(value: object) -> str:
    """A value in a message, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return "lists or objects thousands of levels deep"
    return shortened(text)


def shortened(text: str) -> str:
    """Text in a message, however long it is."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
