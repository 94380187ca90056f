"""Storage in S3 between whose client and server a proxy stands: whatever fails is a miss, and is told once."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.s3_server import SECRET_KEY, S3Server, running_s3, why_not
from kv_connector.storage.objects.backend import ObjectStorage
from tests.storage.objects.stores import connected, identity_of
from tests.storage.s3.buckets import open_s3, shared_server
from tests.storage.s3.proxy import FaultProxy
from tests.storage.storages import SECONDS, exists, get, key, put
from tests.waiting import until

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
ROOT = Path(__file__).parents[3]
LARGE = 1 << 20
"""A block that is an object by itself."""
KEYS = [key(i) for i in range(3)]

WRITER = """
import sys
from tests.storage.objects.stores import connected
from tests.storage.s3.buckets import open_s3
from tests.storage.storages import key, put

storage = connected(open_s3(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), concurrency=1))
put(storage, [key(i) for i in range(3)], int(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def server() -> S3Server:
    return shared_server()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def identity(request: pytest.FixtureRequest) -> bytes:
    return identity_of(Path(request.node.name))


@pytest.fixture
def storage(proxy: FaultProxy, identity: bytes) -> Iterator[ObjectStorage]:
    backend = connected(open_s3(proxy.endpoint, identity, LARGE))
    yield backend
    proxy.go_on()
    backend.close()


def of_groups(method: str, fault: str | int) -> Any:
    """Every such request for blocks."""
    return lambda asked, name: fault if asked == method and "group" in name else None


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def is_found_again(storage: ObjectStorage, keys: list[bytes] = KEYS) -> None:
    """Once the probe has found the store."""
    until(lambda: not storage.stats()["breaker_is_open"])
    until(lambda: exists(storage, keys) == len(keys) and all(get(storage, keys, LARGE)))


@pytest.mark.parametrize("fault", [503, 500, "close"])
def test_what_passes_soon_is_tried_again_and_nobody_notices(
    storage: ObjectStorage, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, fault: str | int
) -> None:
    tries: Counter[tuple[str, str]] = Counter()

    def twice(method: str, name: str) -> str | int | None:
        tries[method, name] += 1
        return fault if tries[method, name] <= 2 else None

    proxy.error = "<Error><Code>SlowDown</Code></Error>"
    proxy.fault = twice
    assert all(put(storage, KEYS, LARGE))
    assert exists(storage, KEYS) == 3
    assert all(get(storage, KEYS, LARGE))
    assert told(caplog) == []
    assert max(tries.values()) >= 3


def test_a_server_that_says_slow_down_is_left_alone(
    storage: ObjectStorage, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(put(storage, KEYS, LARGE))
    proxy.error = "<Error><Code>SlowDown</Code></Error>"
    proxy.fault = lambda method, name: 503
    assert not any(get(storage, KEYS, LARGE))
    assert storage.stats()["breaker_is_open"]
    assert storage.stats()["failed_reads_blocks"] == 3
    (line,) = told(caplog)
    assert "answers 503 SlowDown for bucket 'kv-test': give a lower storage.s3.concurrency" in line
    proxy.fault = lambda method, name: None
    is_found_again(storage)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_an_endpoint_that_hangs_costs_one_time_out_whatever_is_queued(
    proxy: FaultProxy, identity: bytes, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    times = {"timeout_ms": 1000, "connect_timeout_ms": 1000}
    storage = connected(open_s3(proxy.endpoint, identity, LARGE, **times, concurrency=4))
    keys = [key(i) for i in range(24)]
    until(lambda: all(put(storage, keys, LARGE)))
    storage.note_success()
    caplog.clear()
    proxy.requests.clear()
    proxy.fault = of_groups(method, "hang")
    if method == "HEAD":
        assert exists(storage, keys) == 0
    else:
        assert not any(get(storage, keys, LARGE))
        assert storage.stats()["failed_reads_blocks"] == 24
    assert storage.stats()["breaker_is_open"]
    assert len([name for asked, name in proxy.requests if asked == method and "group" in name]) == 4
    (line,) = told(caplog)
    assert "does not answer: it takes longer than storage.s3.timeout_ms" in line
    proxy.fault = lambda method, name: None
    proxy.go_on()
    is_found_again(storage, keys)
    storage.close()


def test_an_answer_that_ends_half_way_is_asked_for_the_rest(storage: ObjectStorage, proxy: FaultProxy) -> None:
    assert all(put(storage, KEYS, LARGE))
    cut: set[str] = set()

    def once(method: str, name: str) -> str | None:
        if method != "GET" or name in cut:
            return None
        cut.add(name)
        return "cut"

    proxy.fault = once
    assert all(get(storage, KEYS, LARGE))
    assert len(cut) == 3


def test_answers_that_always_end_half_way_are_misses(
    storage: ObjectStorage, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(put(storage, KEYS, LARGE))
    proxy.fault = of_groups("GET", "cut")
    assert not any(get(storage, KEYS, LARGE))
    assert storage.stats()["failed_reads_blocks"] == 3
    assert len(told(caplog)) == 1
    proxy.fault = lambda method, name: None
    is_found_again(storage)


@pytest.mark.parametrize("fault", ["flip", "short"])
def test_what_is_not_what_was_written_is_removed_and_written_again(
    storage: ObjectStorage, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    assert all(put(storage, KEYS, LARGE))
    proxy.fault = of_groups("GET", fault)
    assert not any(get(storage, KEYS, LARGE))
    stats = storage.stats()
    assert (stats["corrupt_blocks"], stats["breaker_opened_times"]) == (3, 0), "the server is not to blame"
    assert len(told(caplog)) == 1
    proxy.fault = lambda method, name: None
    assert exists(storage, KEYS) == 0
    assert all(put(storage, KEYS, LARGE))
    assert all(get(storage, KEYS, LARGE))


@pytest.mark.parametrize(
    ("status", "code", "fix"),
    [
        (403, "AccessDenied", "allow these credentials s3:GetObject, s3:PutObject and s3:DeleteObject"),
        (403, "RequestTimeTooSkewed", "set this machine's clock"),
        (400, "ExpiredToken", "renew the credentials"),
    ],
)
def test_a_server_that_refuses_is_told_of_once_with_what_to_do(
    storage: ObjectStorage, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, status: int, code: str, fix: str
) -> None:
    assert all(put(storage, KEYS, LARGE))
    proxy.error = f"<Error><Code>{code}</Code><Message>No.</Message></Error>"
    proxy.fault = lambda method, name: status
    for _ in range(3):
        assert not any(get(storage, KEYS, LARGE))
        assert exists(storage, KEYS) == 0
        assert not any(put(storage, KEYS, LARGE))
    (line,) = told(caplog)
    assert f"answers {status} {code} for bucket 'kv-test': {fix}" in line
    before = len(proxy.requests)
    until(lambda: len(proxy.requests) > before)  # a probe was refused too: it is not about the objects
    proxy.fault = lambda method, name: None
    is_found_again(storage)


@pytest.mark.parametrize("code", ["InvalidObjectState", "AccessDenied"])
def test_an_object_that_may_not_be_read_costs_itself_alone(
    storage: ObjectStorage, proxy: FaultProxy, code: str
) -> None:
    """It was moved to an archive, or is under a key that these credentials may not use."""
    assert all(put(storage, KEYS, LARGE))
    name = storage._groups.name(KEYS[0])
    proxy.error = f"<Error><Code>{code}</Code></Error>"
    proxy.fault = lambda method, asked: 403 if method == "GET" and asked == name else None
    assert get(storage, KEYS, LARGE) == [False, True, True]
    for _ in range(5):
        assert exists(storage, KEYS) == 0, "so nobody asks for it again, and whoever computes it writes it"
        assert all(get(storage, KEYS[1:], LARGE))
    assert storage.stats()["breaker_opened_times"] == 0
    assert all(put(storage, KEYS, LARGE))
    proxy.fault = lambda method, asked: None
    assert exists(storage, KEYS) == 3
    assert all(get(storage, KEYS, LARGE))


def test_a_damaged_object_that_may_not_be_deleted_costs_itself_alone(storage: ObjectStorage, proxy: FaultProxy) -> None:
    """For want of a right that nothing else needs, or because the bucket keeps its objects."""
    assert all(put(storage, KEYS, LARGE))
    name = storage._groups.name(KEYS[0])
    spoilt = {("GET", name): "flip"}
    proxy.fault = lambda method, asked: 403 if method in ("POST", "DELETE") else spoilt.get((method, asked))
    for _ in range(5):
        assert get(storage, KEYS, LARGE) == [False, True, True]
    assert storage.stats()["breaker_opened_times"] == 0
    assert exists(storage, KEYS) == 0
    assert all(put(storage, KEYS, LARGE))
    spoilt.clear()
    assert exists(storage, KEYS) == 3
    assert all(get(storage, KEYS, LARGE))


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_what_is_not_allowed_is_told_at_the_start(
    proxy: FaultProxy, identity: bytes, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Not when the first block is written, or that there is never a hit."""
    proxy.fault = lambda asked, name: 403 if asked == method else None
    storage = open_s3(proxy.endpoint, identity, LARGE)
    until(lambda: bool(told(caplog)))
    assert not any(put(storage, KEYS, LARGE))
    (line,) = told(caplog)
    assert "no connection, it will be tried again" in line and "s3:ListBucket on the bucket" in line
    storage.close()


def test_a_bucket_that_is_not_there_is_told_at_the_start_and_may_come_later(
    server: S3Server, identity: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = f"later-{identity.hex()[:8]}"
    storage = open_s3(server.endpoint, identity, LARGE, bucket=bucket)
    until(lambda: bool(told(caplog)))
    assert not any(put(storage, KEYS, LARGE))
    (line,) = told(caplog)
    assert f"404 NoSuchBucket for bucket '{bucket}': make the bucket, or give another as storage.s3.bucket" in line
    server.make_bucket(bucket)
    connected(storage)
    assert all(put(storage, KEYS, LARGE))
    assert all(get(storage, KEYS, LARGE))
    storage.close()


def test_without_credentials_the_start_says_what_to_do_and_they_may_come_later(
    server: S3Server, identity: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, str(tmp_path / "none"))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        storage = open_s3(server.endpoint, identity, LARGE)
        until(lambda: bool(told(caplog)))
        assert not any(put(storage, KEYS, LARGE))
        (line,) = told(caplog)
        assert "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line
    connected(storage)
    assert all(put(storage, KEYS, LARGE))
    storage.close()


def test_a_killed_server_costs_misses_and_is_found_again(identity: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with running_s3() as server:
        storage = connected(open_s3(server.endpoint, identity, LARGE))
        assert all(put(storage, KEYS, LARGE))
        server.kill()
        assert exists(storage, KEYS) == 0
        assert storage.stats()["breaker_is_open"]
        assert storage.exists(KEYS).done(), "nobody waits for a store that is left alone"
        assert not any(put(storage, KEYS, LARGE))
        assert len(told(caplog)) == 1 and "does not answer: no connection" in told(caplog)[0]
        server.start()
        until(lambda: not storage.stats()["breaker_is_open"])
        assert exists(storage, KEYS) == 0, "what it held is lost"
        assert all(put(storage, KEYS, LARGE))
        is_found_again(storage)
        storage.close()


def test_a_writer_that_is_killed_leaves_whole_objects_or_none(proxy: FaultProxy, identity: bytes) -> None:
    """One object is written, and half of another one, when the writer gets SIGKILL."""
    groups: list[str] = []

    def second(method: str, name: str) -> str | None:
        if method != "PUT" or "group" not in name:
            return None
        groups.append(name)
        return "hold" if len(groups) == 2 else None

    proxy.fault = second
    command = [sys.executable, "-c", WRITER, proxy.endpoint, identity.hex(), str(LARGE)]
    writer = subprocess.Popen(command, cwd=ROOT)
    assert proxy.held.wait(2 * SECONDS)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(SECONDS) == -signal.SIGKILL
    proxy.go_on()
    proxy.fault = lambda method, name: None
    storage = connected(open_s3(proxy.endpoint, identity, LARGE))
    until(lambda: sum(get(storage, KEYS, LARGE)) == 1)
    assert all(put(storage, KEYS, LARGE))
    assert all(get(storage, KEYS, LARGE))
    storage.close()


def test_no_log_and_no_text_has_credentials_in_it(
    proxy: FaultProxy, identity: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server repeats them, as S3 does with the request that a signature was made of."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", token := "a-token-that-is-nobodys-business")
    caplog.set_level(logging.DEBUG)
    storage = connected(open_s3(proxy.endpoint, identity, LARGE, max_retries=0))
    proxy.error = (
        f"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>AKIAKVCONNECTORTEST</AWSAccessKeyId>"
        f"<CanonicalRequest>x-amz-security-token:{token}\n{SECRET_KEY}</CanonicalRequest></Error>"
    )
    put(storage, KEYS, LARGE)
    for fault in (403, 400, 500, "close", "cut"):
        until(lambda: not storage.stats()["breaker_is_open"])
        proxy.fault = lambda method, name, fault=fault: fault  # type: ignore[misc]
        get(storage, KEYS, LARGE)
        put(storage, KEYS, LARGE)
        storage.note_success()
        proxy.fault = lambda method, name: None
    client = storage._client._client
    texts = [caplog.text, repr(client), str(vars(client)), repr(storage.stats()), repr(vars(storage))]
    storage.close()
    assert "SignatureDoesNotMatch" in caplog.text
    assert not any("\n" in line for line in told(caplog)), "what comes behind a line's end is a dump of the request"
    for secret in (token, SECRET_KEY, "AKIAKVCONNECTORTEST"):
        assert not any(secret in text for text in texts)
