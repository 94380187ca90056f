"""A client of the endpoint, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..values import shortened, shown
from .base import Answer, Refusal

_SECONDS = 90.0
"""Longer than the endpoint takes at most."""


class AdminClient:
    """Of the endpoint at `url`, such as `http://127.0.0.1:7200`, or at a Unix socket. Raises ConfigError for an address
    that is none."""

    def __init__(self, url: str, path: str, token: bytes) -> None:
        if bool(url) == bool(path):
            raise ConfigError("no single endpoint: give one of --url and --socket")
        self._path = path
        self._token = token
        self.where = f"unix:{path}" if path else url
        self._host, self._port = ("", 0) if path else _host_and_port(url)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """What the endpoint answers. Raises Refusal where that is an error, ConfigError for what is no endpoint, and
        OSError where it cannot be reached."""
        connection = self._connection()
        headers: dict[str, Any] = {"Authorization": b"Bearer " + self._token, "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except http.client.HTTPException as error:
            raise ConfigError(f"{self.where} does not answer as an admin endpoint: {shown(error)}") from error
        except OSError as error:
            raise OSError(f"{self.where} cannot be reached: {error.strerror or error}") from error
        finally:
            connection.close()
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ConfigError(f"{self.where} does not answer as an admin endpoint: {shown(text)}")
        if status >= 400:
            raise Refusal(status, shortened(str(answer.get("error", answer))))
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        if not self._path:
            return http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        return _UnixConnection(self._path)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or parts.scheme != "http" or parts.path not in ("", "/"):
        raise ConfigError(f'--url {shown(url)}: give a scheme, an address and a port, such as "http://127.0.0.1:7200"')
    return host, port
