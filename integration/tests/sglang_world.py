"""Worlds of SGLang's scheduler, the linker and a device, from a seed: random requests over few pages.

Streams are those of `tests/simulation`: they run late, in any order that streams and events allow. What a forward pass
reads of pages that are cached has to be what belongs there, at the moment that it reads it, unless SGLang was told that
the load has failed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from integration.tests.sglang_model import Rank, current_rank
from integration.tests.sglang_parts import Meeting, ThreadRanks
from integration.tests.sglang_tree import PAGE
from kv_connector import build
from kv_connector.engines.sglang import linker, ranks, replica
from kv_connector.index import CacheIdentity
from kv_connector.scheduler.control.keeping import NoKeeper
from kv_connector.transfer import engine as transfer_engine
from kv_connector.types import Direction
from kv_connector.worker import half as worker_half
from tests.simulation.clock import VirtualTime
from tests.simulation.device import LatePath, SimulatedLane, SimulatedSubmitter


@dataclass(frozen=True)
class World:
    """What a seed decides before it begins."""

    seed: int
    num_ranks: int
    is_latent: bool
    num_pages: int
    overlaps: bool
    num_chats: int
    faults: float  # share of rounds with one
    seconds: dict[str, float]  # that a copy takes about
    settings: dict[str, Any]
    orders_by_prefix: bool  # and looks up whoever waits, in each round

    @classmethod
    def drawn(cls, seed: int) -> World:
        """Of this seed."""
        chance = random.Random(f"world {seed}")
        num_ranks = chance.choice([1, 1, 2])
        settings: dict[str, Any] = {
            "host_memory": chance.choice([2, 5, 12, 30, 100]) * 4096 * num_ranks,
            "write_policy": chance.choice(["write_through", "write_through", "adaptive", "write_through_selective"]),
            "keep_on_flush": chance.random() < 0.4,
        }
        if chance.random() < 0.6:
            settings["storage"] = storage = {"path": "/nowhere", "capacity": "1GiB"}
            storage["backup"] = chance.choice(["on_save", "on_eviction", "at_finish"])
            if chance.random() < 0.7:
                storage |= {"prefetch": "timeout", "timeout_ms": chance.choice([1, 20, 1000])}
        if chance.random() < 0.2:
            settings["save_bandwidth"] = "100KiB"
        return cls(
            seed,
            num_ranks,
            is_latent=chance.random() < 0.2,
            num_pages=chance.choice([15, 16, 20, 40]),
            overlaps=chance.random() < 0.6,
            num_chats=chance.choice([2, 4, 8]),
            faults=chance.choice([0, 0.02, 0.1]),
            seconds={"load": chance.choice([1e-4, 2e-3]), "save": chance.choice([1e-4, 5e-3])},
            settings=settings,
            orders_by_prefix=chance.random() < 0.3,
        )


class _Store:
    """Storage of one rank that answers late, at times after half a minute, and loses a block now and then."""

    group_blocks = 1

    def __init__(self, blocks: dict[bytes, bytes], time: VirtualTime, chance: random.Random) -> None:
        self._blocks = blocks
        self._time = time
        self._chance = chance

    def exists(self, keys: Sequence[bytes]) -> Future[int]:
        return self._later(lambda: next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys)))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        def read(key: bytes, buffer: memoryview) -> bool:
            is_there = key in self._blocks and self._chance.random() > 0.05
            buffer[:] = self._blocks[key] if is_there else b"\xee" * len(buffer)
            return is_there

        return self._later(lambda: [read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)])

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        def write() -> list[bool]:
            self._blocks.update((key, bytes(buffer)) for key, buffer in zip(keys, buffers, strict=True))
            return [True] * len(keys)

        return self._later(write)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _later(self, answer: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(answer())

        seconds = 40.0 if self._chance.random() < 0.03 else self._chance.choice([1e-4, 1e-3, 1e-2, 0.1])
        self._time.call_after(seconds, run, "storage")
        return future


@contextmanager
def _seams() -> Iterator[None]:
    """Linkers that are made inside run in the virtual time of the rank whose thread it is."""

    def make_lane(*_: object, **__: object) -> SimulatedLane:
        device = current_rank().device
        return SimulatedLane(device, device.stream("load" if len(device.streams) == 1 else "save"))

    def make_path(form: Any, host: Any, *_: object) -> LatePath:
        rank = current_rank()
        path = LatePath(form, host, rank.device)
        copy_late = path.copy

        def copy(copy: Any) -> None:
            if rank.loads_fail and copy.direction is Direction.LOAD and rank.own.random() < 0.7:
                rank.device.faults[Direction.LOAD] = 0
            copy_late(copy)

        path.copy = copy  # type: ignore[method-assign]
        return path

    def open_storage(config: Any, identity: Any, *_: object) -> _Store:
        rank = current_rank()
        return _Store(rank.stored.setdefault(identity.digest(), {}), rank.time, rank.own)

    clock = SimpleNamespace(
        monotonic=lambda: current_rank().time.now(), sleep=lambda seconds: current_rank().spend(seconds)
    )
    identity = CacheIdentity("model", "float32", "", PAGE)
    seams: tuple[tuple[Any, str, Any], ...] = (
        (transfer_engine, "make_lane", make_lane),
        (transfer_engine, "make_submitter", lambda queue, _: SimulatedSubmitter(current_rank().device, queue)),
        (worker_half, "make_fallback", make_path),
        (replica, "build_worker", lambda *args, **options: build.build_worker(*args, make_path=make_path, **options)),
        (build, "open_storage", open_storage),
        (build, "_open_pin_keeper", lambda *_: NoKeeper()),
        (linker, "Ranks", ThreadRanks),
        (linker, "refuse_unsupported", lambda *_: None),
        (linker, "read_backend", lambda: ""),
        (linker, "read_identity", lambda *_: identity),
        *((module, "time", clock) for module in (linker, ranks, replica)),
    )
    with ExitStack() as stack:
        for owner, name, stand_in in seams:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def run(seed: int, num_rounds: int = 150) -> dict[str, int]:
    """A world from its seed, to its end; what happened how often. Raises whatever a rank has ended with."""
    world = World.drawn(seed)
    meeting = Meeting(world.num_ranks)
    counts: dict[str, int] = {}
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            counts.update(Rank(world, index, meeting).run(num_rounds))
        except threading.BrokenBarrierError:
            pass  # another one has ended with an error
        except BaseException as error:  # noqa: BLE001  # it is raised where the others have ended
            errors.append(error)
            meeting.barrier.abort()

    with _seams():
        threads = [threading.Thread(target=work, args=(index,)) for index in range(world.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        errors[0].add_note(f"{world}")
        raise errors[0]
    assert counts, "ranks wait for one another"
    return counts
