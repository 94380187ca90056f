"""Lines of the log about peers: few, short, and each on one line, whatever peers do."""

from __future__ import annotations

import logging

import pytest

from kv_connector.log_limiter import LogLimiter


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def limiter(now: list[float], caplog: pytest.LogCaptureFixture) -> LogLimiter:
    caplog.set_level(logging.WARNING, logger="kv_connector.peer")
    return LogLimiter(lambda: now[0])


def test_faults_that_take_turns_are_told_once_a_minute(
    limiter: LogLimiter, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for minute in range(1, 4):
        for _ in range(100):
            limiter.fault("host", "this")
            limiter.fault("host", "that")
        assert len(caplog.records) == 2 * minute
        now[0] += 60.0


def test_who_finds_ever_new_faults_does_not_fill_the_log(limiter: LogLimiter, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1000):
        limiter.fault("host", f"message {number}")
    assert len(caplog.records) == 8
    limiter.fault("another", "message 1")
    assert len(caplog.records) == 9


def test_of_many_peers_the_latest_are_remembered(limiter: LogLimiter, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(300):
        limiter.fault(f"host {number}", "this")
    assert len(limiter._told) == 256, "strangers cannot fill the memory"
    caplog.clear()
    limiter.fault("host 299", "this")
    assert not caplog.records
    limiter.fault("host 0", "this")
    assert len(caplog.records) == 1


def test_a_fault_is_told_again_once_all_was_well(limiter: LogLimiter, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        limiter.fault("host", "this")
        limiter.well("host")
    assert len(caplog.records) == 2


def test_a_text_stays_on_its_line_and_is_short(limiter: LogLimiter, caplog: pytest.LogCaptureFixture) -> None:
    limiter.fault("host", "x\n 2026-11-22 all is well\x1b[2J\u202e" + "y" * 10_000)
    limiter.fault("host\n 2026-11-22 all is well", "this")
    for record in caplog.records:
        assert record.getMessage().isprintable() and len(record.getMessage()) < 400
    assert len(caplog.records) == 2
