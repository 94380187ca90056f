"""What is stored of one of SGLang's host pools: its pages, by SGLang's hashes, under an identity of the launch line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from ...build import open_storage
from ...config import StorageConfig
from ...config.mapping import from_mapping
from ...errors import ConfigError
from ...index import CacheIdentity, RankIdentity, adopt_hash, adopt_hashes, group_key, root_hash
from ...types import BlockHash
from ...values import shown
from .host_pages import Patience, open_pages

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

_OPTION = "--hicache-storage-backend-extra-config"
_SGLANGS = {
    *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    "hicache_storage_pass_prefix_keys",
}
"""Keys of that option which are none of ours."""
_DECIDED_BY = {
    "prefetch": "--hicache-storage-prefetch-policy",
    "timeout_ms": "prefetch_timeout_base and prefetch_timeout_per_ki_token beside it",
    "backup": "--hicache-write-policy",
    "max_backup_blocks": "--hicache-size",
}
"""Settings of storage that SGLang has for itself."""
_FIRST_LOOK = 16
_MOST_LOOK = 512
_KEY = 32


@dataclass(frozen=True, slots=True)
class _Given:
    """What a user gives beside SGLang's own keys."""

    storage: Any = None


def read_storage_settings(extra_config: Mapping[str, Any] | None) -> StorageConfig:
    """Raises ConfigError, naming the fix, for what is missing, unknown or of no use here."""
    extra_config = extra_config or {}
    if "host_form" in extra_config:
        raise ConfigError(
            f"host_form={shown(extra_config['host_form'])}: pages lie on the host as SGLang copies them there: "
            "leave it out, or start with our linker, which takes it"
        )
    given = from_mapping(_Given, {key: value for key, value in extra_config.items() if key not in _SGLANGS}).storage
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'storage={shown(given)} is not an object: give {_OPTION} one such as {{"storage": '
            '{"path": "/data/kv", "capacity": "1TiB"}}'
        )
    for name, decides in _DECIDED_BY.items():
        if name in given:
            raise ConfigError(f"storage.{name}: SGLang decides that by {decides}: leave it out")
    if not extra_config.get("interface_v1"):
        version = shown(extra_config.get("interface_v1"))
        raise ConfigError(f'interface_v1={version}: pages are moved by no other: give "interface_v1": 1 in {_OPTION}')
    return from_mapping(StorageConfig, given, "storage.")


def identity_of(config: HiCacheStorageConfig, cache: CacheIdentity, backend: str, name: str) -> RankIdentity:
    """Whose bytes the pages of this pool are. Ranks that hold the same have one name: the first of them writes."""
    is_shared = config.is_mla_model and name != PoolName.MAMBA
    stage = config.pp_rank * config.attn_cp_size + config.attn_cp_rank
    return RankIdentity(
        replace(cache, pp_size=config.pp_size),
        rank=stage * config.tp_size + (0 if is_shared else config.tp_rank),
        world_size=config.pp_size * config.attn_cp_size * config.tp_size,
        backend=backend,
        pool=str(name),
    )


class HostStorage:
    """The stored pages of one host pool. Calls block, for as long as there is patience but where pages are lent to
    storage, and may come from any thread."""

    def __init__(self, config: StorageConfig, identity: RankIdentity, pool: Any, patience: Patience) -> None:
        """Opens the storage. Raises ConfigError."""
        self.page_bytes = pool.size_per_token * pool.page_size
        self._size, self._num_slots = pool.page_size, pool.size
        self._patience = patience
        self._pages = pages = open_pages(pool, patience)
        assert identity.cache is not None
        self._root = root_hash(identity.cache)
        self._storage = open_storage(
            config, identity, identity.rank, pages.block_bytes, pages.memory, pages.arrangement, num_served=1
        )

    def count_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading pages are stored; ever more are asked for at a time, since most lookups find few."""
        first, count = 0, _FIRST_LOOK
        while first < len(hashes):
            there = self.which(hashes[first : first + count])
            if not all(there):
                return first + there.index(False)
            first, count = first + count, min(2 * count, _MOST_LOOK)
        return len(hashes)

    def which(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which of these pages are stored as a whole."""
        future = None if self._patience.is_over else self._storage.which(self._keys(hashes))
        if future is None or not self._patience.waits_for(future):
            return [False] * len(hashes)
        there, runs = future.result(), self._pages.num_runs
        return [all(there[first : first + runs]) for first in range(0, len(there), runs)]

    def read(self, hashes: Sequence[BlockHash], slots: torch.Tensor) -> list[bool]:
        """Fill the pages of these token slots; False where what is there now is undefined."""
        return self._pages.read(self._storage, self._keys(hashes), self._starts(hashes, slots))

    def write(self, hashes: Sequence[BlockHash], slots: torch.Tensor) -> list[bool]:
        """Store the pages of these token slots; which of them are now."""
        return self._pages.write(self._storage, self._keys(hashes), self._starts(hashes, slots))

    def rename(self, salt: bytes) -> None:
        """What is stored is found no more."""
        self._root = adopt_hash(self._root, salt)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`."""
        return self._storage.stats()

    def close(self) -> None:
        """See `Storage.close`."""
        self._storage.close()

    def _keys(self, hashes: Sequence[BlockHash]) -> list[bytes]:
        """The names of all runs, page by page."""
        runs = range(self._pages.num_runs)
        names = adopt_hashes(self._root, [group_key(page, run) for page in hashes for run in runs])
        return [names[first : first + _KEY] for first in range(0, len(names), _KEY)]

    def _starts(self, hashes: Sequence[BlockHash], slots: torch.Tensor) -> list[int]:
        """Each page's first slot. Raises ValueError for others than whole pages of this pool, one for each hash."""
        if slots.numel() != len(hashes) * self._size:
            raise ValueError(f"{slots.numel()} token slots for {len(hashes)} pages of {self._size}")
        pages = slots.cpu().view(-1, self._size)
        starts = pages[:, 0]
        are_whole = (pages == starts[:, None] + torch.arange(self._size)).all() and not (starts % self._size).any()
        if not are_whole or (starts < 0).any() or (starts >= self._num_slots).any():
            raise ValueError("token slots that are no pages of the host pool")
        return list(starts.tolist())
