"""Where the ranks of a producer are, as a proxy says it."""

from __future__ import annotations

from typing import Any

import pytest

from kv_connector.scheduler.peers.params import MOST_RANKS, ports


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"remote_ports": [7, 9, 8], "remote_port": 7, "tp_size": 2}, (7, 9, 8)),
        ({"remote_port": 7, "tp_size": 4}, (7, 8, 9, 10)),
        ({"remote_port": 7, "tp_size": 1}, (7,)),
        ({"remote_port": 7}, (7, 8)),
        ({"remote_port": 7, "tp_size": None, "remote_ports": []}, (7, 8)),
        ({"remote_port": 65535, "tp_size": 2}, ()),
        ({"remote_port": 7, "tp_size": True}, ()),
        ({"remote_port": 7, "tp_size": MOST_RANKS + 1}, ()),
        ({"remote_ports": [7] * (MOST_RANKS + 1)}, ()),
        ({"remote_ports": "7"}, ()),
        ({}, ()),
    ],
)
def test_each_rank_has_a_port(params: dict[str, Any], found: tuple[int, ...]) -> None:
    """Of an engine with two ranks here: as many as there, unless the proxy says how many there are."""
    assert ports(params, 2, 1) == found


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"remote_port": 7, "tp_size": 2}, (7, 8, 9, 10)),
        ({"remote_port": 7, "tp_size": 1}, (7, 8)),
        ({"remote_port": 7}, (7, 8, 9, 10)),
        ({"remote_ports": [7, 8, 11, 12], "tp_size": 2}, (7, 8, 11, 12)),
        ({"remote_port": 7, "tp_size": MOST_RANKS}, ()),
    ],
)
def test_each_stage_has_as_many_ranks_as_the_tp_size_says(params: dict[str, Any], found: tuple[int, ...]) -> None:
    """Of two stages of two ranks here. vLLM's own key says the TP size alone."""
    assert ports(params, 2, 2) == found
