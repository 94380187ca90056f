"""Settings of KV transfers between engines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..values import check_host, choice, is_any_address, parse_size, shown
from .choices import PeerRole, PeerRoute, WireForm
from .secrets import LEAST_CHARACTERS, is_encodable, is_variable, shown_variable

MOST_PORT = 65_535
_PEER_KINDS = ("shared_memory", "nixl")
_SECRET_ENV = "KV_CONNECTOR_PEER_SECRET"


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """KV transfers between engines. Sizes accept text such as `"64MiB"`.

    kind: `shared_memory` connects engines of one machine and needs no package; `nixl` engines of any machines, by NIXL
        over the transports that UCX finds.
    role: what this engine does for others; in vLLM it follows from `kv_role`.
    route: how blocks get from one engine's device to another's. Engines that exchange blocks must arrive at the same
        route.
    wire_form: how blocks lie in host memory on the staged route.
    bind: address to listen at for other engines.
    port: rank r listens at this port plus r, and those of data-parallel engine n at ports n times the number of ranks
        higher; 0 takes free ports, which a consumer learns only from the producer's answer (`kv_transfer_params`).
    host: address under which others reach this engine; `bind` if empty.
    secret: shared by all engines that exchange blocks, at least 16 characters; if empty, read from the environment
        variable `secret_env`, which is better: engines log their settings.
    secret_env: the environment variable with the secret.
    timeout_ms: how long a peer may take to answer a handshake, or to read what it is sent.
    deadline_ms: how long a producer holds blocks that nobody has asked for, and how long a consumer waits while nothing
        arrives.
    staging_memory: bytes of host memory for each link and direction, on each side, on the staged route; of two engines'
        sizes the smaller is used.
    """

    kind: str = "shared_memory"
    role: PeerRole = PeerRole.BOTH
    route: PeerRoute = PeerRoute.AUTO
    wire_form: WireForm = WireForm.RAW
    bind: str = "127.0.0.1"
    port: int = 0
    host: str = ""
    secret: str = field(default="", repr=False)
    secret_env: str = _SECRET_ENV
    timeout_ms: int = 10_000
    deadline_ms: int = 60_000
    staging_memory: int = 64 << 20

    def __post_init__(self) -> None:
        if self.kind not in _PEER_KINDS:
            raise ConfigError(
                f"peer.kind={shown(self.kind)} is unknown: give one of {', '.join(map(repr, _PEER_KINDS))}"
            )
        for name in ("bind", "host"):
            object.__setattr__(self, name, check_host(f"peer.{name}", getattr(self, name)))
        for name in ("secret", "secret_env"):  # neither is shown: who mistakes one for the other has given the secret
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"peer.{name} is not text: give it in quotes")
        object.__setattr__(self, "role", choice(PeerRole, self.role, "peer.role"))
        object.__setattr__(self, "route", choice(PeerRoute, self.route, "peer.route"))
        object.__setattr__(self, "wire_form", choice(WireForm, self.wire_form, "peer.wire_form"))
        if self.wire_form is WireForm.LOSSLESS and self.route is PeerRoute.DIRECT:
            raise ConfigError(
                "peer.wire_form='lossless' codes what goes through host memory, and peer.route='direct' sends nothing "
                "that way: give 'staged' or 'auto', or leave one of them out"
            )
        object.__setattr__(self, "staging_memory", parse_size(self.staging_memory, "peer.staging_memory"))
        for name, least, most in (
            ("port", 0, MOST_PORT),
            ("timeout_ms", 1, 1 << 31),
            ("deadline_ms", 1, 1 << 31),
            ("staging_memory", 1 << 16, 1 << 40),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"peer.{name}={shown(value)}: give an integer from {least} to {most}")
        self._check_address_and_secret()

    def _check_address_and_secret(self) -> None:
        given = "host" if self.host else "bind"
        if not self.host:
            object.__setattr__(self, "host", self.bind)
        if is_any_address(self.host):
            raise ConfigError(
                f"peer.{given}={shown(self.host)} is no address that others can reach: give peer.host this machine's, "
                "or give it as peer.bind and leave peer.host out"
            )
        if not self.secret:
            if not is_variable(self.secret_env):
                raise ConfigError(
                    f"peer.secret_env names no environment variable: give one such as {_SECRET_ENV!r}, or give "
                    "peer.secret"
                )
            object.__setattr__(self, "secret", os.environ.get(self.secret_env, ""))
        if not is_encodable(self.secret):
            raise ConfigError(f"peer.secret, or {self._variable}, is not UTF-8: give it as text of that encoding")
        num_characters = len(self.secret.strip())
        if num_characters < LEAST_CHARACTERS:
            raise ConfigError(
                f"peer.secret has {num_characters} characters: give at least {LEAST_CHARACTERS}, or set "
                f"{self._variable} to them, the same for all engines that talk to each other; blanks "
                "at its ends do not count"
            )

    @property
    def _variable(self) -> str:
        return shown_variable("peer.secret_env", self.secret_env, _SECRET_ENV)

    @property
    def produces(self) -> bool:
        """Whether prompts are computed for others."""
        return self.role is not PeerRole.CONSUMER

    @property
    def consumes(self) -> bool:
        """Whether prompts are continued that others computed."""
        return self.role is not PeerRole.PRODUCER
