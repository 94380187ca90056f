"""What a transport is opened with: settings with which none can be are named."""

from __future__ import annotations

import pytest

from kv_connector.errors import ConfigError
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from tests.peer.peers import SECRET, STAGING, Pool, Side, info_of


def endpoint_of(bind: str = "127.0.0.1", port: int = 0) -> Endpoint:
    return Endpoint(info_of(Pool()), bind, port, SECRET, 1.0)


def test_what_is_shown_of_a_side_has_no_secret() -> None:
    """Not in a traceback or a log either."""
    assert SECRET.decode() not in repr(endpoint_of())


def test_a_port_in_use_is_named(listener: Side) -> None:
    with pytest.raises(ConfigError, match=rf"port {listener.transport.port}: cannot listen there"):
        SharedMemoryTransport(Pool().pool, endpoint_of(port=listener.transport.port), STAGING)


def test_an_address_that_cannot_be_is_named() -> None:
    """A part of a name has at most 63 characters, and the system does not even look such a one up."""
    with pytest.raises(ConfigError, match=r"peer.bind='x+\.local', port 0: cannot listen there"):
        SharedMemoryTransport(Pool().pool, endpoint_of(f"{'x' * 64}.local"), STAGING)


def test_too_little_staging_memory_is_named() -> None:
    with pytest.raises(ConfigError, match=r"peer.staging_memory=4096 is too small: give at least \d+"):
        SharedMemoryTransport(Pool().pool, endpoint_of(), 4096)
