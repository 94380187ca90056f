"""The client of S3 by itself: bytes in memory against objects of a real server, and where credentials come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from integration.s3_server import S3Server, why_not
from kv_connector.config import S3Config
from kv_connector.errors import ConfigError
from kv_connector.storage.base import address
from kv_connector.storage.objects.client import Answer, Fragment, StoreUnreachable, Transfer
from kv_connector.storage.s3.client import S3Client
from kv_connector.storage.s3.credentials import Credentials
from tests.storage.s3.buckets import s3_config, shared_server
from tests.storage.storages import buffers

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
PAGE = 4096
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION")


@pytest.fixture(scope="module")
def server() -> S3Server:
    return shared_server()


@pytest.fixture
def client(server: S3Server, request: pytest.FixtureRequest) -> Iterator[S3Client]:
    client = S3Client(s3_config(server.endpoint, prefix=f"tests/{request.node.name}", concurrency=4))
    client.connect(())
    yield client
    client.close()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without credentials, and the file where a profile would be."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def transfer(name: str, *parts: memoryview) -> Transfer:
    return Transfer(name, tuple(Fragment(address(part), part.nbytes) for part in parts))


def test_parts_of_memory_are_one_object_and_are_read_into_others(client: S3Client) -> None:
    header, first, second = buffers(3, PAGE)
    both = memoryview(bytearray(2 * PAGE))
    for i, part in enumerate((header, first, second)):
        part[:] = np.random.default_rng(i).bytes(PAGE)
    assert client.put([transfer("a", second, first), transfer("b", header)]) == [Answer.OK] * 2
    assert client.exist(["a", "none", "b"]) == [True, False, True]
    other = buffers(1, PAGE)[0]
    answers = client.get([transfer("a", both), transfer("none", other), transfer("b", other)])
    assert answers == [Answer.OK, Answer.MISSING, Answer.OK]
    assert bytes(both) == bytes(second) + bytes(first)
    assert bytes(other) == bytes(header)


def test_an_object_of_another_length_is_damaged_and_nothing_is_read(client: S3Client) -> None:
    (page,) = buffers(1, PAGE)
    page[:] = b"x" * PAGE
    client.put([transfer("a", page)])
    for num_bytes in (PAGE // 2, 2 * PAGE):
        target = memoryview(bytearray(num_bytes))
        assert client.get([transfer("a", target)]) == [Answer.DAMAGED]
        assert bytes(target) == bytes(num_bytes)


def test_what_is_removed_is_told_and_is_gone(client: S3Client) -> None:
    (page,) = buffers(1, PAGE)
    client.put([transfer(name, page) for name in "abc"])
    assert client.remove(["a", "none", "c"]) == [True, False, True]
    assert client.exist(["a", "b", "c"]) == [False, True, False]
    assert client.remove(["none"]) == [False]


def test_more_objects_than_requests_at_a_time(client: S3Client) -> None:
    pages = buffers(40, PAGE)
    for i, page in enumerate(pages):
        page[:] = bytes([i]) * PAGE
    names = [f"object {i}" for i in range(40)]
    assert client.put([transfer(name, page) for name, page in zip(names, pages, strict=True)]) == [Answer.OK] * 40
    assert all(client.exist(names))
    others = buffers(40, PAGE)
    client.get([transfer(name, page) for name, page in zip(names, others, strict=True)])
    assert all(bytes(page) == bytes(other) for page, other in zip(pages, others, strict=True))


def test_after_closing_nothing_is_asked(client: S3Client) -> None:
    client.close()
    client.close()
    with pytest.raises(StoreUnreachable):
        client.exist(["a"])


def test_credentials_of_the_environment(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "for an hour")
    found = Credentials(1.0)()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("mine", "hidden", "for an hour")


def test_credentials_of_a_profile_and_what_they_are_changed_to(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = Credentials(1.0)
    file = nobody / "credentials"
    file.write_text("[default]\naws_access_key_id = one\naws_secret_access_key = hidden\n")
    assert credentials()["access_key_id"] == "one"
    file.write_text("[default]\naws_access_key_id = two\naws_secret_access_key = hidden\n")
    assert credentials()["access_key_id"] == "two", "whoever rotates them need not restart the engine"
    file.write_text(file.read_text() + "[team]\naws_access_key_id = three\naws_secret_access_key = hidden\n")
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert credentials()["access_key_id"] == "three"


def test_without_credentials_it_is_said_what_to_do(nobody: Path) -> None:
    with pytest.raises(LookupError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or"):
        Credentials(1.0)()


def test_what_a_program_says_that_is_asked_for_credentials_is_not_repeated(nobody: Path) -> None:
    program = nobody / "program"
    program.write_text("#!/bin/sh\necho the secret is hunter2 >&2\nexit 1\n")
    program.chmod(0o700)
    (nobody / "config").write_text(f"[default]\ncredential_process = {program}\n")
    with pytest.raises(LookupError, match=r"CredentialRetrievalError.*`aws configure list`") as caught:
        Credentials(1.0)()
    assert "hunter2" not in str(caught.value)


def test_the_region_is_the_settings_the_environments_or_the_profiles(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def region(**settings: str) -> object:
        return S3Client(S3Config("bucket", **settings))._store.config["region"]

    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert region() == "us-east-1"
    (nobody / "config").write_text("[default]\nregion = eu-north-1\n")
    assert region() == "eu-north-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert region() == "eu-west-3"
    assert region(region="ap-south-1") == "ap-south-1"


def test_a_profile_that_is_not_there_is_told_at_the_start(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"AWS_\* variables: The config profile \(nobody\) could not be found"):
        S3Client(S3Config("bucket"))


def test_variables_that_cannot_be_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "perhaps")
    with pytest.raises(ConfigError, match=r'the environment\'s AWS_\* variables: .*"perhaps" as boolean'):
        S3Client(S3Config("bucket"))


@pytest.mark.parametrize("module", ["obstore", "botocore.session"])
def test_without_the_wheels_the_start_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'obstore>=.*' 'botocore>="):
        S3Client(S3Config("bucket"))
