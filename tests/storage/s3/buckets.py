"""Storage in S3 for tests: a real server, shared by the tests of a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from integration.s3_server import S3Server, running_s3, s3_settings, why_not
from integration.servers import SHARED
from kv_connector.config import S3Config, StorageConfig
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.storage.s3 import backend
from tests.storage.objects.stores import connected, identity_of


def s3_config(endpoint: str, **more: Any) -> S3Config:
    """How a bucket is reached."""
    config = StorageConfig(**s3_settings(endpoint, **more)).s3
    assert config is not None
    return config


def open_s3(endpoint: str, identity: bytes, block_bytes: int = 16384, **more: Any) -> ObjectStorage:
    """Storage that may not have reached its bucket yet; each block is a group."""
    return backend.open_s3(s3_config(endpoint, **more), identity, block_bytes, group_bytes=block_bytes)


def make_s3(folder: Path, block_bytes: int = 16384) -> ObjectStorage:
    """On the server of this run of tests; `folder` names what it shares with others. Skips without
    it."""
    if reason := why_not():
        pytest.skip(reason)
    return connected(open_s3(shared_server().endpoint, identity_of(folder), block_bytes))


@functools.cache
def shared_server() -> S3Server:
    """One until the tests end, and its credentials in the environment."""
    return SHARED.enter_context(running_s3())
