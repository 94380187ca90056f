"""What is cached where: Python and a little NumPy, no torch, no threads, no clock of its own (layer 1)."""

from .eviction import Recency
from .fragments import FragmentTree
from .groups import BlockGroup, GroupedTree, GroupKeys, describe_groups, group_key, may_truncate, split_key
from .hashing import BlockHasher, MultimodalItem, adopt_hash, adopt_hashes, root_hash
from .identity import CacheIdentity, RankIdentity
from .lookup import Hit, Lookup
from .policy import SavePolicy
from .pool import BlockPool
from .reuse import ReuseModel
from .states import BlockState, Event, IllegalTransition, advance
from .tenants import TenantQueues
from .terms import LEAST_PRIORITY, MOST_PRIORITY, PLAIN, PRIORITY_STEP, Terms, terms_of
from .tier import CacheTier
from .tree import LEAST_REMEMBERED, ROOT, PrefixTree

__all__ = [
    "LEAST_PRIORITY",
    "LEAST_REMEMBERED",
    "MOST_PRIORITY",
    "PLAIN",
    "PRIORITY_STEP",
    "ROOT",
    "BlockGroup",
    "BlockHasher",
    "BlockPool",
    "BlockState",
    "CacheIdentity",
    "CacheTier",
    "Event",
    "FragmentTree",
    "GroupKeys",
    "GroupedTree",
    "Hit",
    "IllegalTransition",
    "Lookup",
    "MultimodalItem",
    "PrefixTree",
    "RankIdentity",
    "Recency",
    "ReuseModel",
    "SavePolicy",
    "TenantQueues",
    "Terms",
    "adopt_hash",
    "adopt_hashes",
    "advance",
    "describe_groups",
    "group_key",
    "may_truncate",
    "root_hash",
    "split_key",
    "terms_of",
]
