"""The worker side of the mini engine: runs the model on one step's chunks and the worker halves around it.

`LocalRunner` lives in the engine's process; `ProcessRunner` is the same behind a pipe in a process of its own, which
shows that a plan and a report are all that crosses.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kv_connector.base import KVConnectorWorker
from kv_connector.types import StepPlan, StepReport

from .attention import StepInputs
from .kv_layout import LayerCache
from .model import LayerHooks, PagedLlama, SequenceChunk


class Model(Protocol):
    """What the runner needs of a model; `LlamaModel` is the real one."""

    def allocate_kv_caches(self, num_blocks: int, block_size: int) -> list[dict[str, LayerCache]]:
        """Cache tensors by layer name, one dict per rank."""

    def prepare(self, chunks: Sequence[SequenceChunk], block_size: int) -> Any:
        """The step's inputs on the device, before any load is submitted."""

    def next_tokens(
        self, inputs: Any, kv_caches: Sequence[Mapping[str, LayerCache]], hooks: Sequence[LayerHooks]
    ) -> tuple[list[int], list[int] | None]:
        """The token that follows each chunk, and what the first draft layer guesses behind it, if there is one."""


class LlamaModel:
    """Greedy sampling on a `PagedLlama`."""

    def __init__(self, llama: PagedLlama) -> None:
        self.llama = llama

    def allocate_kv_caches(self, num_blocks: int, block_size: int) -> list[dict[str, LayerCache]]:
        return self.llama.allocate_kv_caches(num_blocks, block_size)

    def prepare(self, chunks: Sequence[SequenceChunk], block_size: int) -> StepInputs:
        return self.llama.prepare(chunks, block_size)

    def next_tokens(
        self, inputs: StepInputs, kv_caches: Sequence[Mapping[str, LayerCache]], hooks: Sequence[LayerHooks]
    ) -> tuple[list[int], list[int] | None]:
        logits, draft = self.llama.compute(inputs, kv_caches, hooks)
        return logits.argmax(-1).tolist(), None if draft is None else draft[0].argmax(-1).tolist()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed and what its copies came to; it crosses the process boundary."""

    token_ids: list[int]
    draft_token_ids: list[int] | None = None
    reports: tuple[StepReport, ...] = ()
    invalid_block_ids: frozenset[int] = frozenset()
    received: frozenset[str] = frozenset()
    failed_receiving: frozenset[str] = frozenset()


class LocalRunner:
    """Model, caches and one worker half per rank (or none)."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        build_worker: Callable[[int, int], KVConnectorWorker] | None = None,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self.kv_caches = model.allocate_kv_caches(num_blocks, block_size)
        world_size = len(self.kv_caches)
        self._received: Counter[str] = Counter()  # ranks on which a request's asynchronous load has ended
        self._failed: set[str] = set()
        self.workers = [build_worker(rank, world_size) for rank in range(world_size)] if build_worker else []
        for worker, caches in zip(self.workers, self.kv_caches, strict=False):
            worker.register_kv_caches(caches, num_blocks)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.kv_caches)

    def execute(self, plan: StepPlan | None, chunks: Sequence[SequenceChunk]) -> StepResult:
        """One step, in the order of calls that `kv_connector.base` states."""
        inputs = self._model.prepare(chunks, self._block_size) if chunks else None
        for worker in self.workers:
            assert plan is not None, "a runner with workers needs a plan in every step"
            worker.handle_preemptions(plan)
            worker.bind_connector_metadata(plan)
            worker.start_load_kv()
        token_ids, draft_token_ids = [], None
        if chunks:
            token_ids, draft_token_ids = self._model.next_tokens(inputs, self.kv_caches, self.workers)
        for worker in self.workers:
            worker.wait_for_save()
        received, failed = self._receive()
        invalid = frozenset().union(*(worker.get_block_ids_with_load_errors() for worker in self.workers))
        reports = tuple(worker.build_connector_worker_meta() for worker in self.workers)
        for worker in self.workers:
            worker.clear_connector_metadata()
        return StepResult(token_ids, draft_token_ids, reports, invalid, received, failed)

    def _receive(self) -> tuple[frozenset[str], frozenset[str]]:
        """Requests whose load has ended on all ranks by now, and those of them where it failed on one."""
        for worker in self.workers:
            ended, failed = worker.get_finished()
            self._received.update(ended)
            self._failed |= failed
        received = frozenset(r for r, count in self._received.items() if count == len(self.workers))
        for request_id in received:
            del self._received[request_id]
        failed_receiving = received & self._failed
        self._failed -= received
        return received, failed_receiving

    def shutdown(self) -> None:
        """Stop the worker halves."""
        for worker in self.workers:
            worker.shutdown()


class ProcessRunner:
    """A `LocalRunner` in another process; `build` makes it there and must be picklable."""

    def __init__(self, build: Callable[[], LocalRunner]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, build), daemon=True)
        self._process.start()
        remote.close()
        self.world_size: int = self._exchange()

    def execute(self, plan: StepPlan | None, chunks: Sequence[SequenceChunk]) -> StepResult:
        """As `LocalRunner.execute`."""
        result: StepResult = self._exchange((plan, chunks))
        return result

    def shutdown(self) -> None:
        """Stop the process; its worker halves finish their copies first."""
        self._pipe.send(None)
        self._process.join()
        self._pipe.close()

    def _exchange(self, message: Any = None) -> Any:
        try:
            if message is not None:
                self._pipe.send(message)
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise RuntimeError(f"the worker process ended with exit code {self._process.exitcode}") from None


def _serve(pipe: Connection, build: Callable[[], LocalRunner]) -> None:
    runner = build()
    pipe.send(runner.world_size)
    while (message := pipe.recv()) is not None:
        pipe.send(runner.execute(*message))
    runner.shutdown()
