"""What a client may ask, and what each engine is told of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse

from .engines import Engine

HINTS = "cache"
"""The key of `kv_transfer_params` that is a client's: all others name engines, and only the proxy may do that."""
_ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_BETWEEN_TWO_HOPS = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
_OURS_TO_SAY = {"host", "content-length", "content-type", "content-encoding", "expect"}
_SERVERS_OWN = {"date", "server"}


class Refused(Exception):
    """A request that no engine gets to see; the client is told the status and the text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def read_body(request: Request, most: int) -> bytes:
    """All of it, by its length or in chunks; Refused beyond `most` bytes."""
    stated = request.headers.get("content-length", "0")
    if int(stated) > most:  # the server has refused what is no number
        raise Refused(413, f"a body of {stated} bytes: give {most} at most")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise Refused(413, f"a body of more than {most} bytes: give fewer")
    return bytes(body)


class Completion:
    """One request of a client for a completion. Refused where its body is none."""

    def __init__(self, headers: Headers, body: bytes) -> None:
        try:
            self._body = json.loads(body, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(self._body, dict):
            raise Refused(400, f"the body is a JSON {type(self._body).__name__}: give an object")
        params = self._body.pop("kv_transfer_params", None) or {}
        if not isinstance(params, dict):
            raise Refused(400, f"kv_transfer_params is a JSON {type(params).__name__}: give an object")
        self._params = {HINTS: params[HINTS]} if HINTS in params else {}
        left_out = {name.encode() for name in _OURS_TO_SAY} | _of_a_hop(headers.raw)
        self.headers = {name: value for name, value in stripped(headers) if name not in left_out}
        self.headers.setdefault(b"x-request-id", uuid.uuid4().hex.encode())
        self.headers[b"content-type"] = b"application/json"

    def for_prefill(self, transfer_id: str | None = None) -> bytes:
        """One token, and that another engine continues; under an id of ours where both engines are asked at once."""
        short = {name: value for name, value in self._body.items() if name not in ("stream_options", "min_tokens")}
        short |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        ask = _ASK_PREFILL | ({"transfer_id": transfer_id} if transfer_id else {})
        return _encoded(short | {"kv_transfer_params": self._params | ask})

    def for_decode(self, told: dict[str, Any] | None) -> bytes:
        """The whole request, with what the prefill engine has told of its prompt's blocks."""
        params = self._params | (told or {})
        return _encoded(self._body | ({"kv_transfer_params": params} if params else {}))


def told_beforehand(prefill: Engine, transfer_id: str) -> dict[str, Any]:
    """What a decode engine is told that is asked at the same time as this engine, which has a `peer`."""
    assert prefill.peer is not None, f"{prefill.url} is not known to listen for peers"
    host, port = prefill.peer
    told = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id}
    return told | {"remote_host": host, "remote_port": port}


def stripped(headers: Headers) -> list[tuple[bytes, bytes]]:
    """A client's headers, as bytes: clients send what is no ASCII. Blanks around a value are no part of it: a server
    may leave them there, and httpx sends no such value."""
    return [(name, value.strip(b" \t")) for name, value in headers.raw]


def passed_on(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An engine's headers as the client gets them."""
    left_out = {name.encode() for name in _SERVERS_OWN} | _of_a_hop(headers)
    return [(name.lower(), value) for name, value in headers if name.lower() not in left_out]


def _of_a_hop(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Names, in small letters, of headers that are between two hops, and of those that a side says are."""
    said = (value for name, value in headers if name.lower() == b"connection")
    named = {name.strip().lower() for value in said for name in value.split(b",")}
    return named | {name.encode() for name in _BETWEEN_TWO_HOPS}


def _encoded(body: dict[str, Any]) -> bytes:
    """Raises Refused where it can be read and not written, which takes a little more."""
    try:
        return json.dumps(body).encode()
    except RecursionError as error:
        raise Refused(400, "the body is nested too deeply") from error


def refusal(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in OpenAI's form."""
    error = {"message": text, "type": "proxy_error", "code": status}
    return JSONResponse({"error": error}, status, {"connection": "close"} | (headers or {}))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
