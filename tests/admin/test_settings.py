"""The setting `admin`: loopback or a socket, and a token that is neither in the settings nor in any message."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kv_connector.config import AdminConfig, Config
from kv_connector.errors import ConfigError

WRONG = [
    ("127.0.0.1:7200", "admin='127.0.0.1:7200' is not an object: give one such as"),
    ({}, "admin.bind='' and admin.socket='': give one of them, such as"),
    ({"bind": "127.0.0.1:1", "socket": "/s"}, "admin.bind='127.0.0.1:1' and admin.socket='/s': give one of them"),
    ({"bind": "7200"}, "admin.bind='7200': give an address and a port, such as"),
    ({"bind": "127.0.0.1"}, "admin.bind='127.0.0.1': give an address and a port"),
    ({"bind": "http://127.0.0.1:7200"}, "give an address and a port, such as"),
    ({"bind": "127.0.0.1:0"}, "would listen at port 0; give a port from 1 to 65535"),
    ({"bind": "127.0.0.1:65536"}, "would listen at port 65536; give a port from 1 to 65535"),
    ({"bind": "0.0.0.0:7200"}, "admin.bind='0.0.0.0:7200' can be reached from other machines"),
    ({"bind": "[::]:7200"}, "can be reached from other machines"),
    ({"bind": "10.0.0.1:7200"}, 'give a loopback address such as "127.0.0.1:7200", or admin.socket'),
    ({"bind": "my-node:7200"}, "can be reached from other machines"),
    ({"bind": 7200}, "admin.bind=7200 is not text: give it in quotes"),
    ({"socket": "admin.sock"}, "admin.socket='admin.sock' has 10 bytes: give an absolute path of at most 107"),
    ({"socket": "/" + "a" * 107}, "has 108 bytes: give an absolute path of at most 107"),
    ({"socket": "/a\x00b"}, "admin.socket='/a\\x00b' has a control character"),
    ({"socket": "/s", "token_env": ""}, "admin.token_env names no environment variable: give one such as"),
    ({"socket": "/s", "token_env": 7}, "admin.token_env is not text: give it in quotes"),
    ({"socket": "/s", "token_env": "A", "token_file": "/t"}, "admin.token_env and admin.token_file: give one of them"),
    ({"socket": "/s", "token": "a-token-in-the-settings"}, "unknown setting 'admin.token' (did you mean 'token_"),
]


@pytest.mark.parametrize(("admin", "message"), WRONG)
def test_wrong_settings_are_refused_with_value_limit_and_fix(admin: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(admin=admin)
    assert message in str(caught.value)
    assert "a-token-in-the-settings" not in str(caught.value)


@pytest.mark.parametrize("bind", ["127.0.0.1:7200", "127.8.8.8:7200", "localhost:7200", "[::1]:7200"])
def test_loopback_addresses_are_taken(bind: str) -> None:
    config = Config.from_mapping({"admin": {"bind": bind}})
    assert config.admin is not None and config.admin.address(2)[1] == 7202


def test_the_last_port_is_one_engines_alone() -> None:
    with pytest.raises(ConfigError, match="data-parallel engine 1 would listen at port 65536; give a port from 1 to"):
        AdminConfig(bind="127.0.0.1:65535").address(1)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "the secret in OUR_TOKEN has 0 characters: set it to at least 16"),
        ("short", "the secret in OUR_TOKEN has 5 characters"),
        ("a token of several words", "is no word of at most 4096 printable ASCII characters: make one with openssl"),
        ("caf\xe9-au-lait-and-more", "is no word of at most 4096 printable ASCII characters"),
        ("x" * 5000, "is no word of at most 4096 printable ASCII characters"),
    ],
)
def test_a_bad_token_is_not_shown(token: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_TOKEN", token)
    with pytest.raises(ConfigError) as caught:
        AdminConfig(socket="/s", token_env="OUR_TOKEN").token()
    assert message in str(caught.value)
    assert not token or token not in str(caught.value)


def test_a_token_in_the_environment_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_TOKEN", "sixteen-or-more-characters\n")
    config = AdminConfig(socket="/s", token_env="OUR_TOKEN")
    assert config.token() == b"sixteen-or-more-characters"
    assert "sixteen" not in repr(config) + repr(asdict(config))


def test_a_token_file_may_be_in_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("sixteen-or-more-characters\n")
    (tmp_path / "token").chmod(0o600)
    assert AdminConfig(socket="/s", token_file="~/token").token() == b"sixteen-or-more-characters"
    with pytest.raises(ConfigError, match=r"admin.token_file='~nobody-of-this-name/t' begins with the home of nobody"):
        AdminConfig(socket="/s", token_file="~nobody-of-this-name/t").token()


def test_a_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    config = AdminConfig(socket="/s", token_file=str(file))
    with pytest.raises(ConfigError, match=r"admin.token_file='.*token' cannot be read: No such file or directory"):
        config.token()
    file.write_text("sixteen-or-more-characters\n")
    for mode in (0o644, 0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"has mode {mode:04o}, others may read it: chmod 0600 it") as caught:
            config.token()
        assert "sixteen" not in str(caught.value)
    file.chmod(0o600)
    assert config.token() == b"sixteen-or-more-characters"
    file.write_text("short")
    with pytest.raises(ConfigError, match=r"the token in admin.token_file='.*' has 5 characters: write at least 16"):
        config.token()


def test_a_token_that_nobody_writes_into_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nor is one lost that somebody does, as a shell does for `--token-file <(...)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    config = AdminConfig(socket="/s", token_file=str(pipe))
    with pytest.raises(ConfigError, match=r"the token in admin.token_file='.*' has 0 characters: write at least 16"):
        config.token()
    read_end, write_end = os.pipe()
    with ThreadPoolExecutor(1) as pool:
        token = pool.submit(AdminConfig(socket="/s", token_file=f"/dev/fd/{read_end}").token)
        os.write(write_end, b"sixteen-or-more-characters")
        os.close(write_end)
        assert token.result() == b"sixteen-or-more-characters"
    os.close(read_end)
