"""Secrets, which come from an environment variable that a setting names. Neither a secret nor what may be one is shown:
who mistakes the setting for its value has given the secret."""

from __future__ import annotations

import os

from ..errors import ConfigError
from ..values import is_one_line, shortened

LEAST_CHARACTERS = 16
STORAGE_SECRET = "KV_CONNECTOR_STORAGE_SECRET"
"""What messages and the command line call the variable of storage by; no setting has it for a default."""


def secret_of(setting: str, variable: object, example: str, whose: str) -> bytes:
    """What the variable holds, for the setting that names it. `example` is a variable that might be named, and `whose`
    says in an error who needs the same. Raises ConfigError."""
    if not isinstance(variable, str):
        raise ConfigError(f"{setting} is not text: give it in quotes")
    if not is_variable(variable):
        raise ConfigError(f"{setting} names no environment variable: give one such as {example!r}")
    secret = os.environ.get(variable)
    if secret is None:
        unset = shortened(variable) if variable == example else f"the environment variable that {setting} names"
        raise ConfigError(
            f"{unset} is not set in this process: set it to at least {LEAST_CHARACTERS} characters, the same "
            f"for {whose}"
        )
    name = shortened(variable)
    if not is_encodable(secret):
        raise ConfigError(f"the secret in {name} is not UTF-8: give it as text of that encoding")
    num_characters = len(secret.strip())
    if num_characters < LEAST_CHARACTERS:
        raise ConfigError(
            f"the secret in {name} has {num_characters} characters: set it to at least {LEAST_CHARACTERS}, the same "
            f"for {whose}; blanks at its ends do not count"
        )
    return secret.encode()


def shown_variable(setting: str, variable: str, example: str) -> str:
    """What a message calls the variable: its name where there is one, for what else was given may be the secret."""
    is_name = variable == example or (is_one_line(variable) and variable in os.environ)
    return shortened(variable) if is_name else f"the variable that {setting} names, which is not there,"


def is_variable(name: str) -> bool:
    """Whether the environment could have a variable of this name."""
    return bool(name) and "=" not in name and is_one_line(name)


def is_encodable(text: str) -> bool:
    """Whether it has no half of a character, as what is not UTF-8 has in Python."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
