"""A user writes settings, by hand or as JSON in an engine's configuration, and is told what is wrong and the fix."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_connector import Config, KVConnectorError
from kv_connector.build import build_scheduler, build_worker
from kv_connector.config import PathName, PeerConfig, StorageConfig, WritePolicy
from kv_connector.errors import ConfigError
from kv_connector.index import CacheIdentity
from kv_connector.values import parse_size

MOONCAKE = {"kind": "mooncake", "master": "10.0.0.1:50051"}
S3 = {"bucket": "my-kv"}
FOLDER = {"path": "/data/kv", "capacity": "1GiB"}
SECRET = {"secret": "sixteen or more characters"}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("4096", 4096),
        ("512b", 512),
        ("1k", 1 << 10),
        ("1KB", 1000),
        ("1KiB", 1 << 10),
        ("512MB", 512 * 10**6),
        ("512 mib", 512 << 20),
        (" 16GiB ", 16 << 30),
        ("16g", 16 << 30),
        ("16Gi", 16 << 30),
        ("1.5GiB", 3 << 29),
        ("0.1kB", 100),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: exact, not by way of a float
    ],
)
def test_a_size_is_bytes_or_text(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "16 gigs", "16XB", "1,5GiB", "-1GiB", "1e9", "1.5", "1.5B", "0x10", "inf", 1.5, True, None, [16]],
)
def test_what_is_not_a_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(host_memory=text)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"host_memory={text!r} is not a size: ")
    assert '"16GiB"' in str(caught.value)


def test_the_largest_number_is_still_a_number() -> None:
    assert parse_size("9" * 400) == int("9" * 400)


@pytest.mark.parametrize("text", ["\uff11\uff16GiB", "16\N{KELVIN SIGN}iB", "\u0661GiB", "\u200916GiB"])
def test_a_size_has_plain_digits_and_letters(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size: give bytes"):
        parse_size(text)


NESTED: Any = []
for _ in range(5000):
    NESTED = [NESTED]
LONG = "x" * 5000


@pytest.mark.parametrize(
    "settings",
    [
        {"host_memory": NESTED},
        {"write_policy": NESTED},
        {"storage": NESTED},
        {"storage": FOLDER | {"path": NESTED}},
        {"peer": SECRET | {"kind": NESTED}},
        {10**5000: 1},
        {LONG: 1},
        {"calibration": NESTED},
        {"storage": {LONG: 1}},
        {"storage": FOLDER | {"path": f"{LONG}\n"}},
        {"storage": FOLDER | {"master": LONG}},
        {"storage": MOONCAKE | {"master": LONG}},
        {"peer": {"secret_env": LONG}},
        {"storage": FOLDER | {"secret_env": LONG}},
        {"peer": SECRET | {"host": f"[{LONG}"}},
    ],
)
def test_values_that_nobody_can_read_are_refused_in_a_message_that_can_be(settings: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"host_memory": 1 << 20} | settings)
    assert len(str(caught.value)) < 900


INTEGERS = ["host_memory", "write_through_threshold", "write_back_lookahead", "save_bandwidth", "max_load_stall_ms"]


@pytest.mark.parametrize("name", [*INTEGERS, "layer_group_bytes"])
def test_every_integer_has_a_largest_value(name: str) -> None:
    """Of more than 308 digits one cannot even be divided: it would fail where it is used, not where it is given."""
    assert getattr(Config.from_mapping({name: 1 << 62}), name) == 1 << 62
    with pytest.raises(ConfigError, match=f"{name}=1000.* is too large: give at most {1 << 62}"):
        Config.from_mapping({name: 10**309})


@pytest.mark.parametrize("text", ["1" * 5000, "1" * 1001 + "GiB", "0." + "1" * 5000 + "GiB"])
def test_a_size_of_thousands_of_digits_is_refused_in_a_message_that_can_be_read(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(host_memory=text)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"host_memory='{text[:100]}")
    assert "... is not a size: give bytes" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "node-7.example", "1"])
def test_peers_may_be_told_any_address_or_name(host: str) -> None:
    assert PeerConfig(host=host, **SECRET).host == host


@pytest.mark.parametrize("key", ["host", "bind"])
@pytest.mark.parametrize("address", ["::1", "fd00::1", "fe80::1%eth0"])
def test_an_address_in_brackets_is_the_address(key: str, address: str) -> None:
    """As in an URL: what is told to others, and listened at, is what a socket takes."""
    config = PeerConfig(**{key: f"[{address}]"}, **SECRET)  # type: ignore[arg-type]
    assert (getattr(config, key), config.host) == (address, address)


def test_storage_needs_host_memory_to_come_and_go_through() -> None:
    with pytest.raises(ConfigError, match=r"host_memory is missing or 0: storage needs .* give a size such as .16GiB"):
        Config(storage=FOLDER)  # type: ignore[arg-type]


def test_a_secret_is_long_enough_without_the_blanks_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that ends in a new line leaves it in the environment. All sides must have the same one, as it is."""
    monkeypatch.setenv("OUR_SECRET", "fifteen letters\n")
    with pytest.raises(ConfigError, match=r"has 15 characters: .* or set OUR_SECRET to them, .* blanks at its ends do"):
        PeerConfig(secret_env="OUR_SECRET")


IDENTITY = CacheIdentity("m", "bf16", "NHD", 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size=0 cannot be: give an integer of at least 1"),
        ({"block_size": 16.0}, "block_size=16.0 cannot be: give an integer of at least 1"),
        ({"block_size": 16, "world_size": 0}, "world_size=0 cannot be: give an integer of at least 1"),
    ],
)
def test_a_scheduler_half_that_cannot_be_is_not_built(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(KVConnectorError) as caught:
        build_scheduler(Config(host_memory=1 << 20), identity=IDENTITY, **arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 0, "world_size=0 cannot be: give an integer of at least 1"),
        (2, 2, "rank=2 cannot be: give an integer from 0 to 1"),
        (-1, 2, "rank=-1 cannot be: give an integer from 0 to 1"),
        (0, True, "world_size=True cannot be: give an integer of at least 1"),
    ],
)
def test_a_rank_that_is_none_of_the_engines_is_not_built(rank: int, world_size: int, message: str) -> None:
    with pytest.raises(KVConnectorError) as caught:
        build_worker(Config(host_memory=1 << 20), rank, world_size, identity=IDENTITY)
    assert str(caught.value) == message


def test_a_folder_may_be_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    layer = [torch.zeros(4, 4096, dtype=torch.uint8)]
    worker = build_worker(Config(host_memory=1 << 20, storage=FOLDER | {"path": "~/kv"}))  # type: ignore[arg-type]
    worker.register_kv_caches({"layer": layer}, 4)
    worker.shutdown()
    assert (tmp_path / "home" / "kv" / "index").exists()
    assert not Path("~").exists()


def test_a_folder_of_nobody_is_refused() -> None:
    worker = build_worker(
        Config(host_memory=1 << 20, storage=FOLDER | {"path": "~nobody-of-this-name/kv"})  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match=r"storage\.path='~nobody-of-this-name/kv' begins with the home of"):
        worker.register_kv_caches({"layer": [torch.zeros(4, 4096, dtype=torch.uint8)]}, 4)
    worker.shutdown()


def test_a_trace_of_nobody_is_refused() -> None:
    config = Config(host_memory=1 << 20, record_trace="~nobody-of-this-name/trace")
    with pytest.raises(ConfigError, match="record_trace='~nobody-of-this-name/trace' begins with the home of nobody"):
        build_scheduler(config, 16)


@pytest.mark.parametrize("key", ["storage", "peer", "admin", "tenants"])
def test_an_object_that_is_null_is_as_if_left_out(key: str) -> None:
    """The page of the settings says that the default is none."""
    assert Config.from_mapping({key: None}) == Config()


def test_the_defaults_are_valid_and_keep_the_host_tier_off() -> None:
    config = Config()
    assert config.host_memory == 0
    assert config.write_policy is WritePolicy.ADAPTIVE
    assert config.write_through_threshold == 2
    assert Config.from_mapping({}) == config


def test_settings_from_json_become_typed_values() -> None:
    config = Config.from_mapping(
        {"host_memory": "16GiB", "write_policy": "write_back", "copy_path": "staged", "staging_memory": "64MiB"}
        | {"save_bandwidth": "1.5GB"}
    )
    assert config.save_bandwidth == 1_500_000_000
    assert config.host_memory == 16 << 30
    assert config.write_policy is WritePolicy.WRITE_BACK
    assert config.copy_path is PathName.STAGED
    assert config.staging_memory == 64 << 20


def test_a_config_is_frozen_hashable_and_picklable() -> None:
    config = Config(host_memory="1GiB")  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, Config(host_memory=1 << 30)}) == 1
    with pytest.raises(FrozenInstanceError):
        config.host_memory = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("host_mem", "host_memory"),
        ("hostmemory", "host_memory"),
        ("write-policy", "write_policy"),
        ("write_trough_threshold", "write_through_threshold"),
        ("pinned_memory", "pin_memory"),
        ("HOST_MEMORY", "host_memory"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"host_memory": 0, key: 1})
    assert f"unknown setting {key!r} (did you mean {suggestion!r}?)" in str(caught.value)


def test_an_unknown_setting_unlike_any_other_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'zzz': known settings are host_memory, write_policy, "):
        Config.from_mapping({"zzz": 1})


@pytest.mark.parametrize("settings", ['{"host_memory": 0}', [], None, 16])
def test_settings_that_are_not_an_object_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(settings)
    assert str(caught.value) == f'settings={settings!r} is not an object: give one such as {{"host_memory": "16GiB"}}'


WRONG = [
    ({"write_policy": "write_trough"}, "'write_trough' is unknown: give one of 'adaptive', 'write_through', 'write_"),
    ({"write_policy": None}, "write_policy=None is unknown: give one of 'adaptive'"),
    ({"write_policy": []}, "write_policy=[] is unknown: give one of 'adaptive'"),
    ({"copy_path": "dma"}, "copy_path='dma' is unknown: give one of 'auto', 'runs', 'direct', 'staged'"),
    ({"pin_memory": "yes"}, "pin_memory='yes' is not a boolean: give true or false"),
    ({"numa_bind": 1}, "numa_bind=1 is not a boolean: give true or false"),
    ({"host_form": "zip"}, "host_form='zip' is unknown"),
    ({"trace_loads": None}, "trace_loads=None is not a boolean: give true or false"),
    ({"trace_requests": 1.5}, "trace_requests=1.5 is not a share of the requests: give a number from 0 (none) to 1"),
    ({"trace_requests": True}, "trace_requests=True is not a share of the requests: give a number from 0 (none) to 1"),
    ({"write_through_threshold": "2"}, "write_through_threshold='2' is not an integer: give at least 1"),
    ({"write_through_threshold": 2.0}, "write_through_threshold=2.0 is not an integer: give at least 1"),
    ({"write_through_threshold": True}, "write_through_threshold=True is not an integer: give at least 1"),
    ({"write_through_threshold": 0}, "write_through_threshold=0 is too small: give at least 1"),
    ({"write_back_lookahead": 0}, "write_back_lookahead=0 is too small: give at least 1"),
    ({"host_memory": -1}, "host_memory=-1 is too small: give at least 0"),
    ({"layer_group_bytes": -1}, "layer_group_bytes=-1 is too small: give at least 0"),
    ({"calibration": ""}, "calibration='': give 'auto', 'off' or the path of a file"),
    ({"calibration": "a\0b"}, "calibration='a\\x00b' has a control character, or half of one: leave it out"),
    ({"calibration": True}, "calibration=True: give 'auto', 'off' or the path of a file"),
    ({"save_bandwidth": -1}, "save_bandwidth=-1 is too small: give at least 0"),
    ({"save_bandwidth": "8GB/s"}, "save_bandwidth='8GB/s' is not a size"),
    ({"staging_memory": 0}, "staging_memory=0 is too small: give at least 1048576"),
    ({"staging_memory": "2TiB"}, "staging_memory=2199023255552 is too large: give at most 1099511627776"),
    ({"host_memory": -(10**5000)}, "host_memory=a number of thousands of digits is too small: give at least 0"),
]


WRONG_STORAGE = [
    (
        {"kind": "redis"},
        "storage.kind='redis' is unknown: give one of 'filesystem', 'mooncake', 's3', 'module:function'",
    ),
    ({"kind": "my store:open"}, "storage.kind='my store:open' is unknown"),
    ({"kind": "my_store:open", "path": "/data"}, "storage.path='/data' is for kind 'filesystem' only"),
    ({"kind": "my_store:open", "options": [1]}, "storage.options=[1] is not an object"),
    ({"path": "/data", "capacity": "1GiB", "options": {"a": 1}}, "storage.options={'a': 1} is for kind 'module:funct"),
    ({"kind": []}, "storage.kind=[] is unknown: give one of 'filesystem', 'mooncake'"),
    ({"kind": {}}, "storage.kind={} is unknown: give one of 'filesystem', 'mooncake'"),
    ({"capacity": 1}, "storage.path='': give the folder to keep blocks in"),
    (FOLDER | {"path": "  "}, "storage.path='  ': give the folder to keep blocks in"),
    ({"path": 1, "capacity": 1}, "storage.path=1 is not text: give it in quotes"),
    ({"path": "/data/kv"}, "storage.capacity=0: give how much may lie in the folder, such as '500GiB'"),
    (FOLDER | {"capacity": "1MiB"}, "storage.capacity=1048576 is too small: give at least 8388608"),
    (FOLDER | {"capacity": 10**309}, f"... is too large: give at most {1 << 62}"),
    (MOONCAKE | {"segment_memory": 10**309}, f"... is too large: give at most {1 << 62}"),
    (MOONCAKE | {"segment_memory": -1}, "storage.segment_memory=-1 is too small: give at least 0"),
    (MOONCAKE | {"master": "h:\uff11"}, "storage.master='h:\uff11': give its host and port"),
    (FOLDER | {"timeout_ms": -1}, "storage.timeout_ms=-1 is too small: give at least 0"),
    (FOLDER | {"timeout_ms": "5"}, "storage.timeout_ms='5' is not an integer: give at least 0"),
    (FOLDER | {"timeout_ms": 1 << 32}, "storage.timeout_ms=4294967296 is too large: give at most 2147483648"),
    (FOLDER | {"max_backup_blocks": True}, "storage.max_backup_blocks=True is not an integer: give at least 1"),
    (FOLDER | {"max_backup_blocks": 0}, "storage.max_backup_blocks=0 is too small: give at least 1"),
    (FOLDER | {"secret_env": 5}, "storage.secret_env is not text: give it in quotes"),
    (
        FOLDER | {"secret_env": "a=b"},
        "storage.secret_env names no environment variable: give one such as 'KV_CONNECTOR",
    ),
    (FOLDER | {"secret_env": "a\n"}, "storage.secret_env names no environment variable"),
    (
        FOLDER | {"secret_env": "NOT_SET"},
        "the environment variable that storage.secret_env names is not set in this process: set it to at least 16 char",
    ),
    (
        FOLDER | {"secret_env": "sixteen letters of a secret"},
        "the environment variable that storage.secret_env names is not set in this process",
    ),
    (
        FOLDER | {"secret_env": "KV_CONNECTOR_STORAGE_SECRET"},
        "KV_CONNECTOR_STORAGE_SECRET is not set in this process: set it to at least 16 characters, the same for all "
        "engines that share the storage",
    ),
    (FOLDER | {"protocol": "rdma"}, "storage.protocol='rdma' is for kind 'mooncake' only: leave it out"),
    (FOLDER | {"master": "a:1"}, "storage.master='a:1' is for kind 'mooncake' only: leave it out"),
    (MOONCAKE | {"path": "/data/kv"}, "storage.path='/data/kv' is for kind 'filesystem' only: leave it out"),
    (MOONCAKE | {"capacity": "1GiB"}, "storage.capacity=1073741824 is for kind 'filesystem' only: leave it out"),
    ({"kind": "mooncake", "master": "h:99999"}, "storage.master='h:99999': give its host and port"),
    ({"kind": "mooncake"}, "storage.master='': give its host and port, such as \"10.0.0.1:50051\""),
    (MOONCAKE | {"master": "10.0.0.1"}, "storage.master='10.0.0.1': give its host and port"),
    (MOONCAKE | {"master": 50051}, "storage.master=50051 is not text: give it in quotes"),
    (MOONCAKE | {"protocol": "ib"}, "storage.protocol='ib' is unknown: give one of 'tcp', 'rdma'"),
    (MOONCAKE | {"segment_memory": 4096}, "storage.segment_memory=4096 is too small: give 0 or at least 16777216"),
    (MOONCAKE | {"segment_memory": "lots"}, "storage.segment_memory='lots' is not a size"),
    ({"path": "/data\n", "capacity": 1}, "storage.path='/data\\n' has a control character"),
    ({"path": "/data", "capacity": 1, "devices": 10**5000}, "storage.devices=a number of thousands of digits"),
    (FOLDER | {"s3": {"bucket": "b"}}, "storage.s3={'bucket': 'b'} is for kind 's3' only: leave it out"),
    ({"kind": "s3"}, 'storage.s3=None is not an object: give one such as {"bucket": "my-kv"}'),
    ({"kind": "s3", "s3": ["b"]}, "storage.s3=['b'] is not an object"),
    ({"kind": "s3", "s3": {}}, "storage.s3.bucket='' is no bucket's name: give one such as 'my-kv'"),
    ({"kind": "s3", "s3": {"bucket": "a/b"}}, "storage.s3.bucket='a/b' is no bucket's name"),
    ({"kind": "s3", "s3": {"bucket": "s3://b"}}, "storage.s3.bucket='s3://b' is no bucket's name"),
    ({"kind": "s3", "s3": {"bucket": 7}}, "storage.s3.bucket=7 is not text: give it in quotes"),
    ({"kind": "s3", "path": "/data", "s3": S3}, "storage.path='/data' is for kind 'filesystem' only: leave it out"),
    ({"kind": "s3", "s3": S3 | {"buckte": "b"}}, "unknown setting 'storage.s3.buckte' (did you mean 'bucket'?)"),
    ({"kind": "s3", "s3": S3 | {"secret_access_key": "x"}}, "unknown setting 'storage.s3.secret_access_key'"),
    ({"kind": "s3", "s3": S3 | {"prefix": "/kv"}}, "storage.s3.prefix='/kv' cannot be: give parts of letters"),
    ({"kind": "s3", "s3": S3 | {"prefix": "kv/../other"}}, "storage.s3.prefix='kv/../other' cannot be"),
    ({"kind": "s3", "s3": S3 | {"prefix": "k" * 513}}, "of at most 512 characters"),
    ({"kind": "s3", "s3": S3 | {"region": "eu west"}}, "storage.s3.region='eu west' is no region"),
    ({"kind": "s3", "s3": S3 | {"endpoint": "minio:9000"}}, "storage.s3.endpoint is no URL of a server: give one such"),
    ({"kind": "s3", "s3": S3 | {"endpoint": "https://m:99999"}}, "storage.s3.endpoint is no URL of a server"),
    ({"kind": "s3", "s3": S3 | {"endpoint": "http://m:9000"}}, "storage.s3.endpoint='http://m:9000' is not encrypted"),
    ({"kind": "s3", "s3": S3 | {"allow_http": "yes"}}, "storage.s3.allow_http='yes' is not a boolean"),
    ({"kind": "s3", "s3": S3 | {"timeout_ms": 5}}, "storage.s3.timeout_ms=5 is too small: give at least 100"),
    (
        {"kind": "s3", "s3": S3 | {"timeout_ms": 500}},
        "storage.s3.connect_timeout_ms=1000 is longer than a whole request may take: give at most "
        "storage.s3.timeout_ms=500, or raise that",
    ),
    ({"kind": "s3", "s3": S3 | {"max_retries": -1}}, "storage.s3.max_retries=-1 is too small: give at least 0"),
    ({"kind": "s3", "s3": S3 | {"concurrency": 0}}, "storage.s3.concurrency=0 is too small: give at least 1"),
    (MOONCAKE | {"path": 10**5000}, "storage.path=a number of thousands of digits is not text"),
    (MOONCAKE | {"capacity": 10**5000}, "storage.capacity=a number of thousands of digits is for kind 'filesystem'"),
    (MOONCAKE | {"metadata": None}, "storage.metadata=None is not text"),
    (MOONCAKE | {"metadata": ""}, "storage.metadata='': give the URL of a metadata server, or 'P2PHANDSHAKE'"),
    (MOONCAKE | {"mastre": "a:1"}, "unknown setting 'storage.mastre' (did you mean 'master'?)"),
]


@pytest.mark.parametrize(("storage", "message"), WRONG_STORAGE)
def test_wrong_storage_is_refused_with_value_limit_and_fix(storage: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(host_memory=1 << 30, storage=storage)  # type: ignore[arg-type]
    assert message in str(caught.value)


WRONG_PEER = [
    ({}, "peer.secret has 0 characters: give at least 16, or set KV_CONNECTOR_PEER_SECRET to them"),
    ({"secret": "short"}, "peer.secret has 5 characters: give at least 16"),
    ({"secret_env": "NOBODY_SET_THIS"}, "or set the variable that peer.secret_env names, which is not there, to them"),
    ({"kind": "rdma"}, "peer.kind='rdma' is unknown: give one of 'shared_memory', 'nixl'"),
    ({"role": "prefill"}, "peer.role='prefill' is unknown: give one of 'producer', 'consumer', 'both'"),
    (SECRET | {"route": "host"}, "peer.route='host' is unknown: give one of 'auto', 'direct', 'staged'"),
    (SECRET | {"port": 70000}, "peer.port=70000: give an integer from 0 to 65535"),
    (SECRET | {"timeout_ms": 0}, "peer.timeout_ms=0: give an integer from 1 to"),
    (SECRET | {"deadline_ms": "long"}, "peer.deadline_ms='long': give an integer from 1 to"),
    (SECRET | {"bind": ""}, "peer.bind='' is no address that others can reach: give peer.host this machine's"),
    (SECRET | {"bind": "0.0.0.0"}, "peer.bind='0.0.0.0' is no address that others can reach"),
    (SECRET | {"bind": None}, "peer.bind=None is not text: give it in quotes"),
    (SECRET | {"host": 7}, "peer.host=7 is not text: give it in quotes"),
    (SECRET | {"host": "[::]"}, "peer.host='::' is no address that others can reach"),
    (SECRET | {"host": "0"}, "peer.host='0' is no address that others can reach"),
    (SECRET | {"host": " "}, "peer.host=' ' is no host: give a name or an address, without scheme, port, blanks"),
    (SECRET | {"host": "10.0.0.1 "}, "peer.host='10.0.0.1 ' is no host"),
    (SECRET | {"host": "[::1"}, "peer.host='[::1' is no host"),
    (SECRET | {"bind": "::1]"}, "peer.bind='::1]' is no host"),
    (SECRET | {"bind": "[]"}, "peer.bind='[]' is no host"),
    (SECRET | {"host": "[[::1]]"}, "peer.host='[[::1]]' is no host"),
    (SECRET | {"bind": "0:0:0:0:0:0:0:0"}, "peer.bind='0:0:0:0:0:0:0:0' is no address that others can reach"),
    ({"secret": 5}, "peer.secret is not text: give it in quotes"),
    ({"secret": " " * 16}, "peer.secret has 0 characters: give at least 16"),
    ({"secret_env": ""}, "peer.secret_env names no environment variable: give one such as 'KV_CONNECTOR_PEER_SECRET'"),
    ({"secret_env": "a=b"}, "peer.secret_env names no environment variable"),
    ({"secret_env": "\ud800"}, "peer.secret_env names no environment variable"),
    (SECRET | {"bind": "a\0b"}, "peer.bind='a\\x00b' has a control character, or half of one: leave it out"),
    ({"secret": "\udcff" * 16}, "peer.secret, or KV_CONNECTOR_PEER_SECRET, is not UTF-8"),
    ({"secret_env": 5}, "peer.secret_env is not text: give it in quotes"),
    ({"secret_env": "sixteen and more letters"}, "or set the variable that peer.secret_env names, which is not there"),
    ({"secret_env": "sixteen=letters"}, "peer.secret_env names no environment variable"),
    ({"secret_env": "sixteen letters\n"}, "peer.secret_env names no environment variable"),
    ({"secret": "\udcff" * 16, "secret_env": "sixteen"}, "peer.secret, or the variable that peer.secret_env names"),
    (
        SECRET | {"bind": "10.0.0.1:7100"},
        "peer.bind='10.0.0.1:7100' is no host: give a name or an address, without sch",
    ),
    (SECRET | {"bind": "[::1]:7100"}, "peer.bind='[::1]:7100' is no host"),
    (SECRET | {"host": "node-7:7100"}, "peer.host='node-7:7100' is no host"),
    (SECRET | {"host": "tcp://node-7"}, "peer.host='tcp://node-7' is no host"),
    (SECRET | {"host": "node-7/x"}, "peer.host='node-7/x' is no host"),
    (SECRET | {"host": "fd00::1/64"}, "peer.host='fd00::1/64' is no host"),
    (SECRET | {"port": 10**5000}, "peer.port=a number of thousands of digits: give an integer from 0 to 65535"),
    (SECRET | {"staging_memory": "1KiB"}, "peer.staging_memory=1024: give an integer from 65536"),
    (SECRET | {"ports": 1}, "unknown setting 'peer.ports' (did you mean 'port'?)"),
]


@pytest.mark.parametrize(("peer", "message"), WRONG_PEER)
def test_wrong_peers_are_refused_with_value_limit_and_fix(
    peer: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KV_CONNECTOR_PEER_SECRET", raising=False)
    with pytest.raises(ConfigError) as caught:
        Config(peer=peer)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "sixteen" not in str(caught.value)


def test_the_secret_may_come_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_SECRET", "from the environment")
    config = Config(peer={"secret_env": "OUR_SECRET", "bind": "::", "host": "fd00::1"})  # type: ignore[arg-type]
    assert config.peer is not None
    assert (config.peer.secret, config.peer.host) == ("from the environment", "fd00::1")
    assert "from the environment" not in repr(config)


def test_the_secret_of_a_storage_is_read_from_the_environment_and_kept_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUR_SECRET", "fourteen chars\n")
    with pytest.raises(
        ConfigError, match="the secret in OUR_SECRET has 14 characters: set it to at least 16"
    ) as caught:
        StorageConfig(**FOLDER | {"secret_env": "OUR_SECRET"})  # type: ignore[arg-type]
    assert "fourteen" not in str(caught.value)
    monkeypatch.setenv("OUR_SECRET", "\udcff" * 16)
    with pytest.raises(ConfigError, match="the secret in OUR_SECRET is not UTF-8"):
        StorageConfig(**FOLDER | {"secret_env": "OUR_SECRET"})  # type: ignore[arg-type]
    monkeypatch.setenv("OUR_SECRET", "from the environment")
    config = StorageConfig(**FOLDER | {"secret_env": "OUR_SECRET"})  # type: ignore[arg-type]
    assert config.secret() == b"from the environment"
    assert "environment" not in repr(config) + repr(asdict(config))
    assert StorageConfig(**FOLDER).secret() == b""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "endpoint", ["", "https://s3.eu-central-1.amazonaws.com", "https://[fd00::1]:9000/", "https://store.example/v1/s3"]
)
@pytest.mark.parametrize("prefix", ["", "kv", "kv/team-a/model=7"])
def test_a_bucket_is_named_with_as_little_as_possible(endpoint: str, prefix: str) -> None:
    storage = StorageConfig(kind="s3", s3=S3 | {"endpoint": endpoint, "prefix": prefix})  # type: ignore[arg-type]
    assert storage.s3 is not None
    assert (storage.s3.bucket, storage.s3.endpoint, storage.s3.prefix) == ("my-kv", endpoint, prefix)
    assert storage.s3.concurrency == 32


@pytest.mark.parametrize("url", ["https://user:hunter2@store.example", "https://store.example?key=hunter2"])
def test_a_password_in_an_endpoint_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials belong into the environment") as caught:
        StorageConfig(kind="s3", s3=S3 | {"endpoint": url})  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("master", ["10.0.0.1:50051", "store.example:1", "[fd00::1]:50051"])
def test_mooncake_needs_the_address_of_its_master(master: str) -> None:
    settings = {"host_memory": "1GiB", "storage": MOONCAKE | {"master": master, "segment_memory": "4GiB"}}
    storage = Config.from_mapping(settings).storage
    assert storage is not None
    assert (storage.master, storage.segment_memory, storage.protocol.value) == (master, 4 << 30, "tcp")


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_wrong_value_is_refused_with_value_limit_and_fix(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(settings)
    assert message in str(caught.value)
    assert next(iter(settings)) in str(caught.value)


def test_a_config_error_is_a_value_error_and_ours() -> None:
    with pytest.raises(ValueError, match="threshold"):
        Config(write_through_threshold=0)
    assert issubclass(ConfigError, KVConnectorError)
