"""A user who has prompts computed on one engine and continued on another, as proxies for KV transfer do.

    behind     the prompt is computed for one token; what that engine says of it goes with the prompt to the other one
    at once    both get the prompt, the second with where the first one listens
    alone      nobody comes for what was computed
    twice      two engines are sent to the same transfer, or one of them twice

Both sides compute the same tokens only with the same weights, and no engine can tell: while weights are updated the
proxy sends nobody to another engine, and what was under way is given up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .requests import SimulatedRequest

if TYPE_CHECKING:
    from .engine import Engine
    from .workload import Users
    from .world import World

WAYS = ("behind", "behind", "behind", "behind", "at once", "at once", "at once", "alone", "twice")
CONSUMER = 1 << 20
"""Added to a request's number: the request that continues it."""
_MOST_TOLD = 16


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt that is computed for it, on the engine of this index, so many seconds behind."""

    engine: int
    request_id: str
    number: int
    prompt: list[int]
    outputs: int
    delay: float
    is_repeated: bool


class Proxy:
    """`users` sends the requests."""

    def __init__(self, world: World, users: Users) -> None:
        self._world = world
        self._users = users
        self._behind: dict[SimulatedRequest, Continuation] = {}
        self._told: list[tuple[dict[str, Any], list[int]]] = []  # params of before, and their prompts

    @property
    def may_transfer(self) -> bool:
        """Whether all engines have the same weights."""
        world = self._world
        epochs = {engine.scheduler.epoch for engine in world.engines}
        return len(epochs | set(world.epochs)) == 1

    def hand_over(self, engine: Engine, way: str, number: int, ids: tuple[str, str], then: Continuation) -> None:
        """A prompt for two engines. `ids` of the requests on the first and the second."""
        if not self.may_transfer:
            return
        prompt, met = then.prompt, self._world.met
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if way == "at once" and engine.config.port:
            params["transfer_id"] = f"transfer {number}"
            other = params | {"do_remote_decode": False, "do_remote_prefill": True, "remote_host": "127.0.0.1"}
            other |= {"remote_port": engine.config.port, "tp_size": engine.config.num_ranks}
            if number % 2:
                other["remote_engine_id"] = engine.engine_id
            met["handed over at once"] += 1
            consumer = self._world.engines[then.engine]
            self._world.time.call_after(
                then.delay if number % 3 else 0.0, partial(self._send, consumer.index, then, other), "at once"
            )
        request = self._users.start(engine, number, ids[0], prompt, 1, params)
        if request is not None and way in ("behind", "twice"):
            self._behind[request] = then
        elif way == "alone":
            met["handed over to nobody"] += 1

    def finished(self, request: SimulatedRequest) -> None:
        """A request has ended: what continues it is sent."""
        if request.handed is not None:
            self._told.append((request.handed, request.tokens[: request.num_prompt_tokens]))
            del self._told[:-_MOST_TOLD]
        then = self._behind.pop(request, None)
        if then is None:
            return
        met = self._world.met
        met["handed over behind"] += 1
        met["handed over without params"] += request.handed is None
        call = partial(self._send, then.engine, then, request.handed)
        self._world.time.call_after(then.delay, call, "continue")
        if then.is_repeated:
            met["params given twice"] += 1
            again = replace(then, number=then.number + CONSUMER, request_id=f"{then.request_id} again")
            call = partial(self._send, (then.engine + then.number) % len(self._world.engines), again, request.handed)
            self._world.time.call_after(then.delay * 1.5, call, "continue again")

    def send_stale(self, engine: Engine, number: int, back: int, outputs: int) -> None:
        """A prompt goes to an engine with what was said of it some time ago."""
        if not self._told or not self.may_transfer:
            return
        params, prompt = self._told[-1 - back % len(self._told)]
        self._send(engine.index, Continuation(engine.index, f"r{number}", number, prompt, outputs, 0.0, False), params)

    def params_again(self, request: SimulatedRequest) -> dict[str, Any] | None:
        """What a request of the same id is sent with."""
        return request.kv_transfer_params if self.may_transfer and request.is_handed else None

    def replaced(self, before: SimulatedRequest, request: SimulatedRequest) -> None:
        """The request of an engine that was killed is computed anew."""
        then = self._behind.pop(before, None)
        if then is not None and request.kv_transfer_params is not None:
            self._behind[request] = then

    def give_up(self) -> None:
        """Weights are to be updated: nothing that is under way between engines may be continued."""
        self._behind.clear()
        for engine in self._world.engines:
            for request in engine.scheduler.requests:
                if request.is_handed:
                    engine.abort(request)

    def _send(self, index: int, then: Continuation, params: dict[str, Any] | None) -> None:
        engine = self._world.engines[index]
        if params is not None and not self.may_transfer:
            params = None
        if params is not None and params.get("remote_engine_id"):
            alive = {other.engine_id for other in self._world.engines}
            self._world.met["params to a dead engine"] += params["remote_engine_id"] not in alive
        self._users.start(engine, then.number, then.request_id, then.prompt, then.outputs, params)
