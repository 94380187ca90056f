"""An operator steers an engine that serves, and one that rests: what he asks for is done between two of its steps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kv_connector.admin.actions import ListPins, ReadStats, tier_of
from kv_connector.admin.base import Answer, Refusal, SteeredEngine
from kv_connector.admin.client import AdminClient
from kv_connector.admin.inbox import Inbox
from kv_connector.metrics import DOCUMENTATION
from tests.admin.stepping import stepping
from tests.storage.storages import HeldStorage
from tests.waiting import until

SYSTEM = list(range(100, 116))  # four blocks


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, str]:
    return {"socket": str(tmp_path / "admin.sock")}


def others(count: int) -> list[list[int]]:
    """Prompts that share nothing, of six blocks each."""
    return [[200 + 24 * number + position for position in range(24)] for number in range(count)]


def host_tier(client: AdminClient) -> Any:
    """What is told of the host."""
    return client.call("GET", "/v1/stats")["tiers"]["host"]


def test_a_pinned_prefix_outlasts_a_flood(admin: dict[str, str]) -> None:
    """And one that is not pinned any more does not."""
    with stepping(admin=admin, write_policy="write_through") as (engine, client):
        (first,) = engine.generate([[*SYSTEM, 1]])
        pinned = client.call("POST", "/v1/pins", {"token_ids": [*SYSTEM, 1, 2]})
        assert pinned["num_blocks"] == 4
        engine.generate(others(12))
        (again,) = engine.generate([[*SYSTEM, 1]])
        assert again.host_hit_tokens == 16 and again.output_token_ids == first.output_token_ids
        assert client.call("GET", "/v1/pins")["pins"] == [{"id": pinned["id"], "num_blocks": 4, "seconds_left": None}]
        assert client.call("DELETE", f"/v1/pins/{pinned['id']}") == pinned
        engine.generate(others(12))
        assert engine.generate([[*SYSTEM, 1]])[0].host_hit_tokens == 0
        with pytest.raises(Refusal, match="no pin has this id") as refused:
            client.call("DELETE", f"/v1/pins/{pinned['id']}")
        assert refused.value.status == 404


def test_a_prefix_is_pinned_once_however_often_it_is_asked_for(admin: dict[str, str]) -> None:
    """By tokens, text or hashes: the later word counts, also of how long."""
    with stepping(admin=admin) as (engine, client):
        half = engine.engine.connector
        assert half is not None
        text = "system prompt"
        by_text = client.call("POST", "/v1/pins", {"text": text, "ttl_s": 1000})
        by_tokens = client.call("POST", "/v1/pins", {"token_ids": list(text.encode())})
        hashes = [h.hex() for h in engine.prefixes.hashes(list(text.encode()), "")]
        assert by_text == by_tokens == client.call("POST", "/v1/pins", {"hashes": hashes, "ttl_s": 2000})
        (pin,) = client.call("GET", "/v1/pins")["pins"]
        assert 1000 < pin["seconds_left"] <= 2000
        assert host_tier(client)["pinned_blocks"] == 3
        client.call("DELETE", f"/v1/pins/{by_text['id']}")
        assert host_tier(client)["pinned_blocks"] == 0


def test_hashes_are_taken_once_requests_have_shown_them_as_a_prompts_first_blocks(admin: dict[str, str]) -> None:
    """Those that events tell of lack what is in front of them, and would lie where no request looks for them."""
    with stepping(admin=admin, write_policy="write_through") as (engine, client):
        prompt = [*SYSTEM, 1]
        hashes = [h.hex() for h in engine.prefixes.hashes(prompt, "")]
        wrong = [hashes, hashes[1:], [hashes[0], hashes[2]], hashes[::-1], [hashes[0], hashes[0]]]
        refusal = "not known as those of a prompt's blocks from its first one on"
        for call in ("/v1/pins", "/v1/warm"):
            for given in wrong:
                with pytest.raises(Refusal, match=refusal) as refused:
                    client.call("POST", call, {"hashes": given})
                assert refused.value.status == 409
        engine.generate([prompt])
        for given in wrong[1:]:
            with pytest.raises(Refusal, match=refusal):
                client.call("POST", "/v1/pins", {"hashes": given})
        assert client.call("POST", "/v1/pins", {"hashes": hashes})["num_blocks"] == len(hashes) == 4
        engine.generate(others(12))
        assert engine.generate([prompt])[0].host_hit_tokens == 16


def test_a_pin_ends_when_its_time_is_over(admin: dict[str, str]) -> None:
    """Time of this engine passes as it is looked at; in the end it is as if the prefix had never been pinned."""
    with stepping(admin=admin) as (engine, client):
        client.call("POST", "/v1/pins", {"token_ids": SYSTEM, "ttl_s": 0.05})
        until(lambda: not client.call("GET", "/v1/pins")["pins"], told=lambda: client.call("GET", "/v1/pins"))
        client.call("POST", "/v1/pins", {"token_ids": SYSTEM})
        (pin,) = client.call("GET", "/v1/pins")["pins"]
        assert pin["seconds_left"] is None
        client.call("DELETE", f"/v1/pins/{pin['id']}")
        engine.generate(others(1))
        assert host_tier(client)["pinned_blocks"] == 0


def test_the_host_is_made_smaller_and_larger_while_requests_run(admin: dict[str, str]) -> None:
    with stepping(admin=admin, write_policy="write_through") as (engine, client):
        engine.generate(others(1))
        whole = client.call("GET", "/v1/stats")
        num_blocks = whole["tiers"]["host"]["host_capacity_blocks"]
        block_bytes = whole["host_block_bytes"]
        assert whole["host_memory_bytes"] == 64 << 10 and num_blocks == (64 << 10) // block_bytes
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(engine.generate, others(12), 6)
            small = client.call("POST", "/v1/resize", {"host_memory": 3 * block_bytes + 1})
            assert small == {"host_capacity_blocks": 3, "host_memory_bytes": 3 * block_bytes}
            for most in (whole["host_memory_bytes"], None):  # what the engine was started with, in figures and in words
                assert client.call("POST", "/v1/resize", {"host_memory": most})["host_capacity_blocks"] == num_blocks
            resized = [request.output_token_ids for request in answers.result()]
        assert [request.output_token_ids for request in engine.generate(others(12), 6)] == resized
        with pytest.raises(
            Refusal, match="host_memory=131072 is more than the 65536 bytes that the engine was started"
        ):
            client.call("POST", "/v1/resize", {"host_memory": "128KiB"})


def test_a_reset_forgets_the_host(admin: dict[str, str]) -> None:
    with stepping(admin=admin, write_policy="write_through") as (engine, client):
        engine.generate([[*SYSTEM, 1], *others(1)])
        assert client.call("POST", "/v1/reset") == {"done": True}
        assert client.call("GET", "/v1/stats")["tiers"]["host"]["host_cached_blocks"] == 0


def test_a_tenant_is_cleared_and_a_misspelt_one_is_not(admin: dict[str, str]) -> None:
    with stepping(admin=admin, write_policy="write_through", tenants={"alice": {"weight": 1}}) as (engine, client):
        engine.generate([[*SYSTEM, 1]])
        tenants = client.call("GET", "/v1/stats")["tenants"]
        assert set(tenants) == {"alice", "default"} and tenants["default"]["held_blocks"] >= 4
        cleared = client.call("POST", "/v1/tenants/default/clear")
        assert cleared == {"tenant": "default", "num_blocks": tenants["default"]["held_blocks"]}
        assert client.call("GET", "/v1/stats")["tenants"]["default"]["held_blocks"] == 0
        for method, path, body in (
            ("POST", "/v1/tenants/al%20ice/clear", None),
            ("POST", "/v1/pins", {"token_ids": SYSTEM, "tenant": "al ice"}),
            ("POST", "/v1/warm", {"token_ids": SYSTEM, "tenant": "al ice"}),
        ):
            with pytest.raises(Refusal, match=r"al ice.*alice") as refused:
                client.call(method, path, body)
            assert refused.value.status == 404


def test_what_is_drained_is_warm_again_after_a_reset(admin: dict[str, str], tmp_path: Path) -> None:
    """An engine that rests writes all that it has; and reads it again before anybody asks for it."""
    storage = {"path": str(tmp_path), "capacity": "8MiB", "backup": "on_eviction"}
    held = HeldStorage()
    with stepping(
        admin=admin, write_policy="write_through", storage=storage, storages=[held], host_memory=128 << 10
    ) as (
        engine,
        client,
    ):
        (first,) = engine.generate([[*SYSTEM, 1]])
        assert not held.blocks
        assert client.call("POST", "/v1/drain", {"wait_s": 60}) == {"done": True, "remaining_blocks": 0}
        assert len(held.blocks) >= 4
        engine.do(lambda: engine.engine.connector.host.reset())  # type: ignore[union-attr]
        warmed = client.call("POST", "/v1/warm", {"token_ids": SYSTEM})
        assert warmed == {"started": True, "num_blocks": 4}
        until(lambda: host_tier(client)["host_cached_blocks"] >= 4, told=lambda: host_tier(client))
        (again,) = engine.generate([[*SYSTEM, 1]])
        assert again.output_token_ids == first.output_token_ids


def test_without_storage_nothing_is_drained_or_warmed(admin: dict[str, str]) -> None:
    with stepping(admin=admin) as (_, client):
        with pytest.raises(Refusal, match="there is no storage to write to") as refused:
            client.call("POST", "/v1/drain")
        assert refused.value.status == 409
        assert client.call("POST", "/v1/warm", {"token_ids": SYSTEM}) == {"started": False, "num_blocks": 4}


def test_statistics_are_all_there_and_by_tier(admin: dict[str, str]) -> None:
    with stepping(admin=admin, write_policy="write_through") as (engine, client):
        engine.generate([[*SYSTEM, 1], *others(2), [*SYSTEM, 1]])
        shown = client.call("GET", "/v1/stats")
        known = engine.do(lambda: dict(engine.engine.connector.get_kv_connector_stats()))  # type: ignore[union-attr]
    tiers = shown["tiers"]
    assert {name: value for tier in tiers.values() for name, value in tier.items()} == known
    assert shown["jobs_in_flight"] == known["jobs_in_flight"] and shown["tenants"]["default"]["requests"] == 4
    assert tiers["device"] == {"device_hit_tokens": known["device_hit_tokens"]}


@pytest.mark.parametrize(
    ("statistic", "tier"),
    [
        ("device_hit_tokens", "device"),
        ("host_hit_tokens", "host"),
        ("saved_blocks", "host"),
        ("loading_bytes", "host"),
        ("storage_hit_tokens", "storage"),
        ("fetched_blocks", "storage"),
        ("failed_backup_jobs", "storage"),
        ("dropped_backups_blocks", "storage"),
        ("recomputed_storage_tokens", "storage"),
        ("peer_sent_bytes", "peer"),
        ("offered_blocks", "peer"),
        ("failed_receive_jobs", "peer"),
        ("requests", "engine"),
        ("known_blocks", "engine"),
    ],
)
def test_a_statistic_is_shown_with_its_tier(statistic: str, tier: str) -> None:
    assert statistic in DOCUMENTATION and tier_of(statistic) == tier


def test_many_operators_at_once_disturb_nobody(admin: dict[str, str]) -> None:
    """Each command is done once, between two steps; requests get the tokens that they get alone."""
    prompts = [[*SYSTEM, 1, number] for number in range(8)]
    with stepping(admin=admin, write_policy="write_through") as (engine, client):
        alone = [request.output_token_ids for request in engine.generate(prompts, 6)]

        def steer(number: int) -> None:
            pin = client.call("POST", "/v1/pins", {"token_ids": [number] * 8})["id"]
            client.call("POST", "/v1/resize", {"host_memory": 4096 * (1 + number % 8)})
            client.call("GET", "/v1/stats")
            client.call("DELETE", f"/v1/pins/{pin}")
            client.call("POST", "/v1/reset")
            client.call("POST", "/v1/resize", {"host_memory": None})

        def same_answers() -> None:
            assert [request.output_token_ids for request in engine.generate(prompts, 6)] == alone

        with ThreadPoolExecutor(4) as pool:
            operators = [pool.submit(steer, number) for number in range(16)]
            until(lambda: all(operator.done() for operator in operators), same_answers)
            for operator in operators:
                operator.result()
        assert client.call("GET", "/v1/pins") == {"pins": []}


class Command:
    """Does what it is told, and counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_runs = 0
        self._error = error

    def run(self, engine: SteeredEngine) -> Answer:
        self.num_runs += 1
        if self._error is not None:
            raise self._error
        return {"done": True}


ENGINE: Any = None


def test_a_command_that_the_engine_does_not_come_to_is_not_done_later() -> None:
    inbox, command = Inbox(lambda: None), Command()
    with pytest.raises(Refusal, match=r"the engine has not come to it within 0.01 s") as refused:
        inbox.ask(command, 0.01)
    assert refused.value.status == 504
    inbox.serve(ENGINE)
    assert not command.num_runs and not inbox.has_waiting


def test_a_command_that_has_begun_is_not_withdrawn() -> None:
    """Who asked is told that it may have been done, once it takes longer than it can."""
    taken: list[Any] = []
    inbox, command = Inbox(lambda: taken.append(inbox.take())), Command()
    with pytest.raises(Refusal, match=r"the engine has begun it, and not ended within 0.01 s more: see its log"):
        inbox.ask(command, 0.01)
    taken[0].run(ENGINE)
    assert command.num_runs == 1 and not inbox.has_waiting


def test_whatever_a_command_raises_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The engine's thread goes on, and the log says where it was."""
    for error, status in ((Refusal(404, "not here"), 404), (ZeroDivisionError("oh"), 500)):
        inbox = Inbox(lambda: None)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(inbox.ask, Command(error), 30)
            until(lambda inbox=inbox: inbox.has_waiting)  # type: ignore[misc]
            inbox.serve(ENGINE)
            with pytest.raises(Refusal) as refused:
                answer.result()
        assert refused.value.status == status
    assert str(refused.value) == "ZeroDivisionError: oh; the engine's log has more"
    assert "Command failed" in caplog.text


def test_the_inbox_is_bounded_and_closes() -> None:
    inbox = Inbox(lambda: None)
    with ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(inbox.ask, ListPins(), 60) for _ in range(64)]
        until(lambda: len(inbox._waiting) >= 64, told=lambda: len(inbox._waiting))
        with pytest.raises(Refusal, match="64 commands wait for the engine already: ask again later"):
            inbox.ask(ReadStats(), 60)
        inbox.close()
        for answer in waiting:
            with pytest.raises(Refusal, match="the engine is shutting down"):
                answer.result()
    with pytest.raises(Refusal, match="the engine is shutting down"):
        inbox.ask(ListPins(), 60)
    inbox.close()


def test_an_engine_that_ends_answers_whoever_waits(admin: dict[str, str]) -> None:
    with stepping(admin=admin) as (engine, client):
        is_resting = threading.Event()
        may_go_on = threading.Event()

        def rest() -> None:
            is_resting.set()
            may_go_on.wait()

        with ThreadPoolExecutor(2) as pool:
            busy = pool.submit(engine.do, rest)
            is_resting.wait()
            answer = pool.submit(client.call, "GET", "/v1/stats")
            until(lambda: engine.endpoint.has_waiting)
            engine.endpoint.close()
            with pytest.raises(Refusal, match="the engine is shutting down"):
                answer.result()
            may_go_on.set()
            busy.result()
        with pytest.raises(OSError, match="cannot be reached"):
            client.call("GET", "/v1/stats")
