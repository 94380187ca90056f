"""Write policies: which blocks are saved to the host, and when.

    adaptive                 every full block, in the step that computes it, unless all that could go for it is worth
                             more (`reuse.py`)
    write_through            every full block, in the step that computes it
    write_through_selective  a block that later requests have asked for `threshold` times, in the step of that request
    write_back               a block that is next in line for reuse on the device

A pinned prefix is saved under every policy as soon as it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config, WritePolicy


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """The rule that the scheduler half asks; it keeps no state."""

    policy: WritePolicy
    threshold: int
    lookahead: int

    @classmethod
    def from_config(cls, config: Config) -> SavePolicy:
        """The policy that a Config asks for."""
        return cls(config.write_policy, config.write_through_threshold, config.write_back_lookahead)

    def wants(self, hits: int, pinned: bool) -> bool:
        """Whether a block that is valid on the device, or will be after this step, is to be saved now."""
        if pinned or self.policy in (WritePolicy.ADAPTIVE, WritePolicy.WRITE_THROUGH):
            return True
        return self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE and hits >= self.threshold

    @property
    def declines(self) -> bool:
        """Whether blocks are not saved that are worth less than what would have to go for them."""
        return self.policy is WritePolicy.ADAPTIVE

    @property
    def saves_before_reuse(self) -> bool:
        """Whether the device blocks at the head of the reuse order, at least `lookahead`, are to be kept saved."""
        return self.policy is WritePolicy.WRITE_BACK
