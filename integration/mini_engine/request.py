"""A request of the mini engine; it satisfies `kv_connector.base.Request`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_connector.index import BlockHasher
from kv_connector.types import BlockHash


@dataclass(slots=True, eq=False)
class EngineRequest:
    """Tokens, progress and device blocks of one request. Only the engine's scheduler changes it."""

    request_id: str
    token_ids: list[int]  # prompt, then what was generated
    max_new_tokens: int
    hasher: BlockHasher
    arrival: float = field(default_factory=time.perf_counter)
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0  # whose keys and values are on the device
    block_ids: list[int] = field(default_factory=list)
    num_attached: int = 0  # leading full blocks that have been offered to the device tier as copies
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    has_received: bool = False  # an asynchronous load has filled its blocks
    is_aborted: bool = False  # while such a load was under way
    first_token_at: float | None = None
    draft_token_ids: list[int] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None  # what the client says of another engine
    transfer: dict[str, Any] | None = None  # what another engine has to be told to continue it

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.hasher.update(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the full blocks among them."""
        return self.hasher.hashes

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether all tokens asked for are there."""
        return self.num_tokens - self.num_prompt_tokens >= self.max_new_tokens

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        assert self.first_token_at is not None, f"request {self.request_id} has no token yet"
        return self.first_token_at - self.arrival

    def append(self, token_id: int) -> None:
        """Take in a generated token."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.token_ids.append(token_id)
        self.hasher.update(self.token_ids)
