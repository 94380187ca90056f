"""When the proxy asks an engine how it is, and what it takes for it to be left out: no time passes here."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import httpx
import pytest

from integration.pd_proxy import engines
from integration.pd_proxy.engines import Engine
from integration.pd_proxy.metrics import ProxyMetrics
from tests.pd_engines import PATIENCE


def watched(answers: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[float]]:
    """Whether the engine was asked for prompts as each check of these answers began and at the end, and what was waited
    behind those that it failed."""
    was_healthy: list[bool] = []
    pauses: list[float] = []
    engine, statuses = Engine("decode", "http://engine"), iter(answers)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def watch(statuses: Iterator[int]) -> None:
        with anyio.CancelScope() as scope:

            async def answer(request: httpx.Request) -> httpx.Response:
                assert request.url == "http://engine/health"
                was_healthy.append(engine.is_healthy)
                status = next(statuses, None)
                if status is None:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                return httpx.Response(status or 200)

            async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
                await engine.watch(client, 0.0, ProxyMetrics())

    monkeypatch.setattr(engines.anyio, "sleep", sleep)
    anyio.run(watch, statuses)
    return was_healthy, pauses


def test_one_missed_check_is_none_and_two_in_a_row_are(monkeypatch: pytest.MonkeyPatch) -> None:
    was_healthy, _ = watched([200, 503, 200, 503, 503, 503, 200], monkeypatch)
    assert was_healthy == [True, True, True, True, True, False, False, True]


def test_who_is_ill_is_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pauses = watched([503] * 7 + [200, 503], monkeypatch)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5]


def test_who_fails_a_request_is_checked_at_once_and_may_be_back_with_that() -> None:
    engine, metrics, num_checks = Engine("decode", "http://engine"), ProxyMetrics(), 0

    async def watch() -> None:
        is_checked = anyio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            nonlocal num_checks
            num_checks += 1
            is_checked.set()
            return httpx.Response(200)

        async with (
            httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(engine.watch, client, 10 * PATIENCE, metrics)
            await is_checked.wait()
            await anyio.wait_all_tasks_blocked()
            is_checked = anyio.Event()
            engine.failed(OSError("it broke off"), metrics)
            assert not engine.is_healthy
            with anyio.fail_after(PATIENCE):
                await is_checked.wait()
                await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    anyio.run(watch)
    assert (num_checks, engine.is_healthy) == (2, True)


def test_a_check_that_never_ends_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an engine that sends a byte now and then, or lets one try after the other to connect run out."""
    monkeypatch.setattr(engines, "CHECK_SECONDS", 0.0)

    async def check() -> str | None:
        async def answer(request: httpx.Request) -> httpx.Response:
            await anyio.sleep_forever()
            raise AssertionError

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            with anyio.fail_after(PATIENCE):
                return await Engine("decode", "http://engine").check(client)

    assert anyio.run(check) == "/health does not answer within 0 s"


@pytest.mark.parametrize("location", ["engine:8000", "http://xn--a/", "http://[::1"])
def test_an_engine_that_points_to_what_is_no_url_has_failed_a_check(location: str) -> None:
    """As something in front of it may: it ends neither its own checks nor those of the others."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"location": location})

    async def check() -> str | None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await Engine("decode", "http://engine").check(client)

    assert anyio.run(check) is not None


def test_whatever_a_check_raises_is_what_is_wrong_with_its_engine() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise LookupError("nobody has thought of this")

    async def check() -> str | None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await Engine("decode", "http://engine").check(client)

    assert "nobody has thought of this" in (anyio.run(check) or "")
