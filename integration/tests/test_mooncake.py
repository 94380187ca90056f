"""A real Mooncake store on loopback: engines in processes of their own share it, and its parts are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.mooncake_master import MemoryOwner, MooncakeMaster, store_config, why_not
from kv_connector.storage.mooncake.client import MooncakeClient, MooncakeOptions
from kv_connector.storage.objects.backend import ObjectStorage
from tests.storage.objects.stores import connected
from tests.storage.storages import IDENTITY, SECONDS, buffers, content, exists, get, key, put
from tests.waiting import until

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
ROOT = Path(__file__).parents[2]
SIZES = [128 << 10, 2 << 20]
NUM_BLOCKS = 20
MEMORY = 128 << 20

OTHER_ENGINE = """
import sys
from integration.servers import HOST
from kv_connector.config import StorageConfig
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.storage.mooncake.client import MooncakeClient, MooncakeOptions
from tests.storage.storages import IDENTITY, exists, get, key, put
from tests.storage.objects.stores import connected

master, action, block_bytes, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = StorageConfig(kind="mooncake", master=master, hostname=HOST)
storage = connected(ObjectStorage("mooncake", MooncakeClient(MooncakeOptions.of(config, 1, 1)), IDENTITY, block_bytes))
keys = [key(i) for i in range(count)]
print(exists(storage, keys), sum((put if action == "put" else get)(storage, keys, block_bytes)))
storage.close()
"""


@pytest.fixture
def master(request: pytest.FixtureRequest) -> Iterator[MooncakeMaster]:
    """That forgets who stands still only where a test asks for it."""
    master = MooncakeMaster(getattr(request, "param", 60))
    master.start()
    yield master
    master.kill()


@pytest.fixture
def owner(master: MooncakeMaster) -> Iterator[MemoryOwner]:
    owner = MemoryOwner(master.address, MEMORY)
    yield owner
    owner.kill()


def open_storage(master: MooncakeMaster, block_bytes: int, pool: memoryview | None = None) -> ObjectStorage:
    client = MooncakeClient(MooncakeOptions.of(store_config(master), 1, 1))
    return ObjectStorage("mooncake", client, IDENTITY, block_bytes, pool)


def other_engine(master: MooncakeMaster, action: str, block_bytes: int) -> str:
    """What another process says: how many of the blocks it has found first, and how many it has moved."""
    command = [sys.executable, "-c", OTHER_ENGINE, master.address, action, str(block_bytes), str(NUM_BLOCKS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("block_bytes", SIZES)
@pytest.mark.usefixtures("owner")
def test_what_one_process_writes_another_one_reads(master: MooncakeMaster, block_bytes: int) -> None:
    keys = [key(i) for i in range(NUM_BLOCKS)]
    assert other_engine(master, "put", block_bytes) == f"0 {NUM_BLOCKS}"
    storage = connected(open_storage(master, block_bytes))
    assert exists(storage, [*keys, key("other")]) == NUM_BLOCKS
    skipped = storage.group_blocks
    assert exists(storage, keys[skipped:]) == NUM_BLOCKS - skipped, "it may begin at any group"
    memory = buffers(NUM_BLOCKS, block_bytes)
    asked = [memoryview(bytearray()), *memory[1:]]
    assert storage.read(keys, asked).result(SECONDS) == [False] + [True] * (NUM_BLOCKS - 1)
    assert [bytes(block) for block in memory] == [bytes(block_bytes), *(content(k, block_bytes) for k in keys[1:])]
    assert get(storage, [key("other")], block_bytes) == [False]
    assert put(storage, keys, block_bytes) == [True] * NUM_BLOCKS
    assert storage.stats()["skipped_writes_blocks"] == NUM_BLOCKS
    more = [key(f"more {i}") for i in range(NUM_BLOCKS)]
    assert put(storage, more, block_bytes) == [True] * NUM_BLOCKS
    assert other_engine(master, "get", block_bytes) == f"{NUM_BLOCKS} {NUM_BLOCKS}"
    storage.close()


@pytest.mark.usefixtures("owner")
def test_blocks_of_a_registered_pool_are_read_in_place(master: MooncakeMaster) -> None:
    block_bytes = SIZES[0]
    blocks = buffers(2 * NUM_BLOCKS, block_bytes)
    pool = blocks[0].obj
    storage = connected(open_storage(master, block_bytes, memoryview(pool)))
    keys = [key(i) for i in range(NUM_BLOCKS)]
    for i, block in enumerate(blocks[::2]):
        block[:] = bytes([i]) * block_bytes
    assert all(storage.write(keys, blocks[::2]).result(SECONDS))
    assert all(storage.read(keys, blocks[1::2]).result(SECONDS))
    assert all(block == other for block, other in zip(blocks[::2], blocks[1::2], strict=True))
    storage.close()


def test_a_killed_master_costs_misses_and_is_found_again(
    master: MooncakeMaster, owner: MemoryOwner, caplog: pytest.LogCaptureFixture
) -> None:
    block_bytes = SIZES[0]
    keys = [key(i) for i in range(NUM_BLOCKS)]
    storage = connected(open_storage(master, block_bytes))
    assert all(put(storage, keys, block_bytes))
    master.kill()
    assert not any(get(storage, keys, block_bytes))
    assert storage.stats()["breaker_is_open"]
    assert storage.exists(keys).done(), "nobody waits for a store that is left alone"
    assert not any(put(storage, keys, block_bytes))
    assert exists(storage, keys) == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "StoreUnreachable" in warnings[0]
    master.start()
    comes_back(storage, lambda: not storage.stats()["breaker_is_open"])
    comes_back(storage, lambda: all(put(storage, keys, block_bytes)))  # once the owner has lent its memory again
    comes_back(storage, lambda: all(get(storage, keys, block_bytes)))
    storage.close()


def comes_back(storage: ObjectStorage, holds: Callable[[], bool]) -> None:
    """A store that begins anew takes its time."""
    until(holds, told=storage.stats, seconds=120.0)


@pytest.mark.parametrize("master", [15], indirect=True)
def test_a_killed_owner_costs_its_blocks_and_others_are_found(master: MooncakeMaster, owner: MemoryOwner) -> None:
    block_bytes = SIZES[1]
    keys = [key(i) for i in range(4)]
    storage = connected(open_storage(master, block_bytes))
    assert all(put(storage, keys, block_bytes))
    owner.kill()
    assert not any(get(storage, keys, block_bytes))
    another = MemoryOwner(master.address, MEMORY)
    # Until the master has forgotten the dead one, it says that the blocks are there.
    comes_back(storage, lambda: all(put(storage, keys, block_bytes)) and all(get(storage, keys, block_bytes)))
    another.kill()
    storage.close()


def test_an_engine_starts_before_the_store(master: MooncakeMaster) -> None:
    master.kill()
    storage = open_storage(master, SIZES[1])
    assert put(storage, [key(1)], SIZES[1]) == [False]
    master.start()
    owner = MemoryOwner(master.address, MEMORY)
    connected(storage)
    assert put(storage, [key(1)], SIZES[1]) == [True]
    owner.kill()
    storage.close()
