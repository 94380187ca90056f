"""That a process has ended is believed of this machine's kernel alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kv_connector.peer.carriers.processes import PeerProcess, own_process

TELL = "from kv_connector.peer.carriers.processes import own_process as p; import json; print(json.dumps(p())); input()"


class Child:
    """Another process, and what it tells of itself."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.popen.stdout is not None
        self.told: dict[str, Any] = json.loads(self.popen.stdout.readline())

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.kill()
    for stream in (child.popen.stdin, child.popen.stdout):
        assert stream is not None
        stream.close()


def test_a_process_has_ended_once_it_was_killed(child: Child) -> None:
    process = PeerProcess(child.told)
    assert not process.has_ended
    child.kill()
    assert process.has_ended


def test_what_tells_of_this_process_is_about_this_process() -> None:
    assert not PeerProcess(own_process()).has_ended


@pytest.mark.parametrize("field", ["boot", "namespace", "start"])
def test_a_process_of_another_machine_or_container_or_an_earlier_one_is_never_known_to_have_ended(
    child: Child, field: str
) -> None:
    """Its PID is somebody else's here."""
    process = PeerProcess({**child.told, field: "another" if field != "start" else child.told["start"] - 1})
    child.kill()
    assert not process.has_ended


@pytest.mark.parametrize("told", [None, [], {}, {"pid": "1"}, {"pid": -1}, {"pid": 1 << 70}, {"pid": 0}, {"pid": True}])
def test_whatever_a_peer_tells_does_no_harm(told: object) -> None:
    assert not PeerProcess(told).has_ended
