"""An engine of the model: one thread for each rank, and answers for whoever waits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from integration.mini_engine.model import ModelConfig, PagedLlama

from .blocks import LlmRequest
from .collectives import World
from .executor import Executor, Options, Response


@dataclass(frozen=True)
class Connector:
    """The two classes that TensorRT-LLM would find by name, or whatever makes such objects."""

    scheduler: Callable[[Any], Any]
    worker: Callable[[Any], Any]


def llm_args(options: Options, **settings: Any) -> SimpleNamespace:
    """Those of TensorRT-LLM's TorchLlmArgs that a connector may look at."""
    cache = SimpleNamespace(tokens_per_block=options.tokens_per_block, dtype="auto", host_cache_size=None)
    known = {"model": "random", "dtype": "float32", "kv_cache_config": cache, "cuda_graph_config": None}
    return SimpleNamespace(**known | settings)


@dataclass
class _Ended:
    responses: dict[int, Response] = field(default_factory=dict)
    condition: threading.Condition = field(default_factory=threading.Condition)
    errors: list[str] = field(default_factory=list)  # of the ranks that have ended with one


class LLM:
    """Ask with `start`, wait with `finish`. `shutdown` ends the ranks' threads and leaves copies as they are."""

    def __init__(
        self,
        options: Options,
        connector: Connector | None = None,
        tp_size: int = 1,
        dtype: torch.dtype = torch.float32,
        **variants: Any,
    ) -> None:
        """`variants`: of the model; see `ModelConfig`."""
        self.options = options
        config = ModelConfig(num_hidden_layers=3, tp_size=tp_size, **variants)
        self.model = PagedLlama.random(config, seed=0, dtype=dtype)
        self._world = world = World(tp_size)
        self._ended = _Ended()
        self._ids = itertools.count(1)
        self.ranks = [Executor(world, rank, self.model, options, self._respond) for rank in range(tp_size)]
        made = [threading.Event() for _ in self.ranks]
        self._threads = [
            threading.Thread(target=self._run, args=(rank, connector, event), daemon=True)
            for rank, event in zip(self.ranks, made, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        for event in made:
            event.wait()
        if self._ended.errors:
            raise RuntimeError(self._ended.errors[0])

    @property
    def error(self) -> str:
        """Why the executor has ended, if it has on all ranks: until then some still answer and take reports in."""
        errors = self._ended.errors
        return errors[0] if len(errors) == len(self.ranks) else ""

    def start(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 8, cache_salt: str | None = None
    ) -> list[int]:
        """Ask; returns the requests' ids."""
        ids = [next(self._ids) for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._put("request", (request_id, list(prompt), max_new_tokens, cache_salt))
        return ids

    def finish(self, request_ids: Sequence[int]) -> list[Response]:
        """Wait for these; each is named once."""
        ended = self._ended
        with ended.condition:
            done = ended.condition.wait_for(
                lambda: self.error or all(i in ended.responses for i in request_ids), timeout=60.0
            )
            assert done, "the engine stands still"
            gone = Response(LlmRequest(0, [], 0), None, f"the executor has ended: {self.error}")
            return [ended.responses.pop(i, gone) for i in request_ids]

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 8) -> list[Response]:
        """All at once."""
        return self.finish(self.start(prompts, max_new_tokens))

    def cancel(self, request_id: int) -> None:
        """The client goes away."""
        self._put("cancel", request_id)

    def call(self, function: Callable[[Executor], Any]) -> list[Any]:
        """On each rank's thread, between two iterations; their answers."""
        answers: dict[int, Any] = {}
        done = threading.Barrier(len(self.ranks) + 1, timeout=60.0)

        def answer(executor: Executor) -> None:
            answers[executor.rank] = function(executor)
            done.wait()

        self._put("call", answer)
        done.wait()
        return [answers[rank] for rank in range(len(self.ranks))]

    def turn(self) -> None:
        """Wake an idle loop up for an iteration."""
        self.call(lambda executor: None)

    def shutdown(self) -> None:
        """Whatever it is doing, the loop ends between two iterations."""
        self._put("stop", None)
        for thread in self._threads:
            thread.join()

    def _put(self, kind: str, value: Any) -> None:
        self.ranks[0].incoming.put((kind, value))

    def _respond(self, response: Response) -> None:
        with self._ended.condition:
            self._ended.responses[response.request.request_id] = response
            self._ended.condition.notify_all()

    def _run(self, executor: Executor, connector: Connector | None, made: threading.Event) -> None:
        self._world.enter(executor.rank)
        try:
            if connector is not None:
                executor.connect(*self._make(executor.rank, connector))
            made.set()
            while executor.iterate():
                pass
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits is told
            with self._ended.condition:
                self._ended.errors.append(f"{type(error).__name__}: {error}")
                self._ended.condition.notify_all()
            self._world.leave()
        finally:
            made.set()

    def _make(self, rank: int, connector: Connector) -> tuple[Any, Any]:
        """Both at the same time, in two threads, as the engine makes them."""
        args = llm_args(self.options, tensor_parallel_size=self._world.size)
        with ThreadPoolExecutor(2) as threads:
            worker = threads.submit(connector.worker, args)
            scheduler = threads.submit(connector.scheduler, args) if rank == 0 else None
            return worker.result(), scheduler.result() if scheduler is not None else None
