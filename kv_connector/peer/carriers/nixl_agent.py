"""NIXL's agent: how it is started, and the seam where its exceptions become ours. Nothing here unpickles."""

from __future__ import annotations

import base64
import importlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from ...errors import ConfigError
from ...extras import pip_line
from ..base import PeerError

MODULES = ("nixl_cu12", "nixl_cu13")
DROP_SECONDS = 5.0
"""How long a transfer is waited for whose link was lost."""
LONGEST_TRANSFER_SECONDS = 30.0
"""What UCX was given to write has landed by then or never will: over RDMA its retries take 7 times 1 to 4 s, over TCP a
network that is cut longer loses the connection's link on the side channel, too."""
_START_SECONDS = 60.0


def why_not() -> str | None:
    """Why NIXL cannot be used here; None where it can."""
    if not any(find_spec(name) for name in MODULES):
        return f"peer.kind='nixl' needs NIXL: {pip_line('nixl-cu12')} or, with CUDA 13, {pip_line('nixl-cu13')}"
    return None


def start_agent() -> Any:
    """An agent with UCX, under a name that nobody can guess. Raises ConfigError where NIXL is missing or does not
    start: it may hang where the network is set up badly, so it is given a limited time."""
    reason = why_not()
    if reason is not None:
        raise ConfigError(reason)
    # Memory that is registered again and again would pile up otherwise (vLLM #24264). Read by UCX when it is loaded.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    made: list[Any] = []

    def make() -> None:
        try:
            api = importlib.import_module(f"{next(module for module in MODULES if find_spec(module))}._api")
            agent = api.nixl_agent(f"kv-{secrets.token_hex(12)}", api.nixl_agent_config(backends=[]))
            agent.create_backend("UCX", agent.get_plugin_params("UCX"))
            made.append(agent)
        except Exception as error:  # noqa: BLE001 - a thread's top: it is raised where it was asked for
            made.append(error)

    thread = threading.Thread(target=make, name="kv-nixl-start", daemon=True)
    thread.start()
    thread.join(_START_SECONDS)
    result = made[0] if made else TimeoutError(f"nothing within {_START_SECONDS:g} s")
    if isinstance(result, Exception):
        raise ConfigError(
            f"NIXL does not start: {type(result).__name__}: {result}; UCX_LOG_LEVEL=info says what UCX finds, UCX_TLS "
            "names what it may use"
        ) from result
    return result


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """NIXL has exceptions of its own: they leave as PeerError."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{what}: {type(error).__name__}: {error}") from error


def encode_metadata(metadata: bytes) -> str:
    """As plain JSON; the reverse of `add_remote`."""
    return base64.b64encode(metadata).decode()


def add_remote(agent: Any, metadata: str) -> str:
    """Let this agent write to what a peer's metadata tells of; the peer's agent's name. What was told
    before of the same agent stays. Raises PeerError."""
    try:
        raw = base64.b64decode(metadata, validate=True)
    except ValueError as error:
        raise PeerError("its agent's metadata is not base64") from error
    with foreign("NIXL does not accept it"):
        found = agent.add_remote_agent(raw)
    return found.decode() if isinstance(found, bytes) else str(found)
