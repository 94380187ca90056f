"""Events for routers: what nobody fetches is bounded, and its loss is told."""

from __future__ import annotations

import pytest

from kv_connector import events
from kv_connector.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from kv_connector.types import BlockHash, Tier

BLOCKS = [BlockHash(b"a")]
STORED, REMOVED = BlockStored(BLOCKS, Tier.HOST), BlockRemoved(BLOCKS, Tier.HOST)


def test_a_reader_that_comes_late_is_told_to_start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_PENDING", 3)
    log = EventLog()
    for _ in range(3):
        log.add(STORED)
    assert log.take() == [STORED] * 3, "as many as are kept, in their order"
    for _ in range(4):
        log.add(STORED)
    log.add(REMOVED)
    assert log.take() == [AllBlocksCleared(Tier.HOST), STORED, REMOVED], "what came behind the loss counts"
    assert log.take() == []


def test_nothing_is_kept_where_nobody_reads() -> None:
    log = EventLog(is_read=False)
    log.add(STORED)
    assert log.take() == []
