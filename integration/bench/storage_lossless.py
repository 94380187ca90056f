"""A prefix fetched from storage whose blocks are coded, beside the same prefix raw: a folder, and Mooncake Store.

The blocks are those of SmolLM2 (60 pieces of 12 KiB) and of an 8B model (64 of 32 KiB), filled with SmolLM2's own keys
and values where `integration.models.smollm2_caches` has left them, else with normal numbers. Both forms save them to a
host pool, write it to one storage under the engine's names, and fetch it again, in turn, `--repeats` times, the first
form another one each time: a look-up of the whole prefix, then reads in jobs of 64 blocks, as the scheduler half asks,
checksums verified. The clock stops when the last block is in host memory; what loading from there takes is
`lossless.py`'s to say. The folder is read past the page cache where its disk can be, and Mooncake's memory is a process
of its own, reached by TCP over loopback. Every fetch must bring each byte that was saved, and the coded one is decoded
and compared with the cache bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from integration.bench.storage import batches, block_key, drop_caches, spread
from integration.bench.stores import wait_until_reached
from integration.models import smollm2_caches
from integration.mooncake_master import running_store, store_config, why_not
from integration.report import Report, hardware
from kv_connector.build import open_storage
from kv_connector.config import Config, HostFormName, StorageConfig
from kv_connector.index import CacheIdentity, RankIdentity
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.transfer.memory.host_form import make_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.choice import make_path
from kv_connector.types import Direction

SHAPES = {"SmolLM2": (60, 12 << 10), "8B": (64, 32 << 10)}
"""Of blocks: pieces, and bytes of each."""
GOAL = 0.82
"""Of raw's time."""
READ_BATCH = 64  # as the scheduler half has it


@dataclass(frozen=True, slots=True)
class Cache:
    """A device cache on the CPU with values that a model has computed."""

    tensors: dict[str, torch.Tensor]
    num_blocks: int

    @classmethod
    def of(cls, values: torch.Tensor, num_pieces: int, piece_bytes: int, num_bytes: int) -> Cache:
        """Blocks of `num_bytes` together; values come again where there are too few of them."""
        count = num_bytes // (num_pieces * piece_bytes)
        flat = values.flatten()
        flat = flat[: flat.numel() // (piece_bytes // 2) * (piece_bytes // 2)].view(-1, piece_bytes // 2)
        rows = torch.arange(num_pieces * count) % len(flat)
        return cls({str(i): flat[part].clone() for i, part in enumerate(rows.view(num_pieces, count))}, count)


class Side:
    """A host pool in one form, and its storage."""

    def __init__(self, cache: Cache, name: HostFormName, config: StorageConfig) -> None:
        self.name = name.value
        self._cache = cache
        self._layout = CacheLayout.from_tensors(cache.tensors, cache.num_blocks)
        form = make_form(self._layout, name)
        self.block_bytes = form.block_bytes
        self.is_direct = True
        with ExitStack() as opened:
            self._host = opened.enter_context(closing(HostPool(cache.num_blocks, form.block_bytes)))
            self._path = opened.enter_context(closing(make_path(form, self._host, Config(host_form=name))))
            self._copy(Direction.SAVE)
            self._saved = self._host.tensor.clone()
            memory = self._host.tensor.numpy().reshape(-1).data
            identity = RankIdentity(CacheIdentity("SmolLM2", "bfloat16", "NHD", 32), 0, 1)
            storage = open_storage(config, identity, 0, form.block_bytes, memory, form.arrangement, 1)
            self._storage = opened.enter_context(closing(storage))
            if isinstance(storage, ObjectStorage):
                wait_until_reached(storage)
            elif isinstance(storage, FilesystemStorage):
                storage.recovered.result()
                self.is_direct = storage.is_direct
            self._opened = opened.pop_all()
        self._keys = [block_key(i) for i in range(cache.num_blocks)]
        self._blocks = [memory[at : at + form.block_bytes] for at in range(0, len(memory), form.block_bytes)]

    def write(self) -> None:
        """All blocks, which must not be there yet."""
        assert self._storage.exists(self._keys).result() == 0, "the other form's blocks were found"
        for keys, blocks in self._jobs():
            assert all(self._storage.write(keys, blocks).result()), "blocks were not written"

    def fetch(self) -> float:
        """Seconds."""
        self._host.tensor.zero_()
        start = time.perf_counter()
        assert self._storage.exists(self._keys).result() == len(self._keys), "blocks are missing"
        reads = [self._storage.read(keys, blocks) for keys, blocks in self._jobs()]
        assert all(all(read.result()) for read in reads), "blocks were not read"
        seconds = time.perf_counter() - start
        assert torch.equal(self._host.tensor, self._saved), "other bytes than were saved"
        return seconds

    def check(self) -> None:
        """What was fetched is the cache, bit for bit."""
        before = {name: tensor.clone() for name, tensor in self._cache.tensors.items()}
        for tensor in self._cache.tensors.values():
            tensor.zero_()
        self._copy(Direction.LOAD)
        for name, tensor in self._cache.tensors.items():
            assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), "another cache than was saved"

    def close(self) -> None:
        """Release everything."""
        self._opened.close()

    def _jobs(self) -> Iterator[tuple[Sequence[bytes], Sequence[memoryview]]]:
        return zip(batches(self._keys, READ_BATCH), batches(self._blocks, READ_BATCH), strict=True)

    def _copy(self, direction: Direction) -> None:
        ids, regions = np.arange(self._cache.num_blocks), range(len(self._layout.regions))
        copy = BlockCopy(direction, regions, ids, ids, None)
        self._path.copy(copy)
        assert not any(refused() for refused in copy.refusals), "blocks were refused"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--caches", type=Path, default=smollm2_caches.DEFAULT)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--mib", type=int, default=256, help="of the prefix, raw")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    report = Report("storage_lossless")
    is_real = options.caches.is_file()
    values = smollm2_caches.load(options.caches) if is_real else torch.randn((30, 2, 512, 3, 64)).bfloat16()
    print(f"{hardware()['cpu']}, {hardware()['cores']} cores; {'real' if is_real else 'normal'} values")
    for shape, (num_pieces, piece_bytes) in SHAPES.items():
        cache = Cache.of(values, num_pieces, piece_bytes, options.mib << 20)
        for store, open_store in {"folder": folder_in, "mooncake": mooncake_in}.items():
            if store == "mooncake" and (reason := why_not()):
                print(reason)
                continue
            with open_store(options.folder) as config:
                measure(report, f"{store}, blocks of {shape}", cache, config, options.repeats, is_real)
    report.write(options.json)
    return 0


@contextmanager
def folder_in(place: Path) -> Iterator[StorageConfig]:
    """A folder, which goes."""
    root = Path(tempfile.mkdtemp(prefix="storage_lossless_", dir=place))
    try:
        yield StorageConfig(path=str(root / "store"), capacity=8 << 30)
    finally:
        shutil.rmtree(root)


@contextmanager
def mooncake_in(place: Path) -> Iterator[StorageConfig]:
    """A master and the owner of memory, as processes; `place` is for folders."""
    with running_store(2 << 30) as master:
        yield store_config(master)


def measure(report: Report, what: str, cache: Cache, config: StorageConfig, repeats: int, is_real: bool) -> None:
    """Both forms in turn; a row for each, and a claim."""
    with ExitStack() as opened:
        forms = (HostFormName.RAW, HostFormName.LOSSLESS)
        sides = [opened.enter_context(closing(Side(cache, name, config))) for name in forms]
        for side in sides:
            side.write()
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(repeats + 1):
            for side in sides[:: 1 if turn % 2 else -1]:
                if not side.is_direct:
                    drop_caches()
                taken = side.fetch()
                if turn:  # the first is for warming up
                    seconds[side.name].append(taken)
                else:
                    side.check()
    for side in sides:
        times = seconds[side.name]
        row = {"what": what, "form": side.name, "blocks": cache.num_blocks, "block_bytes": side.block_bytes}
        row |= {"real_values": is_real, "direct": side.is_direct}
        report.rows.append(row | {"seconds": times, "median": median(times)})
        print(f"{what}, {side.name}: {cache.num_blocks} of {side.block_bytes >> 10} KiB in {spread(times, 1e-3)} ms")
    pairs = zip(seconds["lossless"], seconds["raw"], strict=True)
    ratios = [coded / raw for coded, raw in pairs]
    print(f"turn by turn {min(ratios):.2f} to {max(ratios):.2f}")
    name = what.lower().replace(", blocks of ", "_")
    report.claim(f"{name}_lossless_over_raw", median(ratios), GOAL, "of raw's time", "lower")


if __name__ == "__main__":
    sys.exit(main())
