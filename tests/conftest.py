"""Fixtures that several test modules share."""

from __future__ import annotations

import pytest
import torch

from kv_connector.transfer import engine as engine_module
from tests.engines import ManualLane


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here, for the GPU")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[ManualLane]:
    """The engine's load and save lanes, in this order, once it is made."""
    made: list[ManualLane] = []

    def make(*_: object, **__: object) -> ManualLane:
        made.append(ManualLane())
        return made[-1]

    monkeypatch.setattr(engine_module, "make_lane", make)
    return made
