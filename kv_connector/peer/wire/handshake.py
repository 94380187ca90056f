"""Who may talk: a challenge and response over a shared secret, then identities. Pure: bytes in, bytes out.

    caller                                             listener
    Hello         {version, nonce C}        ------>
                                            <------    Challenge     {version, nonce S, proof}
    Introduction  {info}          sealed    ------>
                                  sealed    <------    Introduction  {info}   or   Denied {reason}

The secret is never sent: proof and seals come from it and both nonces (`session`). Nobody's info (identity, engine,
pool) is told before the other has proved that it knows the secret, and nobody else can have written it. Both compare
them and name both values of what differs. What somebody says who has proved nothing is shown to nobody, but for
the number of a version that is not ours.
"""

from __future__ import annotations

import hmac
import secrets

from ..base import VERSION, PeerError
from .messages import MAX_REASON, Challenge, Denied, Hello, Introduction, WireMessage, decode, encode
from .peer_info import PeerInfo
from .session import NONCE_BYTES, Session

_UNKNOWN = "it does not know the secret: give both engines the same peer.secret"


class Handshake:
    """One side's part. `take` is given each message of the peer and returns the answers; `peer` is set at the end, and
    everything that is said from then on goes through `session`."""

    def __init__(self, secret: bytes, info: PeerInfo, is_caller: bool) -> None:
        self.peer: PeerInfo | None = None
        self.session: Session | None = None
        self.refusal = b""  # what a peer that knows the secret is told of why it is refused
        self.is_caller = is_caller
        self._secret = secret
        self._info = info
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def begin(self) -> list[bytes]:
        """What is said first."""
        return [encode(Hello(VERSION, self._nonce))] if self.is_caller else []

    def take(self, payload: bytes) -> list[bytes]:
        """The peer's next message. Raises PeerError where it fails."""
        if self.session is not None:
            return self._introduced(self.session, payload)
        message = decode(payload)
        if self.is_caller:
            return self._challenged(message)
        if not isinstance(message, Hello):
            raise PeerError("something else came where a hello was expected")
        _check_version(message.version)
        self.session = Session(self._secret, message.nonce, self._nonce, is_caller=False)
        return [encode(Challenge(VERSION, self._nonce, self.session.proof))]

    def _challenged(self, message: WireMessage) -> list[bytes]:
        if not isinstance(message, Challenge):
            raise PeerError("something else came where a challenge was expected")
        _check_version(message.version)
        session = Session(self._secret, self._nonce, message.nonce, is_caller=True)
        if not hmac.compare_digest(session.proof, message.proof):
            raise PeerError(_UNKNOWN)
        self.session = session
        return [session.seal(encode(Introduction(self._info)))]

    def _introduced(self, session: Session, payload: bytes) -> list[bytes]:
        try:
            opened = session.open(payload)
        except PeerError:
            if self.is_caller:
                raise  # the listener has proved that it knows the secret
            raise PeerError(_UNKNOWN) from None
        message = decode(opened)
        if isinstance(message, Denied) and self.is_caller:
            raise PeerError(f"it refused: {message.reason}")
        if not isinstance(message, Introduction):
            raise PeerError("something else came where an introduction was expected")
        differences = self._info.differences(message.info)
        if differences:
            reason = "; ".join(message.info.differences(self._info))[:MAX_REASON]
            self.refusal = b"" if self.is_caller else session.seal(encode(Denied(reason)))
            raise PeerError("; ".join(differences))
        self.peer = message.info
        return [] if self.is_caller else [session.seal(encode(Introduction(self._info)))]


def _check_version(version: int) -> None:
    if version != VERSION:
        raise PeerError(f"version is {VERSION} here and {version} there")
