"""Between engines of two TP sizes whole pieces are coded, and heads go as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from kv_connector.triton_kernels.coded_rows import can_code

from kv_connector.transfer.memory import host_form
from kv_connector.transfer.paths.coded_slots import HostCoder
from kv_connector.worker.peers import pool_of
from tests.peer import tp_engines
from tests.peer.test_tp_sizes import MODELS, SOURCES, TARGETS
from tests.peer.tp_engines import Engines


@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("model", ["NHD", "MLA", "MLA beside heads"])
def test_each_rank_gets_its_heads(model: str, producer: int, consumer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their bytes are: a block of these hardly fits. And whatever ranks say of the form that they take: these
    all say the same."""
    tried: list[object] = []
    encode, make = HostCoder.encode, HostCoder.__init__

    def said_alike(self: HostCoder, *given: Any) -> None:
        make(self, *given)
        self.form = "the same of all"

    def watched(self: HostCoder, *given: Any) -> Any:
        tried.append(given)
        return encode(self, *given)

    monkeypatch.setattr(HostCoder, "__init__", said_alike)
    monkeypatch.setattr(HostCoder, "encode", watched)
    monkeypatch.setattr(host_form, "_can_code", lambda region: can_code(region.piece_bytes))
    monkeypatch.setattr(tp_engines, "pool_of", partial(pool_of, codes=True))
    engines = Engines(MODELS[model], producer, consumer, None)
    engines.compute(SOURCES)
    sent, received = engines.offer(SOURCES), engines.ask(TARGETS, len(SOURCES))
    engines.ready(sent)
    assert all(engines.until_ended(received, engines.consumer))
    assert all(engines.until_ended(sent, engines.producer))
    engines.check(TARGETS)
    assert bool(tried) is (model == "MLA" or producer == consumer)
    engines.close()
