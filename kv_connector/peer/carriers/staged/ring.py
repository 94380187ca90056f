"""Slots of memory that two processes of one machine can share, without a name in any file system.

The memory is a memfd whose size is sealed, so that the other side cannot pull it away under us, and its descriptor
travels over a Unix socket. Nothing is left behind when either process is killed.

The socket has a name that every process of the machine can see. The kernel says which user has connected: others than
our own are shown out as they come. What connects is taken in at once, so that nobody fills the queue for long; who has
connected and sent nothing, and what was sent and never asked for, makes room for others, the oldest first, and goes by
itself after a while.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...base import PeerError
from ..pool import Bytes

TOKEN_BYTES = 16
_MOST_UNCLAIMED = 64
"""Connections that have sent nothing, and descriptors that nobody has asked for, of each."""
_UNCLAIMED_SECONDS = 30.0
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Ring:
    """`num_slots` slots of `slot_bytes`; `slots` is uint8 of shape (num_slots, slot_bytes), and begins at `address`."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        """Takes the descriptor over. Raises PeerError where it is not such memory."""
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size != num_slots * slot_bytes:
                raise PeerError("shared memory is not sealed or not as long as it was said to be")
            memory = mmap.mmap(fd, num_slots * slot_bytes)
        except OSError as error:
            raise PeerError(f"shared memory cannot be mapped: {error}") from error
        self.slots: Bytes = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)
        self.address: int = self.slots.ctypes.data


def create(num_slots: int, slot_bytes: int) -> int:
    """The descriptor of new memory; raises OSError where there is none."""
    fd = os.memfd_create("kv-peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_slots * slot_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def hand_over(name: str, token: str, fd: int) -> None:
    """Give a descriptor to who listens under `name`, with the token that says what it is for. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)  # a listener with a full queue refuses, and is not waited for
        sock.connect(b"\0" + name.encode())
        socket.send_fds(sock, [token.encode()], [fd])


@dataclass(frozen=True, slots=True)
class _Silent:
    """Who has connected and sent nothing yet."""

    sock: socket.socket
    until: float


@dataclass(frozen=True, slots=True)
class _Received:
    """A descriptor that nobody has asked for yet."""

    fd: int
    until: float


class Descriptors:
    """Receives descriptors from processes of this machine and user; who sends must know what nobody can guess."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, uid: int | None = None) -> None:
        """`uid`: whose processes may send; this process's user by default."""
        self.name = f"kv-peer-{secrets.token_hex(16)}"
        """What others pass to `hand_over`: an address in the abstract name space, gone with the process."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """Readable when `receive` should be called."""
        self._clock = clock
        self._uid = os.geteuid() if uid is None else uid
        self._silent: list[_Silent] = []  # the oldest first
        self._received: dict[str, _Received] = {}  # by token, the oldest first
        self.socket.setblocking(False)
        self.socket.bind(b"\0" + self.name.encode())
        self.socket.listen(_BACKLOG)

    def receive(self) -> None:
        """Take in what has come; raises nothing."""
        for _ in range(_BACKLOG):  # who connects without end keeps nobody for ever
            try:
                sock, _ = self.socket.accept()
            except OSError:
                break
            if _uid_of(sock) != self._uid:
                sock.close()
                continue
            sock.setblocking(False)
            self._silent.append(_Silent(sock, self._clock() + _UNCLAIMED_SECONDS))
        self._silent = [silent for silent in self._silent if not self._read(silent.sock)]
        self._forget_old()

    def take(self, token: str) -> int | None:
        """The descriptor that came with this token, once."""
        self.receive()
        found = self._received.pop(token, None)
        return None if found is None else found.fd

    def close(self) -> None:
        """Stop to listen; descriptors that nobody took are closed."""
        self.socket.close()
        for silent in self._silent:
            silent.sock.close()
        for received in self._received.values():
            os.close(received.fd)
        self._silent.clear()
        self._received.clear()

    def _read(self, sock: socket.socket) -> bool:
        """Take in what a connection has sent; whether it is done with."""
        try:
            token, fds, _, _ = socket.recv_fds(sock, 2 * TOKEN_BYTES + 1, 4)
        except BlockingIOError:
            return False
        except OSError:
            token, fds = b"", []
        sock.close()
        name = token.decode("ascii", "replace")
        if len(token) == 2 * TOKEN_BYTES and len(fds) == 1 and name not in self._received:
            self._received[name] = _Received(fds[0], self._clock() + _UNCLAIMED_SECONDS)
        else:
            for fd in fds:
                os.close(fd)
        return True

    def _forget_old(self) -> None:
        now = self._clock()
        while self._silent and (len(self._silent) > _MOST_UNCLAIMED or self._silent[0].until <= now):
            self._silent.pop(0).sock.close()
        while self._received:
            token = next(iter(self._received))
            if len(self._received) <= _MOST_UNCLAIMED and self._received[token].until > now:
                return
            os.close(self._received.pop(token).fd)


def _uid_of(sock: socket.socket) -> int:
    """The user of the process that has connected."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
