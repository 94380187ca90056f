"""Storage in a bucket: `ObjectStorage` as suits a store that answers after tens of milliseconds."""

from __future__ import annotations

from ...config import S3Config
from ..checksums import CRC32, BlockCheck
from ..objects.backend import ObjectStorage
from .client import S3Client

GROUP_BYTES = 4 << 20
"""Of a group of blocks: S3 takes tens of milliseconds, and money, for each request, however few bytes it moves."""


def open_s3(
    config: S3Config,
    identity: bytes,
    block_bytes: int,
    group_bytes: int = GROUP_BYTES,
    check: BlockCheck = CRC32,
) -> ObjectStorage:
    """Storage in this bucket, which it reaches in the background. `identity`, `group_bytes` and `check` as for
    `ObjectStorage`.

    A group is a batch by itself: the checksums of one are computed while others are under way. Raises ConfigError as
    `S3Client` does, and ValueError for a size that cannot be.
    """
    return ObjectStorage(
        "s3",
        S3Client(config),
        identity,
        block_bytes,
        group_bytes=group_bytes,
        batch_bytes=group_bytes,
        num_parallel=config.concurrency,
        check=check,
    )
