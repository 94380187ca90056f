"""What becomes of requests and their blocks between their admission and the plan of a step."""

from __future__ import annotations

from kv_connector.config import Config
from kv_connector.events import EventLog
from kv_connector.index import BlockGroup, CacheTier, GroupedTree, Lookup, PrefixTree
from kv_connector.metrics import CacheMetrics
from kv_connector.scheduler.control.tenants import Tenants
from kv_connector.scheduler.ledger import JobLedger
from kv_connector.scheduler.loads.choice import LoadPlanner
from kv_connector.scheduler.loads.leases import LoadLeases
from kv_connector.scheduler.observers import JobTimes, Observers
from kv_connector.scheduler.requests import RequestTable
from kv_connector.scheduler.shared import DevicePool, Shared
from kv_connector.scheduler.steps import InFlightSteps
from kv_connector.types import Tier
from tests.scheduler.test_half import Asked, Clock


def make_table() -> RequestTable:
    """Of a cache that is empty and has no host memory."""
    tree, pool, clock, metrics = PrefixTree(), DevicePool(), Clock(), CacheMetrics()
    host, grouped = CacheTier(tree, Tier.HOST, 0), GroupedTree(tree, (BlockGroup(),))
    ledger = JobLedger(1, pool, host, clock, JobTimes(metrics), Observers())
    shared = Shared(grouped, host, pool, ledger, metrics, EventLog(False), clock, 4, Tenants({}))
    planner = LoadPlanner(Config(), metrics, clock)
    return RequestTable(LoadLeases(shared, Lookup(grouped, host), planner), InFlightSteps(), metrics)


def test_who_has_lost_its_blocks_since_its_admission_is_not_planned() -> None:
    """Preempted or ended; one of the same id that comes after it is, once."""
    table = make_table()
    for name in ("stays", "preempted", "ended", "comes again"):
        table.admit(Asked(name, [1, 2, 3]), [[0]], 0)
    table.preempt("preempted")
    table.finish("ended")
    table.finish("comes again")
    table.admit(Asked("comes again", [4, 5, 6]), [[1]], 0)
    admitted = table.take_admitted()
    assert [(state.request.request_id, state.tables[0].block_ids) for state in admitted] == [
        ("stays", [0]),
        ("comes again", [1]),
    ]
    assert table.take_admitted() == []


def test_a_request_begins_until_the_step_that_it_was_admitted_to_is_planned_or_its_blocks_are_gone() -> None:
    table = make_table()
    for name in ("stays", "ended", "preempted", "comes again"):
        table.admit(Asked(name, [1, 2, 3]), [[0]], 0)
    assert table.num_beginning == 4
    table.finish("comes again")
    for _ in range(2):
        table.admit(Asked("comes again", [1, 2, 3]), [[0]], 0)
    assert table.num_beginning == 4
    table.finish("ended")
    table.preempt("preempted")
    assert table.num_beginning == 2
    table.take_admitted()
    assert table.num_beginning == 0
