"""Attacks on a storage folder: engines that are killed, damaged files, and several engines at once.

Every block that is found is compared byte for byte with what belongs under its key. A fault may cost misses; behind it
the folder is whole: all that is written again is read again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from integration.attack import Attack, Outcome
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.folder import room_bytes
from kv_connector.storage.filesystem.survey import damaged_blocks, survey
from kv_connector.testing.storage_contract import content_of, key_of, make_buffers

BLOCK = 4096
PER_PACK = 8
NUM_KEYS = 1000
IDENTITY = bytes(32)
ROOMY = 1 << 28
SCARCE = 60 * room_bytes(PER_PACK, BLOCK)  # half of the keys
SECONDS = 60.0
"""A call that takes longer hangs."""


@contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """A new folder, deleted behind the attack."""
    root = Path(tempfile.mkdtemp(prefix="attack_"))
    try:
        yield root / "store"
    finally:
        shutil.rmtree(root)


def open_store(root: Path, capacity: int = ROOMY, clock: Callable[[], int] = time.time_ns) -> FilesystemStorage:
    """As an engine that starts there, with small packs."""
    store = FilesystemStorage(root, IDENTITY, BLOCK, capacity, PER_PACK * BLOCK, clock=clock)
    store.recovered.result(SECONDS)
    return store


def keys_from(start: int, count: int = PER_PACK) -> list[bytes]:
    """Of neighbouring blocks."""
    return [key_of(number) for number in range(start, start + count)]


def write(store: FilesystemStorage, keys: Sequence[bytes], variant: int = 0) -> int:
    """How many of these blocks are stored now. Variants differ in the last byte, as results that are computed twice."""
    buffers = make_buffers(len(keys), BLOCK)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = content_of(key, BLOCK)[:-1] + bytes([variant])
    return sum(store.write(keys, buffers).result(SECONDS))


def read(store: FilesystemStorage, keys: Sequence[bytes], variants: Sequence[int] = (0,)) -> tuple[int, int]:
    """How many of these blocks are found, and how many of those hold other bytes than belong there."""
    buffers = make_buffers(len(keys), BLOCK)
    found = store.read(keys, buffers).result(SECONDS)
    wrong = 0
    for key, buffer, is_found in zip(keys, buffers, found, strict=True):
        is_right = bytes(buffer[:-1]) == content_of(key, BLOCK)[:-1] and buffer[-1] in variants
        wrong += is_found and not is_right
    return sum(found), wrong


def problems(root: Path) -> int:
    """Packs in which `kv-connector storage verify` finds something wrong."""
    return sum(pack.header is None or bool(damaged_blocks(pack)) for pack in survey(root))


def start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """A process that says what it does, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_run_quietly, args=(target, *arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def heard(pipe: Connection) -> Any:
    """What it says next. Raises TimeoutError where it hangs."""
    if not pipe.poll(SECONDS):
        raise TimeoutError("a process hangs")
    return pipe.recv()


def work_until_killed(root: Path, seed: int, pipe: Connection) -> None:
    """Write, read and remove; say how many wrong bytes were read so far."""
    store, rng, wrong = open_store(root, SCARCE), random.Random(seed), 0
    while True:
        pipe.send(wrong)
        write(store, keys_from(rng.randrange(NUM_KEYS - PER_PACK)))
        wrong += read(store, keys_from(rng.randrange(NUM_KEYS - PER_PACK)))[1]
        if rng.random() < 0.15:
            store.remove([key_of(rng.randrange(NUM_KEYS))]).result(SECONDS)


def kills(tries: int, seed: int) -> Outcome:
    """Two engines write, read, evict and remove in one folder, and are killed; the next one reads what is left."""
    rng, wrong, over, hung, found = random.Random(seed), 0, 0, 0, 0
    with folder_of_its_own() as root:
        for turn in range(tries):
            pair = [start(work_until_killed, root, rng.randrange(1 << 30)) for _ in range(2)]
            try:
                for _, pipe in pair:
                    wrong += heard(pipe) + heard(pipe)
            except TimeoutError:
                hung += 1
            time.sleep(rng.uniform(0, 0.1))
            for process, _ in pair:
                process.kill()
            for process, _ in pair:
                process.join(SECONDS)
            over += sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) > SCARCE
            store = open_store(root, SCARCE)
            good, bad = read(store, keys_from(0, NUM_KEYS))
            found, wrong = found + good, wrong + bad
            if turn == tries - 1:
                write(store, keys_from(NUM_KEYS))
            store.close()
        left, bad_packs = len(list((root / "tmp").iterdir())), problems(root)
    claims = {"wrong_bytes": wrong, "hung": hung, "over_capacity": over, "temporary_files_left": left}
    return Outcome(claims | {"problems_afterwards": bad_packs}, {"kills": 2 * tries, "blocks_read": found})


def save_for_ever(root: Path, variant: int, pipe: Connection) -> None:
    """Save the prefixes that are asked for, and say when that is done."""
    store = open_store(root)
    while True:
        keys = keys_from(pipe.recv())
        pipe.send("ready")
        pipe.recv()
        pipe.send(write(store, keys, variant))


def same_prefix(tries: int, seed: int) -> Outcome:
    """Two engines compute the same prefix and save it at once, with other last bits. Restarted ones read both."""
    wrong = deleted = lost = written = 0
    with folder_of_its_own() as root:
        pair = [start(save_for_ever, root, variant) for variant in (1, 2)]
        for turn in range(tries):
            first = (seed + turn) * PER_PACK
            for word in (first, "now"):
                for _, pipe in pair:
                    pipe.send(word)
                said = [heard(pipe) for _, pipe in pair]
            lost += 2 * PER_PACK - sum(said)
            before = {path.name for path in root.rglob("*.pack")}
            for _ in range(2):
                store = open_store(root)
                found, bad = read(store, keys_from(first), (1, 2))
                lost, wrong = lost + PER_PACK - found, wrong + bad
                store.close()
            deleted += len(before - {path.name for path in root.rglob("*.pack")})
            written = len(before)
        for process, _ in pair:
            process.kill()
            process.join(SECONDS)
        claims = {"wrong_bytes": wrong, "good_packs_deleted": deleted, "blocks_lost": lost}
        return Outcome(claims | {"problems_afterwards": problems(root)}, {"packs": written})


def flip(rng: random.Random, path: Path, below: int | None = None) -> None:
    """A bit of a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(below or len(data))] ^= 1 << rng.randrange(8)
    _overwrite(path, data)


def flip_somewhere(rng: random.Random, packs: list[Path], index: Path) -> None:
    """Up to 20 bits, anywhere, of headers or of the index."""
    kind = rng.choice(("pack", "header", "index"))
    for _ in range(rng.choice((1, 1, 3, 20))):
        path = index if kind == "index" else rng.choice(packs)
        flip(rng, path, BLOCK if kind == "header" else None)


def truncate(rng: random.Random, packs: list[Path], index: Path) -> None:
    path = rng.choice([*packs, index])
    os.truncate(path, rng.randrange(path.stat().st_size))


def grow(rng: random.Random, packs: list[Path], index: Path) -> None:
    path = rng.choice([*packs, index])
    _overwrite(path, path.read_bytes() + rng.randbytes(rng.randrange(1, 9000)))


def swap_files(rng: random.Random, packs: list[Path], index: Path) -> None:
    one, other = rng.sample(packs, 2)
    content = one.read_bytes()
    _overwrite(one, other.read_bytes())
    _overwrite(other, content)


def swap_blocks(rng: random.Random, packs: list[Path], index: Path) -> None:
    path = rng.choice(packs)
    data = bytearray(path.read_bytes())
    one, other = (slice(BLOCK * (1 + i), BLOCK * (2 + i)) for i in rng.sample(range(PER_PACK), 2))
    data[one], data[other] = data[other], data[one]
    _overwrite(path, data)


def zeros(rng: random.Random, packs: list[Path], index: Path) -> None:
    path = rng.choice(packs)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at : at + 9000] = bytes(len(data[at : at + 9000]))
    _overwrite(path, data)


def replace_by_folder(rng: random.Random, packs: list[Path], index: Path) -> None:
    path = rng.choice([*packs, index])
    path.unlink()
    path.mkdir()


def replace_by_link(rng: random.Random, packs: list[Path], index: Path) -> None:
    one, other = rng.sample(packs, 2)
    one.unlink()
    one.symlink_to(other)


_Damage = Callable[[random.Random, list[Path], Path], None]
DAMAGES: tuple[_Damage, ...] = (
    truncate,
    grow,
    swap_files,
    swap_blocks,
    zeros,
    replace_by_folder,
    replace_by_link,
)


def damaged(kinds: Sequence[_Damage], tries: int, seed: int) -> Outcome:
    """Files are damaged, in turn before an engine starts and under its hands; then all is written again."""
    rng, wrong, not_whole, found = random.Random(seed), 0, 0, 0
    keys = keys_from(0, 12 * PER_PACK)
    with folder_of_its_own() as root:
        template = root.with_name("template")
        store = open_store(template)
        write(store, keys)
        store.close()
        for turn in range(tries):
            shutil.copytree(template, root)
            is_running = turn % 2 == 1
            store = open_store(root) if is_running else None
            kinds[turn % len(kinds)](rng, sorted(root.rglob("*.pack")), root / "index")
            store = store or open_store(root)
            good, bad = read(store, keys)
            found, wrong = found + good, wrong + bad
            write(store, keys)
            store.close()
            store = open_store(root)
            write(store, keys)  # also what was damaged before it was ever read
            good, bad = read(store, keys)
            not_whole, wrong = not_whole + (good < len(keys)), wrong + bad
            store.close()
            shutil.rmtree(root)
    return Outcome({"wrong_bytes": wrong, "not_whole_afterwards": not_whole}, {"blocks_read": found})


def flips(tries: int, seed: int) -> Outcome:
    """See `damaged`."""
    return damaged([flip_somewhere], tries, seed)


def damages(tries: int, seed: int) -> Outcome:
    """See `damaged`."""
    return damaged(DAMAGES, tries, seed)


def namespaces(tries: int, seed: int) -> Outcome:
    """Engines in containers that share the folder and see nothing of each other's processes. Where this machine makes
    no such namespaces they are processes as others are, and `namespaces` says so."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    try:
        can = subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        can = False
    failed = wrong = 0
    with folder_of_its_own() as root:
        for turn in range(tries):
            command = [*(apart if can else []), sys.executable, "-m", "integration.attacks_on_storage", str(root)]
            first = [(seed + turn) * 1000 + 500 * side for side in (0, 1)]
            pair = [subprocess.Popen([*command, str(start)], stdout=subprocess.PIPE, text=True) for start in first]
            failed += sum(int(process.communicate()[0]) for process in pair)
            store = open_store(root)
            for start_of in first:
                found, bad = read(store, keys_from(start_of, 30 * PER_PACK))
                failed, wrong = failed + 30 * PER_PACK - found, wrong + bad
            store.close()
        claims = {"wrong_bytes": wrong, "blocks_lost": failed, "problems_afterwards": problems(root)}
    return Outcome(claims, {"namespaces": int(can)}, not_tried=0 if can else tries)


def _run_quietly(target: Callable[..., None], *arguments: object) -> None:
    """Its faults are the attack's."""
    logging.getLogger("kv_connector.storage").setLevel(logging.CRITICAL)
    target(*arguments)


def _overwrite(path: Path, data: bytes | bytearray) -> None:
    """In place: who has it open sees it."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def _write_apart(root: Path, first: int) -> int:
    """Thirty batches; how many blocks were not stored."""
    store = open_store(root)
    lost = sum(PER_PACK - write(store, keys_from(first + turn * PER_PACK)) for turn in range(30))
    store.close()
    return lost


STORAGE_ATTACKS = (
    Attack("kills", 80, kills),
    Attack("flips", 120, flips),
    Attack("damages", 115, damages),
    Attack("same_prefix", 100, same_prefix),
    Attack("namespaces", 4, namespaces),
)

if __name__ == "__main__":
    print(_write_apart(Path(sys.argv[1]), int(sys.argv[2])))
