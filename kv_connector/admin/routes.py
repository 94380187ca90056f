"""Methods and paths to commands; see docs/admin.md for what each takes and answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import unquote

from .actions import ClearTenant, Drain, ListPins, Pin, ReadStats, Reset, Resize, Unpin, Warm
from .base import Answer, Command, Prefixes, Refusal
from .bodies import NoBody, PinBody, PrefixBody, ResizeBody, WaitBody, read

logger = logging.getLogger("kv_connector.admin")

HEALTH = ("GET", "/v1/health")
"""Answered to everybody: that the endpoint is there, and nothing else."""
ENGINE_SECONDS = 10.0
"""For the engine to come to a command."""
_PAUSE_SECONDS = 0.5
"""From one question to the next of how far something is."""
_Handler = Callable[[str, object], Answer]


class Routes:
    """Called from server threads. `ask` hands a command to the engine: see `Inbox.ask`. `clock` gives seconds, `pause`
    waits for some."""

    def __init__(
        self,
        ask: Callable[[Command, float], Answer],
        prefixes: Prefixes,
        engine_seconds: float = ENGINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._ask = ask
        self._prefixes = prefixes
        self._engine_seconds = engine_seconds
        self._clock = clock
        self._pause = pause
        self._handlers: dict[str, dict[str, _Handler]] = {
            "/v1/health": {"GET": self._health},
            "/v1/stats": {"GET": self._stats},
            "/v1/pins": {"GET": self._list_pins, "POST": self._pin},
            "/v1/pins/*": {"DELETE": self._unpin},
            "/v1/resize": {"POST": self._resize},
            "/v1/reset": {"POST": self._reset},
            "/v1/tenants/*/clear": {"POST": self._clear_tenant},
            "/v1/warm": {"POST": self._warm},
            "/v1/drain": {"POST": self._drain},
        }

    def answer(self, method: str, path: str, body: object) -> tuple[int, Answer]:
        """Status and JSON object. Raises Refusal, and KVConnectorError for a body that is wrong."""
        form, name = _form(path)
        handlers = self._handlers.get(form)
        if handlers is None:
            raise Refusal(404, f"nothing is at {path[:200]!r}: there are {', '.join(self._handlers)}")
        if method not in handlers:
            raise Refusal(405, f"{method[:20]} is not for {path[:200]!r}: {' or '.join(handlers)} is")
        answer = handlers[method](name, body)
        if method != "GET":
            logger.info("admin: %s %s: %s", method, path, answer)
        return 202 if answer.get("done") is False else 200, answer

    def _run(self, command: Command) -> Answer:
        return self._ask(command, self._engine_seconds)

    def _health(self, name: str, body: object) -> Answer:
        return {"status": "ok"}

    def _stats(self, name: str, body: object) -> Answer:
        return self._run(ReadStats())

    def _list_pins(self, name: str, body: object) -> Answer:
        return self._run(ListPins())

    def _pin(self, name: str, body: object) -> Answer:
        given = read(PinBody, body)
        return self._run(Pin(given.prefix(self._prefixes), given.seconds(), given.owner()))

    def _unpin(self, name: str, body: object) -> Answer:
        read(NoBody, body)
        return self._run(Unpin(name))

    def _resize(self, name: str, body: object) -> Answer:
        return self._run(Resize(read(ResizeBody, body).num_bytes()))

    def _reset(self, name: str, body: object) -> Answer:
        read(NoBody, body)
        return self._run(Reset())

    def _clear_tenant(self, name: str, body: object) -> Answer:
        read(NoBody, body)
        return self._run(ClearTenant(name))

    def _warm(self, name: str, body: object) -> Answer:
        given = read(PrefixBody, body)
        return self._run(Warm(given.prefix(self._prefixes), given.owner()))

    def _drain(self, name: str, body: object) -> Answer:
        """Asked again and again: a command waits for nothing, and each time the engine is told what to write next."""
        deadline = self._clock() + read(WaitBody, body).seconds()
        while not (answer := self._run(Drain()))["done"] and self._clock() < deadline:
            self._pause(_PAUSE_SECONDS)
        return answer


def _form(path: str) -> tuple[str, str]:
    """The path with its variable part as an asterisk, and that part."""
    parts = path.split("/")
    if len(parts) > 3 and parts[2] in ("pins", "tenants") and parts[3] not in ("", "*"):
        name, parts[3] = unquote(parts[3]), "*"
        return "/".join(parts), name
    return path, ""
