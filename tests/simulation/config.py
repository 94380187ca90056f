"""What an engine of a simulated world is like; all of it is drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from kv_connector.config import (
    Backup,
    Config,
    HostFormName,
    LoadChoice,
    PeerConfig,
    PeerRole,
    Prefetch,
    StorageConfig,
    TenantConfig,
    WireForm,
    WritePolicy,
)
from kv_connector.index import BlockGroup, may_truncate

HOST_BLOCK_BYTES = 4096
_NAMED_POLICIES = [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_BACK]
_SECRET = "known to all of a world"


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table. `window`: tokens that they see, None for all. Blocks of recurrent layers hold
    one state each, those of others a row for each token. `chunk_blocks`: blocks of a chunk, of which a token sees what
    is in front of it in its own."""

    window: int | None = None
    hashes_per_block: int = 1
    is_recurrent: bool = False
    chunk_blocks: int | None = None


_RECURRENT = LayerGroup(is_recurrent=True)
MIXED_GROUPS = (
    (LayerGroup(), LayerGroup(hashes_per_block=2)),
    (LayerGroup(hashes_per_block=3), LayerGroup(hashes_per_block=2)),
    (LayerGroup(hashes_per_block=2), LayerGroup(window=5)),
    (LayerGroup(), LayerGroup(window=9, hashes_per_block=2)),
    (LayerGroup(), _RECURRENT),
    (LayerGroup(), _RECURRENT, _RECURRENT),
    (LayerGroup(), LayerGroup(hashes_per_block=2, is_recurrent=True)),
    (LayerGroup(hashes_per_block=2), LayerGroup(window=3), LayerGroup(hashes_per_block=2, is_recurrent=True)),
    (_RECURRENT,),
)
"""Of models whose layers are of several kinds."""
LONE_WINDOW = (LayerGroup(window=9),)
"""Of a model whose layers all have a window."""
STATE_BLOCKS = 4
"""That a request has at most of a recurrent group at any time."""


@dataclass(frozen=True)
class EngineConfig:
    """Choices that engines really make, and how fast the parts of this one are."""

    asynchronous: bool = False  # plans one step ahead of outputs
    num_drafts: int = 0
    acceptance: float = 0.5  # of a draft
    num_ranks: int = 1
    num_heads: int = 0  # KV heads of the model, which ranks divide; 0: one for each rank, and nobody says so
    heads_first: bool = False  # a block has the rows of one head behind those of the other
    num_parts: int = 1  # ranks share out a context: each has one of so many parts of every block's tokens
    interleave: int = 1  # tokens of a part that lie together
    replicas: bool = False  # ranks cache the same bytes, and share one copy on the host
    pipeline: bool = False  # ranks are stages that run apart, else they keep step with one another
    ends_within: bool = False  # it keeps the states where prompts end inside of blocks
    reports_apart: bool = False  # ranks' reports of a step are taken in one by one, else together
    layer_groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    num_layers: int = 2  # of each group
    block_size: int = 4  # tokens of a block hash
    num_device_blocks: int = 64  # the null block among them
    num_host_blocks: int = 64
    max_step_tokens: int = 32
    max_running: int = 4
    defers_frees: bool = True  # blocks of an ended request return when the steps that may write to them are processed
    loads_after_forward: bool = True  # background loads are started behind the forward pass
    binds_first: bool = False  # the plan is bound before `handle_preemptions`
    full_graphs: bool = False  # no hooks of layers
    splits_layers: bool = False  # other streams run between a forward pass's layers
    keeps_running_on_reset: bool = False
    names_newest: bool = False  # of two requests with one id, the newer is taken to be the received one
    truncates: bool = True  # a request whose load failed keeps the valid part of its blocks
    fails_by_request: bool = True
    takes_events: bool = True
    most_remembered: int | None = None  # blocks without a copy; None: as the connector decides
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load_choice: LoadChoice = LoadChoice.AUTO
    save_bandwidth: int = 0
    max_load_stall_ms: int = 2
    write_back_lookahead: int = 8
    layer_group_bytes: int = 0
    host_ready_seconds: float = 0.0
    host_form: HostFormName = HostFormName.RAW
    refused_share: float = 0.0  # of blocks that are saved, whose content does not fit into the form of a host block
    judged_blocks: int = 1024  # by which it is judged whether anything is saved any more
    host_seconds: float = 1e-3  # of a rank's process, for a step
    stalls: float = 0.0
    prefetch: Prefetch | None = None  # None: without storage
    backup: Backup = Backup.ON_SAVE
    fetch_ms: int = 200
    max_backup_blocks: int = 4096
    role: PeerRole | None = None  # None: without peers
    port: int = 0  # of rank 0; 0: any
    deadline_ms: int = 3000
    answer_ms: int = 1000
    tenants: tuple[tuple[str, int, int], ...] = ()  # name, weight, and quota in host blocks, 0 for none
    hinted_share: float = 0.0  # of requests, that say something of their blocks
    wire_form: WireForm = WireForm.RAW
    seconds: dict[str, float] = field(default_factory=lambda: {"compute": 2e-3, "load": 2e-3, "save": 2e-3})

    @property
    def depth(self) -> int:
        """Steps under way at most."""
        return (self.num_ranks if self.pipeline else 1) + self.asynchronous

    @property
    def produces(self) -> bool:
        return self.role is not None and self.role is not PeerRole.CONSUMER

    @property
    def consumes(self) -> bool:
        return self.role is not None and self.role is not PeerRole.PRODUCER

    def heads_of(self, rank: int) -> range:
        """Where there are fewer heads than ranks, several ranks hold the same."""
        num_heads = self.num_heads or self.num_ranks
        first = rank * num_heads // self.num_ranks
        return range(first, first + max(1, num_heads // self.num_ranks))

    def leads(self, rank: int) -> bool:
        """Whether no rank in front holds the same heads."""
        return rank == 0 or self.heads_of(rank) != self.heads_of(rank - 1)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by group."""
        return tuple(self.block_size * group.hashes_per_block for group in self.layer_groups)

    @cached_property
    def chunks(self) -> tuple[int | None, ...]:
        """Tokens of a chunk, by group; None where attention is not local to chunks."""
        pairs = zip(self.layer_groups, self.block_sizes, strict=True)
        return tuple(size * group.chunk_blocks if group.chunk_blocks else None for group, size in pairs)

    @cached_property
    def is_recurrent(self) -> bool:
        return any(group.is_recurrent for group in self.layer_groups)

    @property
    def takes_invalid_blocks(self) -> bool:
        """Whether it may be told of blocks that a load has not filled: with one group a request goes on behind those in
        front, as in vLLM, with several it begins anew. Where hits end inside of blocks vLLM is told of requests."""
        return may_truncate(self.groups) or not (len(self.groups) == 1 or self.is_recurrent or self.ends_within)

    @cached_property
    def groups(self) -> tuple[BlockGroup, ...]:
        """As the connector knows them."""
        groups = []
        for group, size in zip(self.layer_groups, self.block_sizes, strict=True):
            window = None if group.window is None else -(-(group.window - 1) // size)
            window = 1 if group.is_recurrent else window
            groups.append(BlockGroup(window, group.hashes_per_block, group.is_recurrent, group.chunk_blocks))
        return tuple(groups)

    def connector(self) -> Config:
        """The connector's settings."""
        storage = peer = None
        if self.prefetch is not None:
            storage = StorageConfig(
                path="/storage",
                capacity=1 << 30,
                prefetch=self.prefetch,
                timeout_ms=self.fetch_ms,
                backup=self.backup,
                max_backup_blocks=self.max_backup_blocks,
            )
        if self.role is not None:
            peer = PeerConfig(
                role=self.role,
                port=self.port,
                deadline_ms=self.deadline_ms,
                timeout_ms=self.answer_ms,
                secret=_SECRET,
                wire_form=self.wire_form,
            )
        return Config(
            host_memory=self.num_host_blocks * HOST_BLOCK_BYTES * self.num_ranks,
            write_policy=self.write_policy,
            load_choice=self.load_choice,
            save_bandwidth=self.save_bandwidth,
            max_load_stall_ms=self.max_load_stall_ms,
            write_back_lookahead=self.write_back_lookahead,
            layer_group_bytes=self.layer_group_bytes,
            host_form=self.host_form,
            calibration="off",
            storage=storage,
            peer=peer,
            tenants={name: self._tenant(weight, quota) for name, weight, quota in self.tenants},
        )

    def _tenant(self, weight: int, quota: int) -> TenantConfig:
        return TenantConfig(weight, quota * HOST_BLOCK_BYTES * (1 if self.replicas else self.num_ranks))

    def quiet(self) -> EngineConfig:
        """Without chance in how long things take: for the last part of a world, and for shrunk histories."""
        return replace(self, stalls=0.0)

    def describe(self) -> str:
        """What differs from the defaults."""
        default, mine = asdict(EngineConfig()), asdict(self)
        return " ".join(f"{key}={value}" for key, value in mine.items() if value != default[key])


def draw_world(rng: random.Random) -> list[EngineConfig]:
    """The engines of a world, alone or with a network between them, a folder that they share, or both."""
    num_engines = rng.choice([1, 1, 1, 1, 2, 2, 3, 4])
    has_peers = num_engines > 1 and rng.random() < 0.9
    has_storage = rng.random() < 0.5
    port = rng.choice([0, 20, 20])
    like: EngineConfig | None = None
    drawn = []
    for index in range(num_engines):
        config = draw(rng, like if rng.random() < 0.95 else None)
        if has_storage and rng.random() < 0.8:
            config = _with_storage(rng, config)
        if has_peers and (index < 2 or rng.random() < 0.8):
            role = rng.choice([[PeerRole.PRODUCER, PeerRole.BOTH], [PeerRole.CONSUMER, PeerRole.BOTH]][index % 2])
            config = replace(
                config,
                role=role,
                port=port and 7000 + port * index,
                deadline_ms=rng.choice([200, 1000, 3000]),
                answer_ms=rng.choice([300, 2000]),
                layer_groups=(LayerGroup(),),
            )
        drawn.append(config)
        like = like or (config if config.role or config.prefetch else None)
    return drawn


def draw_remembered(rng: random.Random, drawn: Sequence[EngineConfig]) -> list[EngineConfig]:
    """The same engines, which may forget what the connector would remember: no world is as large as that. `rng` is one
    of its own, so that a seed's other choices do not depend on it."""
    most = rng.choice([None, None, 0, 1, 10])
    return [replace(config, most_remembered=most) for config in drawn]


def draw_policies(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """Some engines have the policy that was added last, which is the default. `rng` is one of its own."""
    return [replace(c, write_policy=WritePolicy.ADAPTIVE) if rng.random() < 0.35 else c for c in configs]


def draw_groups(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """Some engines without peers have layers of several kinds; those that share storage mostly the same. `rng` is one
    of its own."""
    usual = rng.choice(MIXED_GROUPS) if rng.random() < 0.5 else None
    drawn = []
    for config in configs:
        own = rng.choice(MIXED_GROUPS) if rng.random() < 0.5 else None
        groups = usual if config.prefetch is not None and rng.random() < 0.9 else own
        drawn.append(with_groups(config, groups) if groups is not None and config.role is None else config)
    has_lone_windows = rng.random() < 0.06 and all(config.role is None for config in configs)
    return [with_groups(config, LONE_WINDOW) for config in drawn] if has_lone_windows else drawn


def draw_replicas(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """In some worlds the ranks of an engine cache the same bytes, but for stages of a pipeline and those that share out
    a context. `rng` is one of its own."""
    if rng.random() < 0.7:
        return configs
    return [replace(c, replicas=c.num_ranks > 1 and not c.pipeline and c.num_parts == 1) for c in configs]


def draw_ends(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """Hits of some engines with recurrent layers end inside of blocks, where blocks have several hashes. `rng` is one
    of its own."""
    may_end = [c.is_recurrent and max(c.block_sizes) > c.block_size and rng.random() < 0.7 for c in configs]
    return [replace(c, ends_within=c.ends_within or ends) for c, ends in zip(configs, may_end, strict=True)]


def draw_refusals(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """In some worlds a share of what is saved does not fit into the form of a host block, and of some engines so much
    that they save nothing any more. `rng` is one of its own."""
    if rng.random() < 0.8:
        return configs
    return [
        replace(config, refused_share=rng.choice([0.01, 0.05, 0.3, 0.7]), judged_blocks=rng.choice([16, 64, 1024]))
        for config in configs
    ]


def draw_control(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """In half of all worlds requests say something of their blocks, in a third tenants share the hosts. `rng` is one
    of its own."""
    hinted_share = rng.choice([0.0, 0.0, 0.0, 0.1, 0.3, 0.8])
    tenants: tuple[tuple[str, int, int], ...] = ()
    if rng.random() < 0.35:
        tenants = ("a", rng.choice([1, 3]), 0), ("b", 1, rng.choice([0, 0, 4, 16]))
        tenants += (("default", 2, 0),) if rng.random() < 0.5 else ()
    return [replace(config, hinted_share=hinted_share, tenants=tenants) for config in configs]


def draw_wire_forms(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    """In half of the worlds engines code what they send through host memory, most of them. `rng` is one of its own."""
    if rng.random() < 0.5:
        return configs
    return [replace(c, wire_form=WireForm.LOSSLESS if rng.random() < 0.9 else WireForm.RAW) for c in configs]


def with_groups(config: EngineConfig, groups: tuple[LayerGroup, ...]) -> EngineConfig:
    """The same engine with another model, and as much more memory as that takes."""
    config = replace(
        config,
        layer_groups=groups,
        num_device_blocks=config.num_device_blocks
        * max(1, sum(not group.is_recurrent for group in groups))
        // len(config.layer_groups)
        + STATE_BLOCKS * sum(group.is_recurrent for group in groups),
        num_host_blocks=config.num_host_blocks * len(groups) // len(config.layer_groups),
    )
    if len(groups) == 1 or config.is_recurrent:
        config = replace(config, fails_by_request=True)
    # What a rejected draft has done to a state is another mechanism of the engine's, and not modelled.
    return replace(config, num_drafts=0, truncates=False) if config.is_recurrent else config


def draw_group_blocks(rng: random.Random) -> list[int]:
    """Of each rank, as many blocks as storage keeps as one; none where it is a folder. `rng` is one of its own."""
    size = rng.choice([0, 0, 2, 4])
    other = rng.choice([size, size, 2 * size])
    return [size, other, size, size] if size else []


def draw_folder(rng: random.Random) -> tuple[int, int]:
    """Of a world's storage where it is a folder: how many blocks a pack has, and for how many packs there is room."""
    return rng.choice([1, 4, 16]), rng.choice([3, 12, 100])


def draw_secrets(rng: random.Random, num_engines: int) -> list[bytes]:
    """Of what each engine stores; empty without one. Most worlds have none, and few engines another one than the rest.
    `rng` is one of its own."""
    usual = rng.choice([b"", b"", b"", _SECRET.encode()])
    other = rng.choice([usual, usual, b"", b"known to some of a world"])
    return [rng.choice([usual, usual, usual, other]) for _ in range(num_engines)]


def _with_storage(rng: random.Random, config: EngineConfig) -> EngineConfig:
    return replace(
        config,
        num_host_blocks=rng.choice([12, 24, 48, 200]),
        prefetch=rng.choice(list(Prefetch)),
        backup=rng.choice(list(Backup)),
        fetch_ms=rng.choice([0, 20, 200]),
        max_backup_blocks=rng.choice([1, 8, 4096]),
        layer_groups=(LayerGroup(),),
    )


def draw(rng: random.Random, like: EngineConfig | None = None) -> EngineConfig:
    """One engine; of the same shape as another one, if there is any."""
    asynchronous = rng.random() < 0.6
    num_ranks = rng.choice([1, 1, 1, 2, 2, 3, 4])
    block_size = rng.choice([2, 4, 4])
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    if rng.random() < 0.25:
        groups = (LayerGroup(), LayerGroup(window=rng.choice([3, 5, 8, 12])))
    if like is not None:
        num_ranks, block_size, groups = like.num_ranks, like.block_size, like.layer_groups
    pipeline = asynchronous and num_ranks > 1 and rng.random() < 0.4
    rate = rng.choice([0, 0, 0, 1 << 20, 8 << 20])
    return EngineConfig(
        asynchronous=asynchronous,
        num_drafts=rng.choice([0, 0, 1, 3, 4]),
        acceptance=rng.choice([0.0, 0.3, 0.7, 0.95]),
        num_ranks=num_ranks,
        pipeline=pipeline,
        reports_apart=num_ranks > 1 and rng.random() < 0.5,
        layer_groups=groups,
        num_layers=rng.choice([1, 2, 2]) if like is None else like.num_layers,
        block_size=block_size,
        num_device_blocks=rng.choice([16, 24, 32, 48, 96]) * len(groups) * 4 // block_size,
        num_host_blocks=rng.choice([6, 24, 80, 200, 400]) * len(groups),
        max_step_tokens=rng.choice([8, 16, 48, 200]),
        max_running=rng.choice([1, 2, 4, 8]),
        defers_frees=rng.random() < 0.5,
        loads_after_forward=rng.random() < 0.5,
        binds_first=rng.random() < 0.2,
        full_graphs=rng.random() < 0.3,
        splits_layers=rng.random() < 0.3,
        keeps_running_on_reset=rng.random() < 0.3,
        names_newest=rng.random() < 0.5,
        truncates=rng.random() < 0.5,
        fails_by_request=rng.random() < 0.7,
        takes_events=rng.random() < 0.9,
        write_policy=rng.choice([WritePolicy.WRITE_THROUGH, *_NAMED_POLICIES]),
        load_choice=rng.choice([LoadChoice.AUTO, LoadChoice.SYNC, LoadChoice.ASYNC, LoadChoice.ASYNC]),
        save_bandwidth=rate,
        max_load_stall_ms=rng.choice([0, 2]),
        write_back_lookahead=rng.choice([1, 8, 64]),
        layer_group_bytes=rng.choice([0, 1, 64]),
        host_ready_seconds=rng.choice([0.0, 0.0, 0.2]),
        host_seconds=rng.choice([2e-4, 1e-3, 3e-3]),
        stalls=rng.choice([0.0, 0.0, 0.002, 0.02]),
        seconds={
            "compute": rng.choice([2e-4, 1e-3, 4e-3]),
            "load": rng.choice([2e-4, 2e-3, 1e-2, 3e-2, 6e-2]),
            "save": rng.choice([2e-4, 2e-3, 2e-2]),
        },
    )
