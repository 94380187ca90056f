"""Attacks on a storage folder by its disk: one that hangs, fails, is full or may not be written, and a wrong clock.

The calls to the system of this process are replaced, so that a disk can be faulty without a kernel that helps. A
process that was stopped with the folder's lock in hand is a real one.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from integration.attack import Attack, Outcome
from integration.attacks_on_storage import (
    NUM_KEYS,
    PER_PACK,
    SCARCE,
    SECONDS,
    folder_of_its_own,
    keys_from,
    open_store,
    problems,
    read,
    write,
)
from kv_connector.storage.filesystem import layout
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.testing.storage_contract import make_buffers

CALLS = ("open", "preadv", "pread", "pwritev", "scandir", "stat", "unlink", "rename", "utime", "posix_fallocate")
_REPEATS = 5
_WRITING = ("pwritev", "pwrite", "write", "unlink", "rename", "utime", "mkdir", "posix_fallocate")
_STOPPED = (
    "import fcntl, os, signal, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
    "print(flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
)
HOUR_NS = 3600 * 10**9


@contextmanager
def hung(names: tuple[str, ...]) -> Iterator[None]:
    """These calls wait until the end of it."""
    goes_on = threading.Event()

    def hanging(real: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*arguments: Any, **options: Any) -> Any:
            goes_on.wait(SECONDS)
            return real(*arguments, **options)

        return hang

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(os, name, hanging(getattr(os, name))))
        stack.callback(goes_on.set)
        yield


@contextmanager
def failing(names: tuple[str, ...], number: int, rng: random.Random, share: float) -> Iterator[None]:
    """This share of these calls fails with an error of this number."""

    def faulty(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if rng.random() < share:
                raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(os, name, faulty(getattr(os, name))))
        yield


def longest_call(store: FilesystemStorage, pending: list[Future[Any]]) -> float:
    """Milliseconds of the longest of the calls that the thread makes that launches the model: statistics, and jobs that
    are begun. Of each the quickest of some repetitions: another process may have the core, but a wait for the disk
    would be in all of them."""
    blocks = make_buffers(PER_PACK, 4096)
    calls: tuple[Callable[[], Any], ...] = (
        store.stats,
        lambda: pending.append(store.exists(keys_from(NUM_KEYS))),
        lambda: pending.append(store.read(keys_from(0), blocks)),
        lambda: pending.append(store.write(keys_from(NUM_KEYS), blocks)),
    )
    longest = 0.0
    for call in calls:
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        longest = max(longest, min(times))
    return longest


def hangs(tries: int, seed: int) -> Outcome:
    """The disk hangs in each kind of call, and a neighbour is stopped that holds the folder's lock."""
    longest, wrong, lost = 0.0, 0, 0
    for turn in range(tries):
        with folder_of_its_own() as root:
            store = open_store(root)
            write(store, keys_from(0, NUM_KEYS))
            pending: list[Future[Any]] = []
            number = (seed + turn) % (len(CALLS) + 1)
            if number == len(CALLS):
                with _stopped_with_lock(root), patch.object(layout, "LOCK_SECONDS", 0.5):
                    longest = max(longest, longest_call(store, pending))
                    for future in pending:
                        future.result(SECONDS)
            else:
                with hung(CALLS[number : number + 1]):
                    longest = max(longest, longest_call(store, pending))
                for future in pending:
                    future.result(SECONDS)
            write(store, keys_from(0, NUM_KEYS))
            found, bad = read(store, keys_from(0, NUM_KEYS))
            lost, wrong = lost + NUM_KEYS - found, wrong + bad
            store.close()
    return Outcome(
        {"wrong_bytes": wrong, "blocks_lost": lost},
        milliseconds={"stall_ms_of_the_model_thread_on_a_hung_disk": longest},
    )


def faults(tries: int, seed: int) -> Outcome:
    """A disk that fails now and then, is full, or may not be written; the folder is whole once it is well again."""
    rng, wrong, lost, not_whole = random.Random(seed), 0, 0, 0
    kinds = (
        (("preadv", "pread", *_WRITING), errno.EIO, 0.2),
        (("preadv", "pread"), errno.EIO, 1.0),
        (("pwritev", "posix_fallocate", "write"), errno.ENOSPC, 1.0),
        (("pwritev", "posix_fallocate", "write"), errno.ENOSPC, 0.3),
        (_WRITING, errno.EROFS, 1.0),
    )
    for turn in range(tries):
        names, number, share = kinds[turn % len(kinds)]
        with folder_of_its_own() as root:
            store = open_store(root, SCARCE)
            keys = keys_from(0, 20 * PER_PACK)
            write(store, keys)
            with failing(names, number, rng, share):
                for _ in range(5):
                    write(store, keys_from(rng.randrange(NUM_KEYS)))
                    wrong += read(store, keys)[1]
            found, bad = read(store, keys)
            lost, wrong = lost + len(keys) - found, wrong + bad
            store.close()
            store = open_store(root, SCARCE)
            written = write(store, keys)
            found, bad = read(store, keys)
            not_whole, wrong = not_whole + (min(written, found) < len(keys)), wrong + bad
            store.close()
            not_whole += problems(root) + len(list((root / "tmp").iterdir()))
    return Outcome({"wrong_bytes": wrong, "not_whole_afterwards": not_whole}, {"misses_afterwards": lost})


def clocks(tries: int, seed: int) -> Outcome:
    """A clock was an hour ahead for a while, in a folder that is full: the newest blocks stay."""
    rng, wrong, newest_lost = random.Random(seed), 0, 0
    for _ in range(tries):
        ahead = [HOUR_NS]
        with folder_of_its_own() as root:
            for offset, packs in ((HOUR_NS, range(40)), (0, range(100, 140))):
                ahead[0] = offset
                store = open_store(root, SCARCE, clock=lambda ahead=ahead: time.time_ns() + ahead[0])
                for pack in packs:
                    write(store, keys_from(pack * PER_PACK))
                    if rng.random() < 0.1:
                        wrong += read(store, keys_from(rng.choice(packs) * PER_PACK))[1]
                store.close()
            store = open_store(root, SCARCE)
            found, bad = read(store, keys_from(110 * PER_PACK, 30 * PER_PACK))
            newest_lost, wrong = newest_lost + 30 * PER_PACK - found, wrong + bad
            store.close()
    return Outcome({"wrong_bytes": wrong, "newest_blocks_lost": newest_lost})


@contextmanager
def _stopped_with_lock(root: Path) -> Iterator[None]:
    marker = next(path for path in root.iterdir() if path.name.startswith("kv_connector.format"))
    process = subprocess.Popen([sys.executable, "-c", _STOPPED, str(marker)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


DISK_ATTACKS = (
    Attack("hangs", 2 * (len(CALLS) + 1), hangs),
    Attack("faults", 20, faults),
    Attack("clocks", 4, clocks),
)
