"""The states of a block's copy on one tier, and the only way from one to the next.

    ABSENT --COMPUTE--> COMPUTING             --FILL--> RESIDENT      device: the model writes it
    ABSENT --SWAP_IN--> SWAPPING_TO_DEVICE    --FILL--> RESIDENT      device: a load writes it
    ABSENT --SWAP_OUT-> SWAPPING_TO_HOST      --FILL--> RESIDENT      host: a save writes it
    ABSENT --FETCH----> LOADING_FROM_STORAGE  --FILL--> RESIDENT      host: storage writes it
    ABSENT --BACK_UP--> BACKING_UP            --FILL--> RESIDENT      storage: reserved

Nothing makes copies on the tier STORAGE: storage is asked by hash, and what it holds is not tracked. A copy being
written may FAIL back to ABSENT; a resident one may be EVICTed. A copy that somebody still reads or writes when it must
go is DELETING, matched by nobody, until its last user lets go (FREE).
"""

from __future__ import annotations

from enum import IntEnum

from ..errors import KVConnectorError
from ..types import Tier


class BlockState(IntEnum):
    """State of one copy of a block. Only RESIDENT may be matched; the value fits a byte."""

    ABSENT = 0
    COMPUTING = 1
    SWAPPING_TO_DEVICE = 2
    SWAPPING_TO_HOST = 3
    LOADING_FROM_STORAGE = 4
    BACKING_UP = 5
    RESIDENT = 6
    DELETING = 7


class Event(IntEnum):
    """What can happen to a copy. The first five start one, each on the tier that it names."""

    COMPUTE = 0
    SWAP_IN = 1
    SWAP_OUT = 2
    FETCH = 3
    BACK_UP = 4
    FILL = 5
    FAIL = 6
    EVICT = 7
    DELETE = 8
    FREE = 9


_STARTS = {
    Event.COMPUTE: (Tier.DEVICE, BlockState.COMPUTING),
    Event.SWAP_IN: (Tier.DEVICE, BlockState.SWAPPING_TO_DEVICE),
    Event.SWAP_OUT: (Tier.HOST, BlockState.SWAPPING_TO_HOST),
    Event.FETCH: (Tier.HOST, BlockState.LOADING_FROM_STORAGE),
    Event.BACK_UP: (Tier.STORAGE, BlockState.BACKING_UP),
}
_ILLEGAL = -1


def _build_table() -> list[list[list[int]]]:
    """[tier][state][event] -> next state, or _ILLEGAL; nested lists because `advance` runs once a block."""
    table = [[[_ILLEGAL] * len(Event) for _ in BlockState] for _ in Tier]
    for start, (tier, filling) in _STARTS.items():
        table[tier][BlockState.ABSENT][start] = filling
        table[tier][filling][Event.FILL] = BlockState.RESIDENT
        table[tier][filling][Event.FAIL] = BlockState.ABSENT
        table[tier][filling][Event.DELETE] = BlockState.DELETING
    for tier in Tier:
        table[tier][BlockState.RESIDENT][Event.EVICT] = BlockState.ABSENT
        table[tier][BlockState.RESIDENT][Event.DELETE] = BlockState.DELETING
        table[tier][BlockState.DELETING][Event.FREE] = BlockState.ABSENT
    return table


_TABLE = _build_table()


class IllegalTransition(KVConnectorError):
    """A copy was asked to do what its state does not allow: a bug in the caller, never a user's fault."""


def advance(tier: Tier, state: int, event: Event) -> int:
    """The state after `event`, as the int value of a BlockState; raises IllegalTransition where there is none."""
    after = _TABLE[tier][state][event]
    if after == _ILLEGAL:
        raise IllegalTransition(f"{event.name} on a {tier.name} copy that is {BlockState(state).name}")
    return after
