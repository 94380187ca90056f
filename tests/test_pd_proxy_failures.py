"""Engines that are dead, die or come back: what is safe is tried again, and no client takes a part for the whole."""

from __future__ import annotations

import http.client
import json
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from integration.pd_proxy.completions import Limits
from integration.servers import free_ports
from tests.http_servers import serving
from tests.pd_engines import PATIENCE, Proxy, Scripted, Silent, proxy_of, served, wait_until

TOLD = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7}
TEXT = b'{"choices": []}'
LENGTH = {"Content-Length": str(len(TEXT))}
CHUNKED = {"Transfer-Encoding": "chunked"}
CHUNK = f"{len(TEXT):x}\r\n".encode() + TEXT + b"\r\n"


def engine_that_sends(headers: dict[str, str], body: bytes) -> AbstractContextManager[str]:
    """Every completion gets these headers and bytes, and then the end of the connection. Its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    return serving(Handler)


def read_all(proxy: Proxy) -> bytes:
    """What a client reads that knows nothing but HTTP; HTTPException where the answer breaks off."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
        return connection.getresponse().read()
    finally:
        connection.close()


def engine_that_closes_what_rests() -> AbstractContextManager[str]:
    """A server that has just come to the end of a connection's time when the next request arrives on it: it closes the
    connection with the request unread. Its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        is_used = False

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(TEXT)

        def _answer(self, body: bytes) -> None:
            self.close_connection = self.is_used
            if not self.is_used:
                self.is_used = True
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    return serving(Handler)


def nobody() -> str:
    """The URL of an engine that is not there."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.parametrize(("headers", "sent"), [(LENGTH, TEXT), (CHUNKED, CHUNK + b"0\r\n\r\n")])
def test_a_whole_answer_is_passed_on(headers: dict[str, str], sent: bytes) -> None:
    with engine_that_sends(headers, sent) as engine, proxy_of([], [engine]) as proxy:
        assert read_all(proxy) == TEXT


@pytest.mark.parametrize(
    ("headers", "sent"),
    [(LENGTH, b""), (LENGTH, TEXT[:7]), (CHUNKED, b""), (CHUNKED, CHUNK), (CHUNKED, CHUNK[:9])],
)
def test_an_answer_that_breaks_off_is_an_error_for_the_client(headers: dict[str, str], sent: bytes) -> None:
    other = Scripted("never asked")
    with engine_that_sends(headers, sent) as engine, proxy_of([], [engine, other]) as proxy:
        with pytest.raises(http.client.HTTPException):
            read_all(proxy)
        assert proxy.metric("pd_proxy_broken_answers_total", by="engine") == 1
        assert proxy.metric("pd_proxy_engine_failures_total", engine=engine, role="decode") == 1
    assert other.asked == [], "an answer that has begun is not begun again"


def test_a_dead_prefill_engine_is_left_out_and_another_one_asked() -> None:
    dead, prefill, decode = nobody(), Scripted(params=TOLD), Scripted("answer")
    with proxy_of([dead, prefill], [decode]) as proxy:
        for _ in range(4):
            assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        assert proxy.metric("pd_proxy_requests_total", outcome="transferred") == 4
        assert proxy.metric("pd_proxy_engine_failures_total", engine=dead, role="prefill") <= 1
        wait_until(lambda: not proxy.is_healthy(dead), "it is out")
        assert proxy.metric("pd_proxy_engine_healthy", engine=dead, role="prefill") == 0
    assert len(prefill.asked) == len(decode.asked) == 4


@pytest.mark.parametrize("sent", [b"", TEXT[:7]], ids=["before its answer", "in its middle"])
def test_a_prefill_engine_that_dies_is_no_loss(sent: bytes) -> None:
    prefill, decode = Scripted(params=TOLD), Scripted("answer")
    with engine_that_sends(LENGTH, sent) as dying, proxy_of([dying, prefill], [decode]) as proxy:
        assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        assert proxy.metric("pd_proxy_retries_total", role="prefill") == 1
        assert proxy.metric("pd_proxy_engine_failures_total", engine=dying, role="prefill") == 1
    assert decode.asked[0]["kv_transfer_params"] == TOLD


def test_a_prefill_engine_with_an_error_of_its_own_is_no_loss() -> None:
    async def fail(_: Request) -> Response:
        return JSONResponse({}, 500)

    failing, prefill, decode = Scripted(), Scripted(params=TOLD), Scripted("answer")
    failing.respond = fail  # type: ignore[method-assign]
    with proxy_of([failing, prefill], [decode]) as proxy:
        assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        assert proxy.metric("pd_proxy_retries_total", role="prefill") == 1
    assert decode.asked[0]["kv_transfer_params"] == TOLD


@pytest.mark.parametrize(
    "answer", [b"[]", b"no json", b'{"kv_transfer_params": 5}', b"{}", b"\xff", b"[" * 100_000], ids=len
)
def test_a_prefill_engine_that_tells_nothing_leaves_the_prompt_to_the_decode_engine(answer: bytes) -> None:
    decode = Scripted("answer")
    headers = {"Content-Length": str(len(answer))}
    with engine_that_sends(headers, answer) as prefill, proxy_of([prefill], [decode]) as proxy:
        assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        assert proxy.metric("pd_proxy_requests_total", outcome="computed_by_decode") == 1
    assert "kv_transfer_params" not in decode.asked[0]


def test_without_a_prefill_engine_the_decode_engine_computes() -> None:
    decode = Scripted("answer")
    with proxy_of([nobody(), nobody()], [decode]) as proxy:
        assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        assert proxy.metric("pd_proxy_requests_total", outcome="computed_by_decode") == 1


def test_an_engine_may_close_connections_that_rest() -> None:
    with engine_that_closes_what_rests() as engine, proxy_of([], [engine]) as proxy:
        for _ in range(3):
            assert read_all(proxy) == TEXT
        assert proxy.metric("pd_proxy_engine_failures_total", engine=engine, role="decode") == 0


def test_a_connection_that_was_late_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says nothing of the engine where it was the proxy that stood still."""
    late, connect_tcp = iter([True]), anyio.connect_tcp

    async def connect(remote_host: str, remote_port: int, **more: Any) -> SocketStream:
        if url.endswith(f":{remote_port}") and next(late, False):
            raise TimeoutError
        return await connect_tcp(remote_host, remote_port, **more)

    with served(Scripted("answer").app) as url, proxy_of([], [url]) as proxy:
        assert proxy.complete().status_code == 200
        monkeypatch.setattr(anyio, "connect_tcp", connect)
        assert proxy.complete().status_code == 200
        assert next(late, None) is None
        assert proxy.metric("pd_proxy_engine_failures_total", engine=url, role="decode") == 0


def test_a_decode_engine_that_does_not_answer_is_replaced() -> None:
    decode = Scripted("answer")
    with proxy_of([], [nobody(), decode]) as proxy:
        assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        assert proxy.metric("pd_proxy_retries_total", role="decode") <= 1


def test_without_a_decode_engine_no_prompt_is_computed() -> None:
    prefill, dead = Scripted(params=TOLD), nobody()
    with proxy_of([prefill], [dead]) as proxy:
        wait_until(lambda: not proxy.is_healthy(dead), "the checks find out")
        refused = proxy.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["message"] == "no decode engine answers: ask again in a few seconds"
        assert proxy.metric("pd_proxy_requests_total", outcome="no_engine") == 1
    assert prefill.asked == []


def test_a_decode_engine_that_may_be_at_work_is_not_doubled() -> None:
    silent, other = Silent(), Scripted()
    with proxy_of([], [silent, other], Limits(), engine_seconds=0.5) as proxy:
        refused = proxy.complete()
        assert refused.status_code == 504
        assert refused.json()["error"]["message"] == "the decode engine did not answer in time (ReadTimeout)"
    assert other.asked == []


def test_an_engine_that_says_that_it_is_ill_gets_nothing_until_it_is_well() -> None:
    ill, other = Scripted("ill"), Scripted("well")
    with served(ill.app) as url, proxy_of([], [url, other], check_seconds=0.05) as proxy:
        ill.health = 503
        wait_until(lambda: not proxy.is_healthy(url), "it is out")
        assert {proxy.complete().json()["choices"][0]["text"] for _ in range(4)} == {"well"}
        ill.health = 200
        wait_until(lambda: proxy.is_healthy(url), "it is back")
        assert {proxy.complete().json()["choices"][0]["text"] for _ in range(4)} == {"ill", "well"}


def test_an_engine_that_is_started_again_is_found() -> None:
    port = free_ports(1)[0]
    with proxy_of([], [f"http://127.0.0.1:{port}"]) as proxy:
        wait_until(lambda: not proxy.is_healthy(f"http://127.0.0.1:{port}"), "it is out")
        with served(Scripted("back").app, port):
            wait_until(lambda: proxy.complete().status_code == 200, "it is found")
