"""A linker that tests may ask things, in the scheduler process of a real SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

import zmq
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

from integration.faults import break_loads
from kv_connector.engines.sglang import TieredKVLinker
from tests.waiting import until


class WatchedLinker(TieredKVLinker):
    """Answers whoever listens at `control` in its settings, once in each round of SGLang's scheduler."""

    def __init__(self, server_args: Any, params: Any, *, extra_config: Mapping[str, Any], **options: Any) -> None:
        settings = dict(extra_config)
        control = settings.pop("control")
        super().__init__(server_args, params, extra_config=settings, **options)
        self._control = Client(control, "AF_UNIX")
        _wake_for(self._control)

    def num_completed_offloads(self) -> int:
        while self._control.poll():
            name, args = self._control.recv()
            try:
                answer = getattr(self, name)(*args)
            except Exception as error:  # noqa: BLE001 - whoever asks has the words for it: here it would end the engine
                answer = error
            self._control.send(answer)
        return super().num_completed_offloads()

    def answer_stats(self) -> dict[str, float]:
        """Our counters, and what is held at the moment."""
        held = {
            "promises": len(self._promises),
            "queued_loads": len(self._queued),
            "open_offers": self._offers.num_open,
        }
        return self.stats() | held

    def answer_decided(self) -> dict[str, float]:
        """Counters of what the scheduler half has decided, and in how many rounds."""
        stats = self.answer_stats() | {"rounds": self._num_rounds}
        names = ("rounds", "sync_loads", "saves_on_compute_blocks", "known_blocks", "promises", "open_offers")
        return {name: stats[name] for name in names}

    def answer_advance(self) -> None:
        """A step without requests, as there is one once in a while where nothing happens."""
        self._replica.advance()

    def answer_check(self) -> None:
        """Wait for what is under way, let promises lapse, and look at every invariant. Of one rank only."""
        self._give_up(self._promises.clear())
        until(
            lambda: not self._offers and not self._half.has_pending_push_work(),
            super().num_completed_offloads,
            self.answer_stats,
        )
        self._half.check()
        stats = self.stats()
        assert stats["host_leased_blocks"] == stats["jobs_in_flight"] == 0, stats
        assert not self._queued and not self._loading

    def answer_break_loads(self, broken: bool) -> None:
        """Loads of the last rank fail, twice over, until they are mended: what one has not loaded none has."""
        ranks = self._replica._ranks
        if ranks.rank == ranks.count - 1:
            break_loads(self._replica.worker, broken)

    def answer_limit_host(self, num_blocks: int | None) -> None:
        """Use so many host blocks only."""
        self._half.resize_host(num_blocks)

    def answer_retract(self, num_steps: int) -> None:
        """As SGLang does it that was started with SGLANG_TEST_RETRACT and this interval."""
        from sglang.srt.managers import scheduler

        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, num_steps


def _wake_for(control: Connection) -> None:
    """An engine of this process that sleeps while it has nothing to do (`--sleep-on-idle`) wakes when it is asked."""
    sleep = IdleSleeper.maybe_sleep

    def sleep_until_asked(sleeper: Any) -> None:
        sleeper.poller.register(control.fileno(), zmq.POLLIN)
        sleep(sleeper)

    IdleSleeper.maybe_sleep = sleep_until_asked
