"""What lies outside of a world's engines: a network with a process for each rank, a folder on a disk, and their faults.

Engines are alike where they can hand blocks over or share the folder: `CacheIdentity` names the model's shape and the
weights that an engine started with. What an engine computes after an update of its weights is in nobody's reach that
started with others: keys of storage are of its own from the reset on, and the proxy hands over only between engines
that have the same weights (`proxy.Proxy`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kv_connector.index import RankIdentity, describe_groups
from kv_connector.storage.filesystem.folder import room_bytes

from . import config as drawn
from .checks import Violation
from .config import HOST_BLOCK_BYTES, EngineConfig
from .disk import Disk, SimulatedStorage
from .network import Network
from .objects import SimulatedObjects
from .peers import CARRIERS, SimulatedPeers

if TYPE_CHECKING:
    from .clock import VirtualTime
    from .engine import Engine

NETWORK_FAULTS = ("slow", "slow writes", "cut", "cut", "freeze peers")
DISK_FAULTS = ("slow", "silent", "full", "errors", "corrupt", "short", "damage", "wipe", "lost")
LASTING = frozenset({"damage", "wipe"})
"""Faults that nothing takes back."""
SECONDS_TO_REST = 150.0
"""Until links and offers that nobody has any use for are given up."""


class Outside:
    """Shared by all engines of a world. `rng` decides what it is like. `group_blocks`: of each rank of an engine, as
    many blocks as a store of objects keeps as one; none where storage is a folder. `secrets`: of what each engine
    stores, empty without one."""

    def __init__(
        self,
        time: VirtualTime,
        rng: random.Random,
        configs: Sequence[EngineConfig],
        group_blocks: Sequence[int],
        secrets: Sequence[bytes],
    ) -> None:
        self.time = time
        self.network = Network(time)
        self.network.seconds = rng.choice([(20e-6, 2e-3), (1e-5, 1e-4), (1e-3, 2e-2)])
        self.carrier = rng.choice(CARRIERS)
        pack_blocks, num_packs = drawn.draw_folder(rng)
        self._pack_bytes = pack_blocks * HOST_BLOCK_BYTES
        self._folder_bytes = num_packs * room_bytes(pack_blocks, HOST_BLOCK_BYTES)
        self.group_blocks = tuple(group_blocks)
        self.secrets = tuple(secrets)
        self.disk = Disk(time)
        self.disk.seconds = rng.choice([(50e-6, 2e-3), (1e-5, 2e-4), (1e-3, 3e-2)])
        self._peers: dict[tuple[int, int], SimulatedPeers] = {}
        self._storages: dict[tuple[int, int], SimulatedStorage] = {}
        self.has_peers = any(config.role is not None for config in configs)
        self.has_storage = any(config.prefetch is not None for config in configs)
        self._is_quiet = False

    # What a rank is built with.

    def open_storage(self, engine: Engine, rank: int) -> Callable[..., Any] | None:
        """As `WorkerHalf` takes it; None where the engine is configured without."""
        if engine.config.prefetch is None:
            return None
        name = f"{engine.engine_id}/rank{rank}"
        groups = describe_groups(engine.config.groups)
        digest = RankIdentity(
            engine.identity, engine.shape.first_alike(rank), engine.config.num_ranks, groups=groups
        ).digest()
        where, secret = (self.disk, name, digest, self._folder_bytes), self.secrets[engine.index]
        storage: SimulatedStorage
        if self.group_blocks:
            storage = SimulatedObjects(*where, self.group_blocks[rank], secret=secret)
        else:
            storage = SimulatedStorage(*where, target_bytes=self._pack_bytes, secret=secret)
        self._storages[engine.index, rank] = storage
        return storage.open_storage

    def open_peers(self, engine: Engine, rank: int) -> Callable[..., Any] | None:
        """As `WorkerHalf` takes it; None where the engine is configured without."""
        config = engine.config
        if config.role is None:
            return None
        peers = SimulatedPeers(
            self.network,
            f"{engine.engine_id}/rank{rank}",
            self.carrier,
            repr(engine.identity.undivided()),
            rank,
            config.num_ranks,
            config.deadline_ms / 1e3,
            config.answer_ms / 1e3,
            engine_id=engine.engine_id,
            port=config.port + rank if config.port else 0,
            groups=describe_groups(config.groups),
        )
        peers.on_write = lambda block_ids: engine.book.arrived(rank, block_ids.tolist())
        self._peers[engine.index, rank] = peers
        return peers.open_peers

    # What becomes of it.

    def kill(self, engine: Engine) -> None:
        """The engine's processes are gone."""
        for process in (*self._of(engine, self._peers), *self._of(engine, self._storages)):
            process.kill()

    def close(self, engine: Engine) -> None:
        """The engine ends in order."""
        for process in (*self._of(engine, self._peers), *self._of(engine, self._storages)):
            process.close()

    def freeze(self, engine: Engine, rank: int) -> None:
        """The rank's process gets no processor."""
        if (engine.index, rank) in self._peers:
            self._peers[engine.index, rank].freeze()

    def thaw(self, engine: Engine, rank: int) -> None:
        if (engine.index, rank) in self._peers:
            self._peers[engine.index, rank].thaw()

    def _of(self, engine: Engine, processes: dict[tuple[int, int], Any]) -> list[Any]:
        return [process for (index, _), process in processes.items() if index == engine.index]

    # Faults.

    def fail_network(self, name: str, one: int, other: int, rank: int, factor: float, seconds: float) -> bool:
        """Begin a fault between two engines, by index, that ends some time later; returns whether there is anybody to
        suffer from it."""
        first, second = self._peers.get((one, rank)), self._peers.get((other, rank))
        if self._is_quiet or first is None or second is None or first is second:
            return False
        network = self.network
        if name == "slow":
            network.slow = factor
            end: Callable[[], object] = lambda: setattr(network, "slow", 1.0)  # noqa: E731
        elif name == "slow writes":
            network.slow_writes = 10 * factor
            end = lambda: setattr(network, "slow_writes", 1.0)  # noqa: E731
        elif name == "cut":
            network.cut(first, second)
            end = lambda: network.mend(first, second)  # noqa: E731
        else:
            first.freeze()
            end = first.thaw
        self.time.call_after(seconds, end, f"{name} ends")
        return True

    def fail_disk(self, name: str, rate: float, count: int, calls: tuple[str, ...], seconds: float) -> bool:
        """Begin a fault of the disk that ends some time later, or do lasting damage."""
        if self._is_quiet or not self.has_storage:
            return False
        disk = self.disk
        if name == "slow":
            disk.slow = 100 * rate
        elif name == "silent":
            disk.freeze()
        elif name == "full":
            disk.fill()
        elif name == "errors":
            disk.error_rate, disk.error_calls = rate, calls
        elif name == "corrupt":
            disk.corrupt_rate = rate
        elif name == "short":
            disk.short_rate = rate
        elif name == "damage":
            (disk.flip, disk.cut_files, disk.delete_files)[count % 3](count)
            if all(self.secrets):  # else there are engines that cannot know
                disk.forge()
        elif name == "wipe":
            disk.wipe()
        else:
            disk.lose()
        if name not in LASTING:
            self.time.call_after(seconds, lambda: self._heal_disk(name), f"disk {name} ends")
        return True

    def mend_disk(self) -> None:
        """As an operator does before an engine is started."""
        self.disk.heal()

    def _heal_disk(self, name: str) -> None:
        disk = self.disk
        if name == "slow":
            disk.slow = 1.0
        elif name == "silent":
            disk.thaw()
        elif name == "full":
            disk.is_full = False
        elif name == "lost":
            disk.come_back()
        else:
            setattr(disk, {"errors": "error_rate", "corrupt": "corrupt_rate", "short": "short_rate"}[name], 0.0)

    # At rest.

    def quieten(self) -> None:
        """Faults off, also those that a trap would begin later."""
        self._is_quiet = True
        self.disk.heal()
        self.network.slow = self.network.slow_writes = 1.0
        self.network.mend_all()
        for process in self._peers.values():
            process.thaw()

    def check_at_rest(self) -> None:
        """No link, offer, grant, slot, call or file is left open."""
        try:
            self.network.check_at_rest()
            self.disk.check_at_rest()
        except AssertionError as error:
            raise Violation("leak", str(error)) from error
