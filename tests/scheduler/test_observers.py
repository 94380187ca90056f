"""Who hears of which requests and jobs."""

from __future__ import annotations

from kv_connector.base import SchedulerOutput
from kv_connector.config import Config
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.companion import Admission
from kv_connector.scheduler.observers import GuardedObserver
from kv_connector.scheduler.recording import RequestRecorder
from kv_connector.scheduler.watchdog import OVERDUE_SECONDS
from kv_connector.types import StepReport
from tests.scheduler.test_half import Asked, Clock, ForeignBlocks, admit, report, run, save


class Choosy(RequestRecorder):
    """Wants to hear of requests whose name begins so, and of no job; notes what it is told."""

    def __init__(self, wanted: str) -> None:
        super().__init__(lambda *told: None, Clock())
        self.wanted = wanted
        self.told: list[tuple[str, str]] = []

    def arrived(self, request: Asked) -> bool:  # type: ignore[override]
        self.told.append(("arrived", request.request_id))
        return request.request_id.startswith(self.wanted)

    def admitted(self, admission: Admission) -> None:
        self.told.append(("admitted", admission.request.request_id))

    def preempted(self, request_id: str) -> None:
        self.told.append(("preempted", request_id))

    def finished(self, request: Asked) -> None:  # type: ignore[override]
        self.told.append(("finished", request.request_id))

    def opened(self, job: object, request_ids: object) -> bool:  # type: ignore[override]
        self.told.append(("opened", str(request_ids)))
        return False


def make_observed(
    *observers: RequestRecorder, policy: str = "adaptive", blocks: ForeignBlocks | None = None
) -> tuple[SchedulerHalf, Clock]:
    clock = Clock()
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": policy})
    half = SchedulerHalf(config, 4, clock=clock, observers=observers)
    half.bind_block_pool(blocks or ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=20)])
    return half, clock


def test_who_does_not_want_to_hear_of_a_request_hears_no_more_of_it() -> None:
    """Another observer does; and an id that comes again is another request."""
    some, others = Choosy("a"), Choosy("b")
    half, _ = make_observed(some, others)
    for name in ("b", "c", "a", "a"):
        request = Asked(name, [ord(name)] * 9)
        admit(half, request)
        half.build_connector_meta(SchedulerOutput((), {name}))
        admit(half, request, first_block=10)
        half.request_finished(request)
    life = ["arrived", "admitted", "preempted", "admitted", "finished"]
    assert some.told == [
        ("arrived", "b"),
        ("arrived", "c"),
        ("arrived", "c"),
        *((what, "a") for what in life + life),
    ]
    assert ("admitted", "c") not in others.told and ("finished", "a") not in others.told
    assert [what for what, name in others.told if name == "b"] == life


def test_a_job_is_told_of_where_somebody_listens_to_one_of_its_requests() -> None:
    choosy = Choosy("a")
    half, _ = make_observed(choosy)
    heard, unheard = Asked("a", list(range(9))), Asked("b", list(range(50, 59)))
    save(half, unheard)
    assert "opened" not in [what for what, _ in choosy.told]
    admit(half, heard, first_block=10)
    admit(half, Asked("c", list(range(80, 89))), first_block=20)
    report(half, run(half, heard, Asked("c", list(range(80, 89)))))
    ((_, request_ids),) = [told for told in choosy.told if told[0] == "opened"]
    assert "'a'" in request_ids and "'c'" in request_ids


def test_a_job_of_no_request_is_told_of_whoever_is_listened_to() -> None:
    """Such as a save of what the device will reuse next, whose request has ended."""
    choosy, blocks = Choosy("a"), ForeignBlocks()
    half, _ = make_observed(choosy, policy="write_back", blocks=blocks)
    ended = Asked("b", list(range(8)))
    save(half, ended)
    admit(half, Asked("a", list(range(50, 59))), first_block=10)
    blocks.order = [*enumerate(ended.block_hashes)]
    assert run(half).saves
    assert [what for what, _ in choosy.told].count("opened") == 1


def test_a_guard_wants_to_hear_what_its_observer_does_and_nothing_once_that_has_failed() -> None:
    choosy = Choosy("a")
    guard = GuardedObserver(choosy)
    assert [guard.arrived(Asked(name, [1])) for name in "ab"] == [True, False]
    choosy.told = None  # type: ignore[assignment]
    assert not guard.arrived(Asked("a", [1]))


def test_what_is_served_while_a_copy_hangs_is_recorded() -> None:
    """An engine that does not tell of arrivals."""
    told: list[int] = []
    recorder = RequestRecorder(lambda seconds, num_tokens, *rest: told.append(num_tokens), Clock())
    half, clock = make_observed(recorder)
    stuck = Asked("stuck", list(range(9)))
    admit(half, stuck)
    assert run(half, stuck).saves
    clock.now += OVERDUE_SECONDS + 1
    run(half)
    assert half._watchdog.hangs
    new = Asked("new", list(range(50, 63)))
    admit(half, new, first_block=10)
    half.request_finished(new)
    assert told == [13]
