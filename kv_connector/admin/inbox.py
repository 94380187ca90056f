"""Commands on their way to the engine's thread, and their answers back. The engine's thread never waits here."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ..errors import KVConnectorError
from .base import Answer, Command, Refusal, SteeredEngine

logger = logging.getLogger("kv_connector.admin")

_MOST_WAITING = 64


class Asked:
    """A command, and what came of it once that is known."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.has_ended = threading.Event()
        self._outcome: Answer | Refusal = Refusal(500, "not ended")

    def run(self, engine: SteeredEngine) -> None:
        """Carry it out, on the engine's thread. Whatever it raises becomes the answer: the engine is not affected."""
        try:
            self._outcome = self.command.run(engine)
        except Refusal as refusal:
            self._outcome = refusal
        except KVConnectorError as error:
            self._outcome = Refusal(409, str(error))
        except Exception as error:
            logger.exception("admin: %s failed", type(self.command).__name__)
            self._outcome = Refusal(500, f"{type(error).__name__}: {error}; the engine's log has more")
        self.has_ended.set()

    def refuse(self, refusal: Refusal) -> None:
        """It is not carried out."""
        self._outcome = refusal
        self.has_ended.set()

    def answer(self) -> Answer:
        """Once it has ended. Raises Refusal."""
        if isinstance(self._outcome, Refusal):
            raise self._outcome
        return self._outcome


class Inbox:
    """`ask` is called from any thread but the engine's, the others from the engine's alone. `wake` makes an engine that
    rests look at it; it is called from any thread, and neither waits nor raises."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[Asked] = deque()
        self._lock = threading.Lock()  # held for a few instructions
        self._is_closed = False

    def ask(self, command: Command, seconds: float) -> Answer:
        """The command's answer; blocks for it. Raises Refusal where it is refused, or where the engine does not reach
        it in time: then it is not carried out."""
        asked = Asked(command)
        with self._lock:
            if self._is_closed:
                raise _closed()
            if len(self._waiting) >= _MOST_WAITING:
                raise Refusal(503, f"{_MOST_WAITING} commands wait for the engine already: ask again later")
            self._waiting.append(asked)
        self._wake()
        if not asked.has_ended.wait(seconds) and self._withdraw(asked):
            raise Refusal(
                504,
                f"the engine has not come to it within {seconds:g} s, and will not do it any more: it is in the middle "
                "of a long step, or rests and cannot be woken; ask again while it serves requests",
            )
        if not asked.has_ended.wait(seconds):
            raise Refusal(504, f"the engine has begun it, and not ended within {seconds:g} s more: see its log")
        return asked.answer()

    @property
    def has_waiting(self) -> bool:
        """Whether a command waits."""
        return bool(self._waiting)

    def take(self) -> Asked | None:
        """The command that waits longest, if any; from now on it cannot be withdrawn."""
        if not self._waiting:  # so it is in nearly every step
            return None
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def serve(self, engine: SteeredEngine) -> None:
        """Carry out the command that waits longest, if any: one a step, so that many do not hold a step up."""
        asked = self.take()
        if asked is not None:
            asked.run(engine)

    def close(self) -> None:
        """Nothing is carried out any more; whoever waits is told. Idempotent."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
        for asked in waiting:
            asked.refuse(_closed())

    def _withdraw(self, asked: Asked) -> bool:
        """Whether the command was still waiting; it is not carried out then."""
        with self._lock:
            if asked not in self._waiting:
                return False
            self._waiting.remove(asked)
            return True


def _closed() -> Refusal:
    return Refusal(503, "the engine is shutting down")
