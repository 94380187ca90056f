"""The mini engine: scheduler, runner and, if asked for, a connector between them. One process, one thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kv_connector.index import BlockHasher, CacheIdentity, root_hash
from kv_connector.scheduler import SchedulerHalf

from .request import EngineRequest
from .runner import LocalRunner, ProcessRunner
from .scheduler import Scheduler


class MiniEngine:
    """Call `add`, then `step` while there is work; or `generate` for both."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: LocalRunner | ProcessRunner,
        identity: CacheIdentity,
        connector: SchedulerHalf | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.connector = connector
        self._runner = runner
        self._root = root_hash(identity)
        self._ids = itertools.count()
        if connector is not None:
            scheduler.bind_connector(connector)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        request_id: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> EngineRequest:
        """Queue a prompt; the returned request fills up while `step` runs. `kv_transfer_params`: as vLLM has them."""
        request = EngineRequest(
            request_id=request_id or f"request-{next(self._ids)}",
            token_ids=list(prompt_token_ids),
            max_new_tokens=max_new_tokens,
            hasher=BlockHasher(self.scheduler.block_size, self._root),
            kv_transfer_params=kv_transfer_params,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> list[EngineRequest]:
        """Run one step; returns the requests that finished in it."""
        step = self.scheduler.schedule()
        result = self._runner.execute(step.plan, step.chunks)
        return self.scheduler.update(
            step,
            result.token_ids,
            result.reports,
            result.invalid_block_ids,
            result.draft_token_ids,
            result.received,
            result.failed_receiving,
        )

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[EngineRequest]:
        """Run prompts to their ends, batched; returns their requests in order."""
        requests = [self.add(prompt, max_new_tokens) for prompt in prompts]
        self.run()
        return requests

    def run(self) -> None:
        """Step until nothing is left to do, copies included."""
        while self.scheduler.has_work:
            self.step()

    def shutdown(self) -> None:
        """Stop the worker side."""
        self._runner.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
