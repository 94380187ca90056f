"""Terms of a request's blocks (tenant, priority, whether transient), which the tree notes for each block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .columns import column

LEAST_PRIORITY, MOST_PRIORITY = -2, 2
NUM_PRIORITIES = MOST_PRIORITY - LEAST_PRIORITY + 1
PRIORITY_STEP = 4.0
"""What a priority adds to a block's worth: more than any worth that is learned, which is 2 at most (`reuse.py`), so a
block goes before all of a higher priority."""


@dataclass(frozen=True, slots=True)
class Terms:
    """`tenant`: index of the tenant that the blocks belong to; that of a prefix's first block counts for all blocks
    behind it. `priority`: the lowest is evicted first; a block has the highest of the requests that asked for it.
    `is_transient`: the blocks have a time to live, and are kept on the host alone, until a request without one asks for
    them. `is_barred`: no request has asked for them, see `NodeTerms`."""

    tenant: int = 0
    priority: int = 0
    is_transient: bool = False
    is_barred: bool = False

    most_worth: float = field(init=False)
    """What may go for such blocks where none is declined for what it is worth: all but those of higher priorities."""

    @property
    def claim(self) -> tuple[float, int]:
        """`most_worth` and the tenant, as `CacheTier.allocate_behind` takes them."""
        return self.most_worth, self.tenant

    def __post_init__(self) -> None:
        object.__setattr__(self, "most_worth", PRIORITY_STEP * self.priority + PRIORITY_STEP / 2)


PLAIN = Terms()


def terms_of(tenant: int) -> Terms:
    """The terms of a tenant's blocks without hints; `PLAIN` itself for the default tenant."""
    return Terms(tenant) if tenant else PLAIN


class NodeTerms:
    """The terms of a tree's nodes, as arrays by node. `barred`: what the device has of them is not to be saved until a
    request asks for them. `were_given`: whether any ever had others than `PLAIN`, or was barred; until then nothing is
    written, and nothing has to be compared."""

    def __init__(self) -> None:
        self.tenant = bytearray(1)
        self.priority = array("b", [0])
        self.transient = bytearray(1)
        self.barred = bytearray(1)
        self.were_given = False

    def grow(self, num_rows: int) -> None:
        """There are so many more rows, of no nodes yet."""
        self.priority.frombytes(bytes(num_rows))
        self.tenant += bytes(num_rows)
        self.transient += bytes(num_rows)
        self.barred += bytes(num_rows)

    def begin(self, nodes: Sequence[int], terms: Terms, parent: int) -> None:
        """These nodes are new, and the first of them comes behind the parent; 0 is behind none."""
        self.were_given = True
        tenant = self.tenant[parent] if parent else terms.tenant
        for node in nodes:
            self.tenant[node] = tenant
            self.priority[node] = terms.priority
            self.transient[node] = terms.is_transient
            self.barred[node] = terms.is_barred

    def use(self, nodes: Iterable[int], terms: Terms) -> list[int]:
        """A request asks for these nodes on these terms; returns those that are transient no more."""
        if terms is PLAIN and not self.were_given:
            return []
        self.were_given = True
        rows = np.fromiter(nodes, np.intp)
        column(self.barred)[rows] = 0
        column(self.priority)[rows] = np.maximum(column(self.priority)[rows], terms.priority)
        if terms.is_transient:
            return []
        kept: list[int] = rows[column(self.transient)[rows] > 0].tolist()
        column(self.transient)[rows] = 0
        return kept

    def bar(self, nodes: Iterable[int]) -> None:
        """What the device has of these nodes is saved no more, until a request asks for them."""
        for node in nodes:
            self.were_given = True
            self.barred[node] = 1

    def bar_tenant(self, tenant: int) -> None:
        """As `bar`, of all that are the tenant's; as fast as arrays are written."""
        self.were_given = True
        column(self.barred)[column(self.tenant) == tenant] = 1
