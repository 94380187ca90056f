"""What a proxy tells each engine, what it passes on, and what it refuses: every client gets one clear answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import pytest
from starlette.datastructures import URL, Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from integration.pd_proxy.app import make_app
from integration.pd_proxy.completions import Limits
from integration.pd_proxy.engines import Engine, Turns
from integration.pd_proxy.messages import Completion, Refused, passed_on
from tests.pd_engines import PATIENCE, Proxy, Scripted, Silent, Streaming, proxy_of, served, wait_until

TOLD = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7, "transfer_id": "a"}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
ASKED |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
BODY = {"prompt": "x", "max_tokens": 9, "min_tokens": 2, "stream_options": {"include_usage": True}}


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and text of a refusal in OpenAI's form."""
    error = response.json()["error"]
    assert error["code"] == response.status_code and error["type"] == "proxy_error"
    return response.status_code, error["message"]


def test_a_prompt_is_computed_by_one_engine_and_continued_by_the_other() -> None:
    prefill, decode = Scripted(params=TOLD), Scripted("answer")
    with proxy_of([prefill], [decode]) as proxy:
        headers = {"Authorization": "Bearer key", "X-Request-Id": "r1", "Connection": "keep-alive, x-hop", "X-Hop": "1"}
        answer = proxy.complete(BODY, headers=headers)
        assert answer.json() == {"choices": [{"text": "answer"}], "kv_transfer_params": None}
        assert proxy.metric("pd_proxy_requests_total", outcome="transferred") == 1
        assert proxy.metric("pd_proxy_prefill_seconds_count") == proxy.metric("pd_proxy_request_seconds_count") == 1
        assert httpx.get(f"{proxy.url}/v1/models").json() == {"data": [{"id": "scripted"}]}
    assert prefill.asked == [{"prompt": "x", "max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}]
    assert decode.asked == [BODY | {"kv_transfer_params": TOLD}]
    for heard in (prefill.headers[0], decode.headers[0]):
        assert (heard["authorization"], heard["x-request-id"]) == ("Bearer key", "r1")
        assert "x-hop" not in heard, "it is between the client and the proxy"


def test_headers_of_any_kind_are_passed_on_or_left_out() -> None:
    """Names that are no ASCII, two headers of a hop, and a body that says of itself that it is packed."""
    prefill, decode = Scripted(params=TOLD), Scripted("answer")
    headers = [
        ("X-User", b"caf\xe9"),
        ("Authorization", b"Bearer \xff"),
        ("Connection", b"keep-alive"),
        ("Connection", b"X-Hop"),
        ("X-Hop", b"1"),
        ("Content-Encoding", b"gzip"),
    ]
    with proxy_of([prefill], [decode]) as proxy:
        assert httpx.post(f"{proxy.url}/v1/completions", json=BODY, headers=headers).status_code == 200
        assert httpx.get(f"{proxy.url}/v1/models", headers=headers).status_code == 200
    for heard in (prefill.headers[0], decode.headers[0]):
        assert (heard["x-user"], heard["authorization"]) == ("caf\xe9", "Bearer \xff")
        assert not {"x-hop", "content-encoding"} & heard.keys()


def test_blanks_around_a_header_are_no_fault_of_an_engine() -> None:
    """uvicorn leaves them where httptools is installed, as it is beside vLLM."""
    decode = Scripted("answer")
    with served(decode.app) as url:
        engine = Engine("decode", url)
        app = make_app(Turns([]), Turns([engine]), Limits())
        headers = [("Authorization", b"Bearer key \t"), ("X-User", b" ")]

        async def ask() -> list[int]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
                completed = await client.post("/v1/completions", json=BODY, headers=headers)
                return [completed.status_code, (await client.get("/v1/models", headers=headers)).status_code]

        assert anyio.run(ask) == [200, 200] and engine.is_healthy
    assert (decode.headers[0]["authorization"], decode.headers[0]["x-user"]) == ("Bearer key", "")


def test_what_engines_are_asked_a_client_says_in_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of Starlette make a request's URL of the client's Host as it is: what is behind a slash there
    would be the path, such as that on which an engine goes to sleep."""
    made_of_host = property(lambda request: URL(f"http://{request.headers['host']}{request.scope['path']}"))
    monkeypatch.setattr(Request, "url", made_of_host)
    with proxy_of([], [Scripted("answer")]) as proxy:
        headers = {"Host": "proxy/sleep?"}
        assert proxy.complete(BODY, headers=headers).status_code == 200
        assert httpx.get(f"{proxy.url}/v1/models", headers=headers).status_code == 200
        assert "/v1/else is not served" in httpx.get(f"{proxy.url}/v1/else", headers=headers).text
        assert "/health takes no POST" in httpx.post(f"{proxy.url}/health", headers=headers).text


def test_what_an_engine_sets_for_one_client_reaches_no_other() -> None:
    """As a load balancer in front of an engine does that knows its clients again."""
    prefill, decode = Scripted(params=TOLD), Scripted("answer")

    async def respond(request: Request) -> Response:
        return JSONResponse({"kv_transfer_params": TOLD}, headers={"set-cookie": "session=of-the-first"})

    prefill.respond = decode.respond = respond  # type: ignore[method-assign]
    with proxy_of([prefill], [decode]) as proxy:
        assert proxy.complete().headers["set-cookie"] == "session=of-the-first"
        proxy.complete()
        proxy.complete(headers={"cookie": "session=of-the-third"})
    for engine in (prefill, decode):
        assert [heard.get("cookie") for heard in engine.headers] == [None, None, "session=of-the-third"]


def test_headers_that_an_engine_says_are_of_a_hop_do_not_reach_the_client() -> None:
    given = [(b"Connection", b"close, X-Hop"), (b"X-Hop", b"1"), (b"X-Served-By", b"7"), (b"Server", b"engine")]
    assert passed_on(given) == [(b"x-served-by", b"7")]


def test_a_body_at_the_edge_of_what_can_be_nested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be read, and writing it takes a little more."""

    def too_deep(body: object) -> str:
        raise RecursionError

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", too_deep)
        with pytest.raises(Refused, match="nested too deeply"):
            Completion(Headers(), b'{"prompt": [[["x"]]]}').for_decode(None)


def test_both_engines_are_asked_at_once_where_the_producer_is_known() -> None:
    prefill, decode = Silent(), Scripted("answer")
    with served(prefill.app) as url, proxy_of([f"{url},10.0.0.1:7"], [decode]) as proxy:
        assert proxy.complete().json()["choices"] == [{"text": "answer"}]
        # The decode engine is through, so nobody waits for the prefill.
        wait_until(lambda: not prefill.begun.is_set() or prefill.gone.is_set(), "the prefill is given up")
    told = decode.asked[0]["kv_transfer_params"]
    assert told.pop("transfer_id")
    expected = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.1", "remote_port": 7}
    assert told == expected


def test_a_client_says_what_is_kept_but_not_where_engines_connect() -> None:
    prefill, decode = Scripted(params=TOLD), Scripted()
    evil = {"remote_host": "evil", "remote_ports": [1], "transfer_id": "stolen", "do_remote_decode": 1}
    theirs = {"cache": {"pin": True}} | evil
    with proxy_of([prefill], [decode]) as proxy:
        assert proxy.complete({"prompt": "x", "kv_transfer_params": theirs}).status_code == 200
    assert prefill.asked[0]["kv_transfer_params"] == ASKED | {"cache": {"pin": True}}
    assert decode.asked[0]["kv_transfer_params"] == TOLD | {"cache": {"pin": True}}
    with proxy_of([], [decode]) as proxy:
        assert proxy.complete({"prompt": "x", "kv_transfer_params": theirs}).status_code == 200
    assert decode.asked[1]["kv_transfer_params"] == {"cache": {"pin": True}}


def test_what_an_engine_finds_fault_with_is_told_by_the_decode_engine() -> None:
    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": {"message": "too long"}}, 400)

    prefill, other, decode = Scripted(), Scripted(), Scripted()
    prefill.respond = other.respond = decode.respond = refuse  # type: ignore[method-assign]
    with proxy_of([prefill, other], [decode]) as proxy:
        answer = proxy.complete()
        assert (answer.status_code, answer.json()) == (400, {"error": {"message": "too long"}})
        assert proxy.metric("pd_proxy_retries_total", role="prefill") == 0, "another one would say the same"


def test_a_stream_is_passed_on_as_it_comes() -> None:
    decode = Streaming([b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"])
    with (
        proxy_of([], [decode]) as proxy,
        httpx.stream("POST", f"{proxy.url}/v1/completions", json={"stream": True}, timeout=PATIENCE) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.iter_bytes()
        assert next(parts) == b"data: 1\n\n", "the engine sends no more until this one was read"
        decode.go_on.set()
        assert b"".join(parts) == b"data: 2\n\ndata: [DONE]\n\n"


def test_a_client_that_hangs_up_ends_what_engines_do_for_it() -> None:
    decode = Streaming([b"data: 1\n\n"] * 3)
    with proxy_of([], [decode]) as proxy:
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json={"stream": True}, timeout=PATIENCE) as answer:
            assert next(answer.iter_bytes()) == b"data: 1\n\n"
        assert decode.gone.wait(PATIENCE)
        wait_until(lambda: proxy.metric("pd_proxy_broken_answers_total", by="client") == 1, "it is counted")
        assert proxy.metric("pd_proxy_requests_in_flight") == 0


def test_a_client_that_hangs_up_before_the_answer_never_reaches_the_decode_engine() -> None:
    prefill, decode = Silent(), Scripted()
    with proxy_of([prefill], [decode]) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert prefill.begun.wait(PATIENCE)
        assert prefill.gone.wait(PATIENCE)
        wait_until(lambda: proxy.metric("pd_proxy_requests_total", outcome="client_gone") == 1, "it is counted")
    assert decode.asked == []


def test_a_client_that_does_not_read_holds_the_engine_back_and_is_cut_off() -> None:
    decode = Streaming([bytes(1 << 20)] * 64)
    decode.go_on.set()
    with (
        proxy_of([], [decode], Limits(client_seconds=0.5)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert decode.gone.wait(PATIENCE)
        wait_until(lambda: proxy.metric("pd_proxy_broken_answers_total", by="client") == 1, "it is counted")
    assert decode.num_sent < 64, "all of it was taken for a client that read nothing"


def test_a_body_may_come_in_chunks() -> None:
    decode = Scripted("answer")

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": '
        yield b'"chunked"}'

    with proxy_of([], [decode]) as proxy:
        assert proxy.complete(content=chunks()).json()["choices"] == [{"text": "answer"}]
    assert decode.asked == [{"prompt": "chunked"}]


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (b"", 400, "the body is not JSON: Expecting value"),
        (b"{", 400, "the body is not JSON: Expecting property name"),
        (b"\xff\xfe{", 400, "the body is not JSON: "),
        (b'{"temperature": NaN}', 400, "the body is not JSON: NaN is no number in JSON"),
        (b"[" * 100_000, 400, "the body is not JSON: "),
        (b"[1]", 400, "the body is a JSON list: give an object"),
        (b'{"kv_transfer_params": "x"}', 400, "kv_transfer_params is a JSON str: give an object"),
        (b"x" * 1001, 413, "a body of 1001 bytes: give 1000 at most"),
        (iter([b"x" * 600, b"x" * 600]), 413, "a body of more than 1000 bytes: give fewer"),
    ],
    ids=["nothing", "half", "no text", "NaN", "deep", "a list", "parameters", "large", "large in chunks"],
)
def test_a_bad_body_gets_one_clear_error_and_reaches_no_engine(content: Any, status: int, text: str) -> None:
    decode = Scripted()
    most = 1_000_000 if content == b"[" * 100_000 else 1000
    with proxy_of([], [decode], Limits(body_bytes=most)) as proxy:
        found, message = error_of(proxy.complete(content=content))
        assert found == status
        assert message.startswith(text)
        assert proxy.metric("pd_proxy_requests_total", outcome="bad_request") == 1
    assert decode.asked == []


def test_what_is_not_served_is_said() -> None:
    with proxy_of([], [Scripted()]) as proxy:
        assert error_of(httpx.post(f"{proxy.url}/v1/embeddings", json={})) == (
            404,
            "/v1/embeddings is not served: /v1/completions, /v1/chat/completions are",
        )
        assert error_of(httpx.get(f"{proxy.url}/v1/completions")) == (405, "/v1/completions takes no GET")


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with (
        proxy_of([], [Scripted()], Limits(client_seconds=0.3)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        client.settimeout(PATIENCE)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{")
        with client.makefile("rb") as heard:
            answer = heard.read().decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert json.loads(answer.split("\r\n\r\n")[1])["error"]["message"] == "the body did not come within 0.3 s"


def test_many_clients_at_once_get_their_own_answers() -> None:
    class Echo(Scripted):
        async def respond(self, request: Request) -> Response:
            return JSONResponse({"prompt": json.loads(await request.body())["prompt"]})

    engines = [Echo(), Echo(), Scripted(params=TOLD), Scripted(params=TOLD)]
    with proxy_of(engines[2:], engines[:2]) as proxy, ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda n: proxy.complete({"prompt": n}).json(), range(100))
        assert list(answers) == [{"prompt": n} for n in range(100)]
        assert proxy.metric("pd_proxy_requests_total", outcome="transferred") == 100
    assert [len(engine.asked) for engine in engines] == [50] * 4, "they take turns"


def test_more_than_the_proxy_takes_on_are_told_to_come_back() -> None:
    decode = Streaming([b"1", b"2"])
    with proxy_of([], [decode], Limits(in_flight=2)) as proxy, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(Proxy.complete, proxy) for _ in range(2)]
        wait_until(lambda: len(decode.asked) == 2, "both are under way")
        assert proxy.metric("pd_proxy_requests_in_flight") == 2
        refused = proxy.complete()
        assert error_of(refused) == (429, "2 requests are under way, the limit is 2: ask again later")
        assert refused.headers["retry-after"] == "1"
        decode.go_on.set()
        assert [answer.result().content for answer in answers] == [b"12", b"12"]
        assert proxy.complete().content == b"12"
        assert proxy.metric("pd_proxy_requests_total", outcome="full") == 1
