"""Where the endpoint is reached: a loopback port, or a Unix socket that only this user may open."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config import AdminConfig
from ..errors import ConfigError
from ..values import shortened, shown

_BACKLOG = 16
_SECONDS_TO_ANSWER = 1.0
_LOCK_PAUSE_SECONDS = 0.02
_LOCK_TRIES = 500


class Listener:
    """A listening socket, `where` for the log, and what of it lies in the file system."""

    def __init__(self, sock: socket.socket, where: str, path: Path | None = None) -> None:
        self.socket = sock
        self.where = where
        self._path = path
        self._inode = None if path is None else _inode(path)

    def close(self) -> None:
        """Nobody connects any more, and whoever waits in `accept` is woken. A socket that another engine has put in
        the same place stays. Idempotent."""
        if self._path is not None and self._inode is not None and _inode(self._path) == self._inode:
            with suppress(OSError):
                self._path.unlink()  # while the socket is open no other has its inode
        self._inode = None
        with suppress(OSError):  # closed before
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def listen(config: AdminConfig, replica: int) -> Listener:
    """For data-parallel engine `replica`. Raises ConfigError where that cannot be."""
    return _at_port(*config.address(replica)) if config.bind else _at_path(config.path(replica))


def _at_port(host: str, port: int) -> Listener:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"admin.bind: port {port} of {host} cannot be listened at: {error.strerror}; give another port"
        ) from error
    return Listener(sock, f"http://{f'[{host}]' if ':' in host else host}:{port}")


def _at_path(path: Path) -> Listener:
    """A socket that an engine has left which was killed is replaced; one that answers, or anything else, is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _alone_in(path.parent):
            _remove_stale(path)
            sock.bind(str(path))
            os.chmod(path, 0o600)  # nobody can connect before `listen`
            sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"admin.socket={shown(str(path))} cannot be listened at: {shortened(str(error.strerror or error))}; give a "
            "path in a folder that is there and that this user may write to"
        ) from error
    except ConfigError:
        sock.close()
        raise
    return Listener(sock, f"unix:{path}", path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other engine looks for a left socket in this folder meanwhile: two would take each other's new one away.
    Each holds it for a moment, and whoever may read the folder could do so for ever. Raises OSError then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(_LOCK_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_PAUSE_SECONDS)
        else:
            raise OSError(errno.EDEADLK, "another program holds a lock on its folder and keeps it")
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"admin.socket={shown(str(path))} is there and no socket: give another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SECONDS_TO_ANSWER)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:  # nobody listens
            path.unlink()
            return
        except (TimeoutError, BlockingIOError):
            pass  # somebody does, who is busy
    raise ConfigError(
        f"admin.socket={shown(str(path))} is in use, another engine or program listens there: give each its own"
    )


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
