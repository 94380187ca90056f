"""What crosses a simulated engine: requests, the steps that compute them, and what the device knows of a sequence.

The scheduler's side of an engine that plans ahead is optimistic: `num_computed_tokens` has every token and draft in
flight. The device's side knows what was accepted; a step's real start is found when it runs (`Item.resolve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_connector.index import BlockHasher
from kv_connector.types import BlockHash, StepPlan, StepReport

from .config import EngineConfig
from .device import SimulatedEvent
from .model import ModelShape, Oracle, Sight, Words, token_of


class Status(Enum):
    """As vLLM's: LOADING is WAITING_FOR_REMOTE_KVS, IDLE is WAITING_FOR_STREAMING_REQ."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    IDLE = "idle"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request as the engine's scheduler knows it; it satisfies `kv_connector.base.Request`."""

    request_id: str
    number: int  # of the request in its world: ids come again
    tokens: list[int]  # prompt, then what was generated and delivered
    max_tokens: int
    hasher: BlockHasher
    oracle: Oracle
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_drafts: int = 0  # to be scheduled next
    num_in_flight: int = 0  # tokens
    num_stale: int = 0  # tokens in flight of before a preemption
    drops_stale: bool = False
    num_preemptions: int = 0
    num_rejected: int = 0  # drafts, as far as the scheduler knows
    is_prefill_chunk: bool = True
    last_sequence: int = -1  # the last step that it was scheduled in, by the count of deferred frees
    is_private: bool = False  # its blocks get no names: a reset has passed over it
    is_aborted: bool = False
    is_session: bool = False  # at its end it waits for more input
    tables: list[list[int]] = field(default_factory=list)  # by block group; 0: no block
    num_named: list[int] = field(default_factory=list)
    device: DeviceSequence | None = None
    handed: dict[str, Any] | None = None  # what request_finished said
    progressed_in: int = 0  # step

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.hasher.update(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        return self.hasher.hashes

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_for_others(self) -> bool:
        """Whether another engine is to continue it."""
        return bool(self.kv_transfer_params and self.kv_transfer_params.get("do_remote_decode"))

    @property
    def is_from_others(self) -> bool:
        """Whether another engine has computed its prompt."""
        return bool(self.kv_transfer_params and self.kv_transfer_params.get("do_remote_prefill"))

    @property
    def is_handed(self) -> bool:
        """Whether it concerns another engine."""
        return self.is_for_others or self.is_from_others

    @property
    def holds_blocks(self) -> bool:
        return self.num_computed_tokens > 0 or self.status is Status.LOADING

    @property
    def has_started(self) -> bool:
        """Whether it goes on with what it has, whatever is reset: one whose load failed may have nothing, and run."""
        return self.holds_blocks or self.status is Status.RUNNING


@dataclass(slots=True, eq=False)
class DeviceSequence:
    """A sequence from one admission on, as the device knows it."""

    tokens: list[int]
    oracle: Oracle  # knows which drafts would be right
    epoch: int
    num_rejected: int = 0
    drafts: list[int] = field(default_factory=list)
    last_sampled: list[SimulatedEvent] | None = None  # by rank: of the last step that samples it


class Places(NamedTuple):
    """Of rows, which of them lie on a rank, and those rows' blocks and places in these."""

    is_own: NDArray[np.bool_]
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Item:
    """One request's share of a step. `slots[g]` are the slots of its rows in group g's cache tensors."""

    request: SimulatedRequest
    device: DeviceSequence
    num_computed: int
    num_scheduled: int
    num_drafts: int
    samples: bool
    known_rejected: int
    tables: list[list[int]]
    slots: list[NDArray[np.int64]]
    states: list[tuple[int, int]]  # by group: the blocks of the state before and of the one behind; 0: none
    copies: list[tuple[int, int]]  # device blocks that are copied in front of the step, and where
    sampled_before: list[SimulatedEvent] | None = None  # by rank: of the step that it needs the token of
    start: int = -1
    inputs: list[int] = field(default_factory=list)
    h: list[Words | None] = field(default_factory=list)  # by rank: (heads, tokens)
    rows: list[Words | None] = field(default_factory=list)  # by rank: what the last layer has written
    generated: list[int] = field(default_factory=list)
    places: dict[tuple[int, int, int], Places] = field(default_factory=dict)
    """By rank, group and first position: where on the rank the rows from there up to the last are."""

    def resolve(self) -> None:
        """Where it really starts and what it computes, when the first rank comes to it."""
        if self.start >= 0:
            return
        device = self.device
        self.start = self.num_computed - (device.num_rejected - self.known_rejected)
        num_known = self.num_scheduled - self.num_drafts
        self.inputs = device.tokens[self.start : self.start + num_known] + device.drafts[: self.num_drafts]
        self.inputs += [0] * (self.num_scheduled - len(self.inputs))  # drafts that were not made
        assert not self.samples or self.start + num_known == len(device.tokens), "a step samples behind the last token"

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled

    def sample(self, draft: Sampler, config: EngineConfig) -> None:
        """All ranks have computed it: what it generates, and the drafts behind that."""
        if not self.samples:
            return
        first = self.num_scheduled - self.num_drafts - 1
        total = np.zeros(self.num_drafts + 1, dtype=np.uint64)
        for rank, h in enumerate(self.h):
            assert h is not None
            if config.leads(rank):
                total += h[:, first:].sum(axis=0, dtype=np.uint64)
        tokens = [token_of(word) for word in total.tolist()]
        drafts = self.inputs[first + 1 :]
        num_accepted = 0
        while num_accepted < self.num_drafts and drafts[num_accepted] == tokens[num_accepted]:
            num_accepted += 1
        self.generated = tokens[: num_accepted + 1]
        self.device.tokens += self.generated
        self.device.num_rejected += self.num_drafts - num_accepted
        self.device.drafts = draft.propose(self.device)


@dataclass(slots=True, eq=False)
class Sampler:
    """Makes drafts: as many right ones as chance says. `rng` is that of the engine."""

    rng: Any
    num_drafts: int
    acceptance: float

    def propose(self, device: DeviceSequence) -> list[int]:
        """Drafts behind the sequence."""
        if not self.num_drafts:
            return []
        ahead = len(device.tokens) - len(device.oracle.tokens)
        right = device.oracle.peek(ahead + self.num_drafts)[ahead:] if ahead >= 0 else []
        drafts = []
        for index in range(self.num_drafts):
            is_right = index < len(right) and self.rng.random() < self.acceptance
            drafts.append(right[index] if is_right else self.rng.randrange(997))
        return drafts


@dataclass(slots=True, eq=False)
class RankResult:
    """What a rank says after a step."""

    report: StepReport
    received: set[str]
    failed: set[str]
    invalid: set[int]


@dataclass(slots=True, eq=False)
class Step:
    """One step, from its plan to its update."""

    number: int
    plan: StepPlan
    items: list[Item]
    sampled: list[SimulatedEvent]  # by rank: all ranks have computed it
    stages: list[SimulatedEvent]  # by rank: this one has
    num_computing: int  # ranks that have still to compute it
    results: list[RankResult | None]
    previous: list[SimulatedEvent] | None = None  # `sampled` of the step with a forward pass in front of it

    @property
    def num_tokens(self) -> int:
        return sum(item.num_scheduled for item in self.items)

    @property
    def is_done(self) -> bool:
        return all(result is not None for result in self.results)


def slots_of(table: Sequence[int], block_size: int, num_tokens: int, block_words: int) -> NDArray[np.int64]:
    """The slot of each position's row in tensors with so many words a block; what lies in no block points nowhere."""
    blocks = np.array(table[: -(-num_tokens // block_size)], dtype=np.int64)
    slots = blocks[:, None] * block_words + np.arange(block_size)
    return np.where(blocks[:, None] > 0, slots, np.int64(1 << 40)).ravel()


def shape_of(config: EngineConfig) -> ModelShape:
    """The layers of each block group, in turn."""
    groups = config.layer_groups
    return ModelShape(
        tuple(range(len(groups))) * config.num_layers,
        tuple(map(Sight, (group.window for group in groups), config.chunks)),
        tuple(group.is_recurrent for group in groups),
        config.num_heads or config.num_ranks,
        config.num_parts,
        config.interleave,
        config.replicas,
    )
