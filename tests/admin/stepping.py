"""A mini engine on a thread of its own, with an endpoint: it rests where nothing is to be done, as real ones do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from integration.mini_engine.engine import MiniEngine
from integration.mini_engine.request import EngineRequest
from kv_connector.admin.base import Refusal
from kv_connector.admin.client import AdminClient
from kv_connector.admin.endpoint import Endpoint
from kv_connector.config import Config
from kv_connector.index import BlockHasher
from kv_connector.types import BlockHash
from tests.fakes import check_engine, make_engine
from tests.storage.storages import HeldStorage

TOKEN = "what-operators-know-of-it"
BLOCK_SIZE = 4


class MiniPrefixes:
    """As the mini engine names blocks; a text is its bytes."""

    def __init__(self, engine: MiniEngine) -> None:
        self._root = engine._root

    def token_ids(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def hashes(self, token_ids: Sequence[int], cache_salt: str) -> list[BlockHash]:
        if cache_salt:
            raise Refusal(400, "cache_salt: the mini engine has none")
        return BlockHasher(BLOCK_SIZE, self._root).update(list(token_ids))


class SteppingEngine:
    """Its thread alone touches the engine and its halves; others hand it calls."""

    def __init__(self, config: Config, **options: Any) -> None:
        assert config.admin is not None
        self.engine = make_engine(config, block_size=BLOCK_SIZE, **options)
        half = self.engine.connector
        assert half is not None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_woken = threading.Event()
        self._is_stopping = False
        self.num_steps = 0
        self.prefixes = MiniPrefixes(self.engine)
        self.endpoint = Endpoint(
            config.admin, 0, half, config.host_memory, self.prefixes, self._is_woken.set, half._shared.clock
        )
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    def do(self, call: Callable[[], Any]) -> Any:
        """On the engine's thread, between two steps."""
        future: Future[Any] = Future()
        self._calls.append((call, future))
        self._is_woken.set()
        return future.result(60)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = 2) -> list[EngineRequest]:
        """One after the other."""
        return [self.do(lambda prompt=prompt: self.engine.generate([prompt], num_tokens)[0]) for prompt in prompts]

    def stop(self) -> None:
        """End its thread, with all invariants checked."""
        self._is_stopping = True
        self._is_woken.set()
        self._thread.join(60)
        self.endpoint.close()
        self.engine.run()
        check_engine(self.engine)
        self.engine.shutdown()

    def _run(self) -> None:
        while not self._is_stopping:
            self.endpoint.serve()
            while self._calls:
                call, future = self._calls.popleft()
                try:
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    future.set_exception(error)
            if self.engine.scheduler.has_work:
                self.engine.step()
                self.num_steps += 1
            elif not self.endpoint.has_waiting and not self._calls:
                self._is_woken.wait()
                self._is_woken.clear()


@contextmanager
def stepping(
    storages: Sequence[HeldStorage] | None = None, **settings: Any
) -> Iterator[tuple[SteppingEngine, AdminClient]]:
    """An engine with its endpoint where `admin` says, and a client that knows the token."""
    engine = SteppingEngine(
        Config.from_mapping({"host_memory": 64 << 10, "load_choice": "sync", **settings}), storages=storages
    )
    try:
        yield engine, _client(settings["admin"])
    finally:
        engine.stop()


def _client(admin: Mapping[str, str]) -> AdminClient:
    url = f"http://{admin['bind']}" if "bind" in admin else ""
    return AdminClient(url, admin.get("socket", ""), TOKEN.encode())
