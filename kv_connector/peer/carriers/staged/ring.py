"""Slots of memory that two processes of one machine can share, without a name in any file system.

The memory is a memfd whose size is sealed, so that the other side cannot pull it away under us, and its descriptor
travels over a Unix socket. Nothing is left behind when either process is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import weakref

import numpy as np

from ...base import PeerError
from ..pool import Bytes

TOKEN_BYTES = 16
_MOST_UNCLAIMED = 16
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


class Descriptors:
    """Receives descriptors from processes of this machine; who sends must know what nobody can guess."""

    def __init__(self) -> None:
        self.name = f"kv-peer-{secrets.token_hex(16)}"
        """What others pass to `hand_over`: an address in the abstract name space, gone with the process."""
        self._received: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(b"\0" + self.name.encode())
        self._socket.listen(_MOST_UNCLAIMED)

    def take(self, token: str) -> int | None:
        """The descriptor that came with this token, once."""
        while self._receive():
            pass
        return self._received.pop(token, None)

    def close(self) -> None:
        """Stop to listen; descriptors that nobody took are closed."""
        self._socket.close()
        for fd in self._received.values():
            os.close(fd)
        self._received.clear()

    def _receive(self) -> bool:
        """Take one in; whether there was one."""
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return False
        with sock:
            sock.setblocking(False)  # who gives one has sent it by the time that it is asked for
            try:
                token, fds, _, _ = socket.recv_fds(sock, 2 * TOKEN_BYTES + 1, 4)
            except OSError:
                return True
        if len(token) != 2 * TOKEN_BYTES or len(fds) != 1 or len(self._received) >= _MOST_UNCLAIMED:
            for fd in fds:
                os.close(fd)
        else:
            self._received[token.decode("ascii", "replace")] = fds[0]
        return True
