"""Settings of the endpoint through which an operator steers a running engine."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..values import check_text, open_at_once, path_of, shortened, shown
from .peer import MOST_PORT
from .secrets import LEAST_CHARACTERS, is_variable, secret_of

ADMIN_TOKEN = "KV_CONNECTOR_ADMIN_TOKEN"
"""The variable that the token is in, unless a setting names another, or a file."""
_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):(?P<port>[0-9]{1,5})", re.ASCII)
_MOST_SOCKET_BYTES = 107
"""Of a path: what the kernel has room for."""
_MOST_TOKEN_BYTES = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """The endpoint through which an operator sees and steers a running engine; there is none unless it is given.

    bind: loopback address and port to listen at, such as `127.0.0.1:7200`; data-parallel engine i listens at this port
        plus i. It speaks plain HTTP, so no other address is taken.
    socket: path of a Unix socket to listen at instead, with mode 0600; that of data-parallel engine i > 0 has `.i`
        behind it.
    token_env: the environment variable with the token that callers have to send, at least 16 characters.
    token_file: a file with the token instead, which nobody but its owner may read (mode 0600).
    """

    bind: str = ""
    socket: str = ""
    token_env: str = field(default=ADMIN_TOKEN, repr=False)  # who mistakes it for the token shows it to nobody
    token_file: str = ""

    def __post_init__(self) -> None:
        for name in ("bind", "socket", "token_file"):
            check_text(f"admin.{name}", getattr(self, name))
        if not isinstance(self.token_env, str):
            raise ConfigError("admin.token_env is not text: give it in quotes")
        if not is_variable(self.token_env):
            raise ConfigError(f"admin.token_env names no environment variable: give one such as {ADMIN_TOKEN!r}")
        if bool(self.bind) == bool(self.socket):
            raise ConfigError(
                f"admin.bind={shown(self.bind)} and admin.socket={shown(self.socket)}: give one of them, such as "
                '{"bind": "127.0.0.1:7200"} or {"socket": "/run/kv/admin.sock"}'
            )
        if self.token_file and self.token_env != ADMIN_TOKEN:
            raise ConfigError("admin.token_env and admin.token_file: give one of them")
        if self.bind:
            self.address(0)
        else:
            self.path(0)

    def address(self, replica: int) -> tuple[str, int]:
        """Where data-parallel engine `replica` listens, with `bind`. Raises ConfigError."""
        match = _HOST_AND_PORT.fullmatch(self.bind)
        if match is None:
            raise ConfigError(f'admin.bind={shown(self.bind)}: give an address and a port, such as "127.0.0.1:7200"')
        host = "127.0.0.1" if match["host"] == "localhost" else match["host"].strip("[]")
        if not _is_loopback(host):
            raise ConfigError(
                f"admin.bind={shown(self.bind)} can be reached from other machines, and is neither encrypted nor meant "
                'to be: give a loopback address such as "127.0.0.1:7200", or admin.socket; from elsewhere, forward it '
                "with ssh -L"
            )
        port = int(match["port"])
        most = MOST_PORT - replica
        if not 1 <= port <= most:
            raise ConfigError(
                f"admin.bind={shown(self.bind)}: data-parallel engine {replica} would listen at port {port + replica}; "
                f"give a port from 1 to {most}"
            )
        return host, port + replica

    def path(self, replica: int) -> Path:
        """Where the socket of data-parallel engine `replica` lies, with `socket`. Raises ConfigError."""
        path = f"{self.socket}.{replica}" if replica else self.socket
        num_bytes = len(os.fsencode(path))
        if not os.path.isabs(path) or num_bytes > _MOST_SOCKET_BYTES:
            raise ConfigError(
                f"admin.socket={shown(path)} has {num_bytes} bytes: give an absolute path of at most "
                f"{_MOST_SOCKET_BYTES}"
            )
        return Path(path)

    def token(self) -> bytes:
        """The token, read now: it is kept nowhere. Raises ConfigError, without a word of it, for one that is bad."""
        return read_token(self.token_env, self.token_file, "admin.token_env", "admin.token_file")


def read_token(variable: str, file: str, variable_setting: str, file_setting: str) -> bytes:
    """From the file if there is one, else from the environment variable; the settings are what errors call them by.
    Raises ConfigError, without a word of the token, for one that is bad."""
    if file:
        return _checked(_file_token(file, file_setting), file_setting)
    secret = secret_of(variable_setting, variable, ADMIN_TOKEN, "the engine and who steers it")
    return _checked(secret.strip(), variable_setting)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may be any address tomorrow


def _file_token(file: str, setting: str) -> bytes:
    """What the file holds, without blanks at its ends."""
    try:
        with open(path_of(setting, file), "rb", opener=open_at_once) as opened:
            os.set_blocking(opened.fileno(), True)  # who has opened a pipe to write is waited for
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(_MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        reason = shortened(error.strerror or type(error).__name__)
        raise ConfigError(f"{setting}={shown(file)} cannot be read: {reason}") from error
    if mode & _OTHERS:
        raise ConfigError(f"{setting}={shown(file)} has mode {mode:04o}, others may read it: chmod 0600 it")
    if len(text) < LEAST_CHARACTERS:
        raise ConfigError(
            f"the token in {setting}={shown(file)} has {len(text)} characters: write at least {LEAST_CHARACTERS}"
        )
    return text


def _checked(token: bytes, setting: str) -> bytes:
    """It travels in a header of HTTP."""
    if len(token) > _MOST_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"the token that {setting} names is no word of at most {_MOST_TOKEN_BYTES} printable ASCII characters: "
            "make one with openssl rand -hex 32"
        )
    return token
