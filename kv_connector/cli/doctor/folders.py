"""A storage folder: whose it is, who may write to it, and what lies under it."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from ...storage.filesystem.layout import FolderLayout
from ..text import size_text
from .finding import Finding, ok, problem, warning

LEAST_FREE = 8 << 20
"""A pack: less is no storage."""
_FLEETING = {
    "tmpfs": "it is memory: what lies there takes away from host_memory and is gone with the machine",
    "ramfs": "it is memory: what lies there takes away from host_memory and is gone with the machine",
    "overlay": "it is the container's own layer, slow and gone with the container",
}
"""Kinds of file systems on which storage is of little use, and why."""


def look(path: Path, mounts: Path = Path("/proc/self/mounts")) -> Iterator[Finding]:
    """Changes nothing."""
    path = path.expanduser()
    try:
        found = path.stat()
    except FileNotFoundError:
        yield from _missing(path)
        return
    except OSError as error:
        yield problem(
            "storage folder", f"{path}: {error.strerror}", "a folder of this user", "mend it, or give another"
        )
        return
    if not stat.S_ISDIR(found.st_mode):
        yield problem("storage folder", f"{path} is no folder", "a folder", "give another path")
        return
    yield _whose(path, found)
    yield _mode(path, found)
    yield _content(path)
    yield _space(path)
    yield _kind(path, mounts)


def _missing(path: Path) -> Iterator[Finding]:
    parent = next(place for place in path.absolute().parents if place.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        yield ok("storage folder", f"{path} is not there yet: the engine makes it")
        yield _space(parent)
    else:
        yield problem(
            "storage folder",
            f"{path} is not there, and this user may not make it in {parent}",
            "a folder that this user may write to",
            f"make it: install -d -m 700 -o {_user(os.geteuid())} {path}",
        )


def _whose(path: Path, found: os.stat_result) -> Finding:
    value = f"{path} belongs to {_user(found.st_uid)}"
    if os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return ok("storage folder", value)
    own = _user(os.geteuid())
    return problem("storage folder", value, f"readable and writable for {own}", f"chown -R {own} {path}")


def _mode(path: Path, found: os.stat_result) -> Finding:
    mode = stat.S_IMODE(found.st_mode)
    limit = "no access for others, as 0700"
    fix = f"chmod -R go-rwx {path}, if engines of this user alone need it"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix += "; else give storage.secret_env a secret: who writes there decides what models answer"
        return problem("mode of the storage folder", f"{mode:04o}", limit, fix)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return warning("mode of the storage folder", f"{mode:04o}: others may read caches of prompts", limit, fix)
    return ok("mode of the storage folder", f"{mode:04o}", limit)


def _content(path: Path) -> Finding:
    name = "content of the storage folder"
    try:
        if FolderLayout(path).is_ours():
            return ok(name, "marked as a storage folder of this version")
        if not any(path.iterdir()):
            return ok(name, "empty")
    except OSError as error:
        return problem(name, f"cannot be read: {error.strerror}", "a storage folder, or an empty one", "mend it")
    fix = "give an empty folder: an engine does not start on one that is somebody else's"
    return problem(name, "files that are not ours", "a storage folder of this version, or an empty one", fix)


def _space(path: Path) -> Finding:
    found = os.statvfs(path)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    value = f"{size_text(free)} free of {size_text(size)}"
    limit = "at least storage.capacity less what lies there"
    if free >= LEAST_FREE:
        return ok("space for storage", value, limit)
    return problem("space for storage", value, limit, "delete something, `kv-connector storage gc`, or another disk")


def _kind(path: Path, mounts: Path) -> Finding:
    kind, place = kind_of(path, mounts)
    value = f"{kind} at {place}"
    if kind in _FLEETING:
        return warning(
            "file system of storage", f"{value}: {_FLEETING[kind]}", "a disk, local or shared", "another path"
        )
    return ok("file system of storage", value)


def kind_of(path: Path, mounts: Path) -> tuple[str, str]:
    """The kind of file system that a path lies on, and where it is mounted; "unknown" where the system does not say."""
    own, found = str(path.resolve()), ("unknown", "?")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return found
    longest = -1
    for line in lines:
        _, place, kind, *_ = line.split()
        place = place.encode().decode("unicode_escape")  # blanks are written as \040
        inside = own == place or own.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= longest:  # of two at one place the later one is seen
            longest, found = len(place), (kind, place)
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
