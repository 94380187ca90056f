"""What users, operators and bad luck do to a world: a list of actions with their times, drawn from the seed.

Each action is plain data and stands alone: one that refers to what another would have made does nothing where that one
is missing. So a history that fails can be shortened by leaving actions out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kv_connector.errors import KVConnectorError
from kv_connector.index import BlockHasher
from kv_connector.types import BlockHash, Direction, PeerAction, StepPlan, StorageAction

from .checks import Violation
from .config import EngineConfig
from .model import VOCABULARY
from .outside import DISK_FAULTS, NETWORK_FAULTS
from .proxy import CONSUMER, WAYS, Continuation, Proxy
from .requests import SimulatedRequest, Status

if TYPE_CHECKING:
    from .engine import Engine
    from .world import World

KINDS = {
    "arrive": 60,
    "abort": 3,
    "again": 2,
    "fail": 5,
    "freeze": 1,
    "stall": 1,
    "weights": 0.5,
    "reset": 0.5,
    "sleep": 0.3,
    "kill": 0.2,
    "resize": 1,
    "pin": 0.5,
    "unpin": 0.5,
    "trap": 12,
    "hand": 60,
    "stale": 4,
    "network": 4,
    "disk": 4,
}
"""How often each kind of action occurs, in proportion."""
TRAPS = {
    "loading": ("again", "again", "again", "abort", "abort", "weights", "reset", "kill", "sleep", "freeze", "resize"),
    "announced": ("again", "again", "abort", "weights", "freeze", "fail"),
    "load": ("abort", "weights", "reset", "fail", "freeze", "again"),
    "save": ("abort", "weights", "reset", "kill", "fail", "sleep", "resize"),
    "preempted": ("abort", "weights", "again", "freeze"),
    "drafts": ("abort", "again", "weights"),
    "send": ("abort", "abort", "again", "again", "reset", "weights", "kill", "fail", "network", "freeze", "sleep"),
    "receive": ("abort", "abort", "again", "reset", "reset", "weights", "kill", "kill_other", "network", "freeze"),
    "fetch": ("disk", "disk", "reset", "abort", "again", "kill"),
    "backup": ("disk", "disk", "reset", "kill", "resize"),
}
"""What a trap waits for in a plan, and what may be done when it comes."""


RESETS = ("weights", "reset", "sleep")
"""What some worlds do without: behind a reset nothing is found in storage that was written before."""
NUM_DOCUMENTS = 8
_DOCUMENTS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7)  # some are asked for often


@dataclass(frozen=True)
class Action:
    """`number` is its place in the history that was drawn; `what` are the choices of its kind."""

    number: int
    time: float
    kind: str
    engine: int
    what: dict[str, Any]

    def __str__(self) -> str:
        what = " ".join(f"{key}={value}" for key, value in self.what.items())
        return f"#{self.number} at {self.time * 1e3:.1f} ms: {self.kind} engine {self.engine} {what}".rstrip()


def draw(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    """The history of a world with these engines."""
    count = rng.choice([40, 120, 240])
    gap = rng.choice([1e-3, 4e-3, 15e-3])
    kinds = dict(KINDS)
    if not any(config.role for config in configs):
        for kind in ("hand", "stale", "network"):
            del kinds[kind]
    if not any(config.prefetch for config in configs):
        del kinds["disk"]
    is_calm = len(kinds) > len(KINDS) - 4 and rng.random() < 0.6
    if len(configs) > 1 or "disk" in kinds:
        kinds["trap"] *= 3
    for kind in list(kinds)[1:]:
        kinds[kind] *= rng.choice([0, 1, 1, 4])
    most_new = rng.choice([1, 2, 8, 16])
    time, actions = 0.0, []
    for number in range(count):
        time += rng.expovariate(1 / gap) if rng.random() < 0.7 else 0.0
        kind = rng.choices(list(kinds), list(kinds.values()))[0] if number > 2 else "arrive"
        engine = rng.randrange(len(configs))
        what = _choices(rng, kind, configs, engine, most_new, number)
        if not (is_calm and (kind in RESETS or what.get("do") in RESETS)):
            actions.append(Action(number, time, kind, engine, what))
    return actions


def _choices(
    rng: random.Random, kind: str, configs: Sequence[EngineConfig], index: int, most_new: int, number: int
) -> dict[str, Any]:
    config = configs[index]
    if kind in ("arrive", "again", "hand"):
        what: dict[str, Any] = {
            "document": rng.choice(_DOCUMENTS),
            "share": rng.choice([0.5, 0.8, 1.0] if kind == "again" else [0.0, 0.2, 0.5, 0.8, 1.0]),
            "new": rng.randrange(1, 9),
            "outputs": rng.randrange(1, most_new + 1),
        }
        if kind == "hand":
            return what | _choices_of_hand(rng, configs)
        if kind == "again" or rng.random() < 0.25:
            what["of"] = rng.randrange(max(1, number))  # goes on with, or takes the id of, that request
        return what
    if kind == "abort":
        return {"back": rng.randrange(6), "is_handed": rng.random() < 0.5}
    if kind == "trap":
        weights = [4, 2, 2, 1, 1, 1, 8 * config.produces, 8 * config.consumes]
        weights += [4 * (config.prefetch is not None), 2 * (config.prefetch is not None)]
        when = rng.choices(list(TRAPS), weights)[0]
        do = rng.choice(TRAPS[when])
        what = {"when": when, "do": do, "delay": rng.choice([0.0, 1e-4, 1e-3, 5e-3])}
        return what | _choices(rng, do, configs, index, most_new, number)
    if kind == "fail":
        way = rng.choice([Direction.LOAD, Direction.LOAD, Direction.SAVE])
        return {"rank": rng.randrange(config.num_ranks), "way": way, "after": rng.choice([0, 0, 1, 3])}
    if kind == "freeze":
        return {"rank": rng.randrange(config.num_ranks), "seconds": rng.choice([0.01, 0.05, 0.3])}
    if kind == "stall":
        return {"rank": rng.randrange(config.num_ranks), "share": rng.choice([0.0, 0.02, 0.1])}
    if kind == "sleep":
        return {"seconds": rng.choice([0.0, 0.02])}
    if kind == "resize":
        return {"share": rng.choice([0.0, 0.1, 0.5, None, None, None])}
    if kind in ("pin", "unpin"):
        return {"document": rng.choice(_DOCUMENTS), "share": rng.choice([0.2, 0.5])}
    return _choices_outside(rng, kind, configs)


def _choices_of_hand(rng: random.Random, configs: Sequence[EngineConfig]) -> dict[str, Any]:
    consumers = [index for index, config in enumerate(configs) if config.consumes or rng.random() < 0.05]
    producers = [index for index, config in enumerate(configs) if config.produces or rng.random() < 0.05]
    return {
        "way": rng.choice(WAYS),
        "by": rng.choice(producers),
        "to": rng.choice(consumers),
        "delay": rng.choice([0.0, 0.0, 1e-3, 2e-2, 0.5, 5.0]),
        "is_same_id": rng.random() < 0.7,
    }


def _choices_outside(rng: random.Random, kind: str, configs: Sequence[EngineConfig]) -> dict[str, Any]:
    if kind == "stale":
        return {"back": rng.randrange(8), "outputs": rng.randrange(1, 4)}
    if kind == "kill_other":
        return {"other": rng.randrange(len(configs))}
    if kind == "network":
        return {
            "fault": rng.choice(NETWORK_FAULTS),
            "other": rng.randrange(len(configs)),
            "rank": rng.randrange(min(config.num_ranks for config in configs)),
            "is_back": rng.random() < 0.5,
            "factor": rng.choice([30.0, 300.0]),
            "seconds": rng.choice([0.02, 0.3, 3.0, 15.0]),
        }
    if kind == "disk":
        return {
            "fault": rng.choice(DISK_FAULTS),
            "rate": rng.choice([0.02, 0.3, 1.0]),
            "count": rng.randint(1, 4),
            "calls": rng.choice([(), (), ("write", "unlink"), ("preadv",)]),
            "seconds": rng.choice([0.05, 0.5, 4.0]),
        }
    return {}


class Users:
    """Applies actions to a world. It knows every request by the number of the action that made it."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        most = min(engine.most_tokens() for engine in world.engines)
        self._most = most
        length = min(most - 12, rng.choice([16, 40, 80, 160]))
        self._documents = [[rng.randrange(VOCABULARY) for _ in range(max(4, length))] for _ in range(NUM_DOCUMENTS)]
        self._rng_seed = rng.random()
        self.requests: dict[int, tuple[Engine, SimulatedRequest]] = {}
        self._traps: list[tuple[Engine, Action]] = []
        self.proxy = Proxy(world, self)
        self._pinned: dict[tuple[int, tuple[BlockHash, ...]], int] = {}  # by engine and prefix: the start that was told

    def apply(self, action: Action) -> None:
        """Do it, now."""
        engine = self._world.engines[action.engine]
        if engine.is_dead:
            return
        self._world.met[f"action {action.kind}"] += 1
        self._do(engine, action, action.kind, action.what)

    def planned(self, engine: Engine, plan: StepPlan, has_preempted: bool, has_drafts: bool) -> None:
        """A plan was made: traps that wait for what is in it are sprung."""
        if not self._traps:
            return
        seen = {
            "loading": bool(plan.background_loads),
            "announced": bool(plan.announced_loads),
            "load": bool(plan.loads),
            "save": bool(plan.saves),
            "preempted": has_preempted,
            "drafts": has_drafts,
            "send": any(job.action is PeerAction.SEND for job in plan.peer),
            "receive": any(job.action is PeerAction.RECEIVE and job.num_blocks for job in plan.peer),
            "fetch": any(job.action is not StorageAction.BACK_UP for job in plan.storage),
            "backup": any(job.action is StorageAction.BACK_UP for job in plan.storage),
        }
        for entry in [entry for entry in self._traps if entry[0] is engine and seen[entry[1].what["when"]]]:
            self._traps.remove(entry)
            action = entry[1]
            what = {key: value for key, value in action.what.items() if key not in ("when", "do", "delay")}
            kind = action.what["do"]
            self._world.met[f"trap {action.what['when']}: {kind}"] += 1
            delay = action.what["delay"]
            call = partial(self._spring, engine, action, kind, what)
            self._world.time.call_after(delay, call, str(action))

    def _spring(self, engine: Engine, action: Action, kind: str, what: dict[str, Any]) -> None:
        if not engine.is_dead:
            self._do(engine, action, kind, what)

    def _do(self, engine: Engine, action: Action, kind: str, what: dict[str, Any]) -> None:
        getattr(self, f"_{kind}")(engine, action, **what)

    def _trap(self, engine: Engine, action: Action, **what: Any) -> None:
        self._traps.append((engine, action))

    def _prompt(self, number: int, document: int, share: float, new: int) -> list[int]:
        rng = random.Random(f"{self._rng_seed}/{number}")
        text = self._documents[document]
        return text[: int(share * len(text))] + [rng.randrange(VOCABULARY) for _ in range(new)]

    def start(
        self,
        engine: Engine,
        number: int,
        request_id: str,
        prompt: list[int],
        outputs: int,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> SimulatedRequest | None:
        """Send a request, if it fits and its id is free: else it is refused."""
        outputs = min(outputs, self._most - len(prompt))
        if outputs < 1 or any(request.request_id == request_id for request in engine.scheduler.requests):
            return None
        request = engine.make_request(request_id, number, prompt, outputs, params, salt)
        self.requests[number] = engine, request
        engine.add(request)
        return request

    def _arrive(
        self, engine: Engine, action: Action, document: int, share: float, new: int, outputs: int, of: int | None = None
    ) -> None:
        prompt = self._prompt(action.number, document, share, new)
        if of in self.requests:
            _, before = self.requests[of]
            prompt = list(before.tokens) + prompt[-new:]
        salt, hints = self._world.draw_hints(engine, action.number)
        params = None if hints is None else {"cache": hints}
        self.start(engine, action.number, f"r{action.number}", prompt, outputs, params, salt)

    def _session(
        self, engine: Engine, action: Action, document: int, share: float, inputs: Sequence[tuple[float, int, int]]
    ) -> None:
        """A request whose input comes in parts, the first of them now. `inputs`: seconds since the part before, new
        tokens, outputs."""
        if any(request.is_session for request in engine.scheduler.requests):
            return  # two could wait for one another's blocks
        _, new, outputs = inputs[0]
        prompt = self._prompt(action.number, document, share, new)
        request = self.start(engine, action.number, f"r{action.number}", prompt, outputs)
        if request is None:
            return
        request.is_session = True
        time, num_resets = 0.0, engine.num_resets
        for seconds, new, outputs in inputs[1:]:
            time += seconds
            tokens = self._prompt(action.number, document, 0.0, new)
            call = partial(self._go_on, engine, request, tokens, outputs, num_resets)
            self._world.time.call_after(time, call, f"{request.request_id} goes on")
        self._world.time.call_after(time + 0.1, partial(self._end_session, engine, request), "a session ends")

    def _go_on(
        self, engine: Engine, request: SimulatedRequest, tokens: list[int], outputs: int, num_resets: int
    ) -> None:
        """It waits until the part in front of it has come to its end."""
        outputs = min(outputs, self._most - request.num_tokens - len(tokens))
        if engine.is_dead or not request.is_session or request.is_finished or outputs < 1:
            return
        if request.status is not Status.IDLE:
            call = partial(self._go_on, engine, request, tokens, outputs, num_resets)
            self._world.time.call_after(2e-3, call, f"{request.request_id} goes on")
            return
        self._world.met["session goes on"] += 1
        self._world.met["session goes on behind a reset"] += engine.num_resets > num_resets
        engine.scheduler.go_on(request, tokens, outputs)
        engine.wake()

    def _end_session(self, engine: Engine, request: SimulatedRequest) -> None:
        if not engine.is_dead and not request.is_finished:
            engine.scheduler.end_session(request)
            engine.wake()

    def _hand(
        self,
        engine: Engine,
        action: Action,
        document: int,
        share: float,
        new: int,
        outputs: int,
        way: str,
        by: int,
        to: int,
        delay: float,
        is_same_id: bool,
    ) -> None:
        number, prompt = action.number, self._prompt(action.number, document, share, new)
        ids = f"r{number}", f"r{number}" if is_same_id and by != to else f"r{number} continued"
        then = Continuation(to, ids[1], number + CONSUMER, prompt, outputs, delay, way == "twice")
        self.proxy.hand_over(self._world.engines[by], way, number, ids, then)

    def _stale(self, engine: Engine, action: Action, back: int, outputs: int) -> None:
        self.proxy.send_stale(engine, action.number, back, outputs)

    def _network(
        self, engine: Engine, action: Action, fault: str, other: int, rank: int, is_back: bool, **how: float
    ) -> None:
        pair = (other, engine.index) if is_back else (engine.index, other)
        if self._world.outside.fail_network(fault, *pair, rank, **how):
            self._world.met[f"network {fault}"] += 1

    def _disk(self, engine: Engine, action: Action, fault: str, **how: Any) -> None:
        if self._world.outside.fail_disk(fault, **how):
            self._world.met[f"disk {fault}"] += 1

    def _kill_other(self, engine: Engine, action: Action, other: int) -> None:
        self._kill(self._world.engines[other], action)

    def _again(
        self, engine: Engine, action: Action, document: int, share: float, new: int, outputs: int, of: int
    ) -> None:
        """Abort a request, the last that waits for a load if there is one, and send another one under its id."""
        live = [r for r in engine.scheduler.requests if not r.is_finished]
        loading = [r for r in live if r.status.value == "loading"]
        if not live:
            return
        request = (loading or live)[-1]
        met = self._world.met
        met["same id again"] += 1
        met["same id again while its load is under way"] += bool(loading)
        engine.abort(request)
        params = self.proxy.params_again(request)
        met["same id again across engines"] += params is not None
        prompt = self._prompt(action.number, document, share, new)
        if params is not None and action.number % 2:
            prompt = request.tokens[: request.num_prompt_tokens]
        self.start(engine, action.number, request.request_id, prompt, outputs, params)

    def _abort(self, engine: Engine, action: Action, back: int, is_handed: bool) -> None:
        live = engine.scheduler.requests
        if is_handed:
            live = [request for request in live if request.is_handed] or live
        if live:
            request = live[back % len(live)]  # those that hold blocks come first
            for is_it, side in ((request.is_for_others, "producer"), (request.is_from_others, "consumer")):
                if is_it:
                    self._world.met[f"aborted {side} while {request.status.value}"] += 1
            self._world.met[f"aborted while {request.status.value}"] += 1
            self._world.met["aborted with a step under way"] += request.num_in_flight > 0
            engine.abort(request)

    def _fail(self, engine: Engine, action: Action, rank: int, way: Direction, after: int) -> None:
        engine.ranks[rank].device.faults[way] = after

    def _freeze(self, engine: Engine, action: Action, rank: int, seconds: float) -> None:
        process = engine.ranks[rank]
        process.freeze()
        self._world.time.call_after(seconds, process.thaw, "thaw")

    def _stall(self, engine: Engine, action: Action, rank: int, share: float) -> None:
        engine.ranks[rank].device.stalls = share

    def _weights(self, engine: Engine, action: Action) -> None:
        world = self._world
        if world.outside.has_peers:
            self.proxy.give_up()
        for other in world.engines if world.outside.has_peers else [engine]:
            world.epochs[other.index] += 1
            other.update_weights()

    def _reset(self, engine: Engine, action: Action) -> None:
        engine.reset_connector()

    def _sleep(self, engine: Engine, action: Action, seconds: float) -> None:
        engine.sleep(seconds)

    def _kill(self, engine: Engine, action: Action) -> None:
        """Its clients send again what was not finished."""
        lost = engine.kill()
        again = self._world.restart(engine)
        self._take_pins_over(engine, again)
        for request in lost:
            prompt, params = request.tokens[: request.num_prompt_tokens], self.proxy.params_again(request)
            anew = self.start(again, request.number, request.request_id, prompt, request.max_tokens, params)
            if anew is not None:
                self.proxy.replaced(request, anew)

    def _take_pins_over(self, engine: Engine, again: Engine) -> None:
        """What operators had pinned is pinned at the next start, too, and nothing else, where pins are kept."""
        expected = {
            hashes
            for (i, hashes), start in self._pinned.items()
            if hashes and (i, start) == (engine.index, engine.incarnation)
        }
        kept = self._world.kept_pins
        if kept is None or engine.config.prefetch is None or again.kept_as != engine.kept_as:
            expected = set()
        found = {pin.block_hashes for pin in again.half.pinned_prefixes()}
        if found != expected:
            text = (
                f"{len(expected - found)} prefixes of the last start are not pinned, {len(found - expected)} too many"
            )
            raise Violation("check", text)
        for hashes in found:
            self._pinned[engine.index, hashes] = again.incarnation
            again.watch.pinned(hashes, 1)

    def _resize(self, engine: Engine, action: Action, share: float | None) -> None:
        engine.half.resize_host(None if share is None else int(share * engine.config.num_host_blocks))
        engine.wake()

    def _pin(self, engine: Engine, action: Action, document: int, share: float) -> None:
        hashes = self._hashes(engine, document, share)
        if self._pinned.get((engine.index, hashes)) != engine.incarnation:
            self._pinned[engine.index, hashes] = engine.incarnation
            self._world.lasting_hashes.update(hashes)
            engine.half.pin_prefix(hashes, are_given=False)
            engine.watch.pinned(hashes, 1)

    def _unpin(self, engine: Engine, action: Action, document: int, share: float) -> None:
        """Of a prefix that this start was never told of, or that is pinned in part, no pin may go."""
        hashes = self._hashes(engine, document, share)
        if self._pinned.pop((engine.index, hashes), None) == engine.incarnation:
            engine.half.unpin_prefix(hashes)
            engine.watch.pinned(hashes, -1)
            return
        self._world.met["unpinned what was not pinned"] += 1
        try:
            engine.half.unpin_prefix(hashes)
        except KVConnectorError:
            return
        raise Violation("check", f"{len(hashes)} blocks are unpinned that were never pinned together")

    def _warm(self, engine: Engine, action: Action, document: int, share: float) -> None:
        self._world.met["prefixes warmed"] += engine.half.warm(self._hashes(engine, document, share), are_given=False)
        engine.wake()

    def _give(
        self, engine: Engine, action: Action, document: int, first: float, end: float, mistake: str, warms: bool
    ) -> None:
        """Hashes of which somebody says that they are a prefix."""
        prompt = self._hashes(engine, document, 1.0)
        hashes = _given(prompt, first, end, mistake)
        if not hashes:
            return
        try:
            if warms:
                engine.half.warm(hashes)
                engine.wake()
            elif self._pinned.get((engine.index, hashes)) != engine.incarnation:
                engine.half.pin_prefix(hashes)
                self._pinned[engine.index, hashes] = engine.incarnation
                self._world.lasting_hashes.update(hashes)
                engine.watch.pinned(hashes, 1)
        except KVConnectorError:
            self._world.met["given hashes refused"] += 1
            return
        self._world.met["given hashes taken"] += 1
        engine.watch.check_taken(hashes, prompt)

    def _drain(self, engine: Engine, action: Action) -> None:
        """Until nothing is left: the engine is asked again and again."""
        if engine.is_dead or engine.config.prefetch is None:
            return
        if engine.half.drain():
            self._world.time.call_after(5e-3, partial(self._drain, engine, action), "drain")
            engine.wake()
        else:
            self._world.met["hosts drained"] += 1

    def _clear(self, engine: Engine, action: Action, tenant: int) -> None:
        names = ["default", *(name for name, _, _ in engine.config.tenants)]
        name = names[tenant % len(names)]
        self._world.met["tenants' blocks cleared"] += engine.half.clear_tenant(name)
        engine.watch.check_cleared(name)
        engine.wake()

    def unpin_all(self) -> None:
        """Nothing is to be kept any more."""
        for (index, hashes), incarnation in self._pinned.items():
            engine = self._world.engines[index]
            if engine.incarnation == incarnation:
                engine.half.unpin_prefix(hashes)
        self._pinned.clear()

    def _hashes(self, engine: Engine, document: int, share: float) -> tuple[BlockHash, ...]:
        text = self._documents[document]
        hasher = BlockHasher(engine.config.block_size, engine.root)
        return tuple(hasher.update(text[: int(share * len(text))]))


def _given(prompt: Sequence[BlockHash], first: float, end: float, mistake: str) -> tuple[BlockHash, ...]:
    """What somebody gives of a prompt's blocks."""
    hashes = list(prompt[int(first * len(prompt)) : int(end * len(prompt))])
    if mistake == "gap":
        del hashes[len(hashes) // 2 : len(hashes) // 2 + 1]
    elif mistake == "turned":
        hashes.reverse()
    elif mistake == "twice":
        hashes += hashes[-1:]
    return tuple(hashes)
