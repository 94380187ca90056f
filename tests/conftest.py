"""Fixtures that several test modules share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here, for the GPU")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
