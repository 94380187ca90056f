"""Settings of storage in S3."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError
from ..values import check_integer, check_text, shown

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]", re.ASCII)
_PREFIX = re.compile(r"(?:[A-Za-z0-9!_.*'()=-]+(?:/[A-Za-z0-9!_.*'()=-]+)*)?", re.ASCII)
_ENDPOINT = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(?:/[\w.~/-]*)?", re.ASCII)
_LONGEST_PREFIX = 512
"""Of the 1,024 bytes that S3 allows for an object's name."""


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket of Amazon S3, or of a server that speaks its protocol. Credentials are no settings: they are found where
    AWS's own tools find them, see docs/storage_s3.md.

    bucket: required: its name; it must exist.
    prefix: what the names of all objects begin with, without a `/` at its ends; another prefix is another storage.
    region: the bucket's region; if empty, where AWS's own tools find it, else `us-east-1`.
    endpoint: URL of the server, such as `"https://minio.local:9000"`; if empty, Amazon's for the region.
    allow_http: whether `endpoint` may be plain http: everybody on the way can read and change what it carries.
    timeout_ms: for one request with its data; a request that took longer is not retried.
    connect_timeout_ms: to establish a connection; at most `timeout_ms`.
    max_retries: retries of a request that was answered with 5xx (503 is "slow down"), or whose connection broke.
    concurrency: lookups, reads and writes in flight at a time, this many of each, on each rank.
    """

    bucket: str = ""
    prefix: str = "kv"
    region: str = ""
    endpoint: str = ""
    allow_http: bool = False
    timeout_ms: int = 5_000
    connect_timeout_ms: int = 1_000
    max_retries: int = 3
    concurrency: int = 32

    def __post_init__(self) -> None:
        for name in ("bucket", "prefix", "region", "endpoint"):
            check_text(f"storage.s3.{name}", getattr(self, name))
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(f"storage.s3.bucket={shown(self.bucket)} is no bucket's name: give one such as 'my-kv'")
        if len(self.prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(self.prefix) or self._has_dots:
            raise ConfigError(
                f"storage.s3.prefix={shown(self.prefix)} cannot be: give parts of letters, digits and !_.*'()=- with a "
                f"'/' between, such as 'kv/team-a', of at most {_LONGEST_PREFIX} characters"
            )
        if any(character.isspace() for character in self.region):
            raise ConfigError(f"storage.s3.region={shown(self.region)} is no region: give one such as 'eu-central-1'")
        if not isinstance(self.allow_http, bool):
            raise ConfigError(f"storage.s3.allow_http={shown(self.allow_http)} is not a boolean: give true or false")
        self._check_endpoint()
        for name, least, most in (
            ("timeout_ms", 100, 600_000),
            ("connect_timeout_ms", 100, 600_000),
            ("max_retries", 0, 100),
            ("concurrency", 1, 1024),
        ):
            check_integer(f"storage.s3.{name}", getattr(self, name), least, most)
        if self.connect_timeout_ms > self.timeout_ms:
            raise ConfigError(
                f"storage.s3.connect_timeout_ms={self.connect_timeout_ms} is longer than a whole request may take: "
                f"give at most storage.s3.timeout_ms={self.timeout_ms}, or raise that"
            )

    @property
    def _has_dots(self) -> bool:
        return any(part in (".", "..") for part in self.prefix.split("/"))

    def _check_endpoint(self) -> None:
        match = _ENDPOINT.fullmatch(self.endpoint)
        if self.endpoint and (match is None or not 0 < int(match[1] or 1) < 1 << 16):
            raise ConfigError(  # what was given is not shown: it may hold a password
                "storage.s3.endpoint is no URL of a server: give one such as 'https://minio.local:9000'; credentials "
                "belong into the environment"
            )
        if self.endpoint.startswith("http://") and not self.allow_http:
            raise ConfigError(
                f"storage.s3.endpoint={shown(self.endpoint)} is not encrypted: give one of https, or "
                "storage.s3.allow_http=true where everybody on the way may read and change what it carries"
            )
