"""Storages of each kind, and who can write to them but knows no secret."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from integration.s3_server import why_not
from kv_connector.storage.base import Storage, address
from kv_connector.storage.checked import CheckedStorage, object_bytes
from kv_connector.storage.checksums import CRC_BYTES
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.layout import FolderLayout
from kv_connector.storage.filesystem.packs import PAGE, PackHeader
from kv_connector.storage.macs import KeyedMac, choose_check
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.storage.objects.client import Answer, Fragment, Transfer
from kv_connector.storage.s3.backend import open_s3
from kv_connector.storage.s3.client import S3Client
from kv_connector.testing.memory import MemoryStorage
from tests.storage.objects.stores import ImitatedStore, connected, identity_of
from tests.storage.s3.buckets import s3_config, shared_server
from tests.storage.storages import BLOCK, CAPACITY, SECONDS, buffers, key

KEYS = [key(f"forged {i}") for i in range(4)]
OTHER_BYTES = b"whatever a forger likes ".ljust(64, b".") * (BLOCK // 64)


class Place(ABC):
    """Where blocks lie. `open` is an engine's storage, whose secret is empty where it has none."""

    def __init__(self, folder: Path) -> None:
        self.identity = identity_of(folder)

    @abstractmethod
    def open(self, secret: bytes) -> Storage: ...

    @abstractmethod
    def content(self) -> dict[str, bytes]:
        """All that lies there, by name."""

    @abstractmethod
    def forge(self, forger: Forger) -> None:
        """Whatever has blocks becomes what the forger makes of it."""


Forger = Callable[[PackHeader, list[bytes]], tuple[PackHeader, list[bytes]]]
"""A pack with other blocks, or other checksums."""


def other_bytes_with_crcs(header: PackHeader, blocks: list[bytes]) -> tuple[PackHeader, list[bytes]]:
    """As an engine writes them that has no secret."""
    sums = tuple(crc32(OTHER_BYTES).to_bytes(CRC_BYTES, "little") for _ in blocks)
    return replace(header, checksums=sums), [OTHER_BYTES] * len(blocks)


def exchanged(header: PackHeader, blocks: list[bytes]) -> tuple[PackHeader, list[bytes]]:
    """Good blocks, each with its own checksum, in the places of others."""
    return replace(header, checksums=header.checksums[::-1]), blocks[::-1]


def other_bytes_with_a_guess(header: PackHeader, blocks: list[bytes]) -> tuple[PackHeader, list[bytes]]:
    """MACs of this very identity, by a secret that is not the engines'."""
    mac = KeyedMac(b"what a forger may guess", header.identity)
    sums = tuple(mac.of(key, memoryview(OTHER_BYTES)) for key in header.keys)
    return replace(header, checksums=sums), [OTHER_BYTES] * len(blocks)


def other_bytes_with_old_macs(header: PackHeader, blocks: list[bytes]) -> tuple[PackHeader, list[bytes]]:
    return header, [OTHER_BYTES] * len(blocks)


def forged_pack(text: bytes, forger: Forger) -> tuple[str, bytes]:
    """Its name and bytes; the header is whole."""
    header = PackHeader.decode(text, len(text))
    blocks = [text[header.offset(i) : header.offset(i + 1)] for i in range(len(header.keys))]
    header, blocks = forger(header, blocks)
    return header.name, header.encode() + b"".join(blocks)


class FolderPlace(Place):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.root = folder / "store"

    def open(self, secret: bytes) -> FilesystemStorage:
        check, identity = choose_check(secret, self.identity)
        storage = FilesystemStorage(self.root, identity, BLOCK, CAPACITY, check=check)
        storage.recovered.result(SECONDS)
        return storage

    def content(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in self.root.rglob("*.pack")}

    def forge(self, forger: Forger) -> None:
        layout = FolderLayout(self.root)
        for name, text in self.content().items():
            layout.path(name).unlink()
            name, text = forged_pack(text, forger)
            layout.path(name).write_bytes(text)
        layout.index.unlink()  # the next start reads what lies there


class ObjectPlace(Place):
    """Mooncake's client is imitated: it moves objects between memory and a dictionary."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.objects: dict[str, bytes] = {}

    def open(self, secret: bytes) -> ObjectStorage:
        check, identity = choose_check(secret, self.identity)
        client = ImitatedStore(self.objects)
        size = len(KEYS) * BLOCK
        return connected(ObjectStorage("mooncake", client, identity, BLOCK, group_bytes=size, check=check))

    def content(self) -> dict[str, bytes]:
        return dict(self.objects)

    def forge(self, forger: Forger) -> None:
        for name, text in self.objects.items():
            self.objects[name] = forged_pack(text, forger)[1]


class S3Place(Place):
    """A real server; of its objects those with the names of `KEYS`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if reason := why_not():
            pytest.skip(reason)
        self.config = s3_config(shared_server().endpoint)
        self.names: dict[str, None] = {}

    def open(self, secret: bytes) -> ObjectStorage:
        check, identity = choose_check(secret, self.identity)
        storage = connected(open_s3(self.config, identity, BLOCK, len(KEYS) * BLOCK, check))
        self.names |= dict.fromkeys(group.name for group in storage._groups.cut(KEYS))
        return storage

    def content(self) -> dict[str, bytes]:
        found = {}
        memory = buffers(1, PAGE + len(KEYS) * BLOCK)[0]
        client = S3Client(self.config)
        for name in self.names:
            if client.get([self._transfer(name, memory)]) == [Answer.OK]:
                found[name] = bytes(memory)
        client.close()
        return found

    def forge(self, forger: Forger) -> None:
        content = self.content()
        client = S3Client(self.config)
        for name, text in content.items():
            _, forged = forged_pack(text, forger)
            memory = buffers(1, len(forged))[0]
            memory[:] = forged
            assert client.put([self._transfer(name, memory)]) == [Answer.OK]
        client.close()

    def _transfer(self, name: str, memory: memoryview) -> Transfer:
        return Transfer(name, (Fragment(address(memory), len(memory)),))


class OwnPlace(Place):
    """A backend of the user's own: an object for each block."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.inner = MemoryStorage(object_bytes(BLOCK), 64 * object_bytes(BLOCK))
        self.inner.close = lambda: None  # type: ignore[method-assign]

    def open(self, secret: bytes) -> CheckedStorage:
        check, identity = choose_check(secret, self.identity)
        return CheckedStorage("mine", self.inner, identity, BLOCK, check=check)

    def content(self) -> dict[str, bytes]:
        return {name.hex(): text for name, text in self.inner._blocks.items()}

    def forge(self, forger: Forger) -> None:
        """Objects as if they were one pack; the name behind a block is that of its place."""
        names = sorted(self.inner._blocks)
        texts = [self.inner._blocks[name] for name in names]
        size = 16 if texts[0][BLOCK:].startswith(b"kvcobj2") else CRC_BYTES
        sums = tuple(text[BLOCK + 40 : BLOCK + 40 + size] for text in texts)
        header = PackHeader(self.identity, BLOCK, tuple(names), sums)
        header, blocks = forger(header, [text[:BLOCK] for text in texts])
        magic = b"kvcobj1\0" if header.checksum_bytes == CRC_BYTES else b"kvcobj2\0"
        for name, block, checksum in zip(names, blocks, header.checksums, strict=True):
            label = struct.pack("<8s32s", magic, name) + checksum
            self.inner._blocks[name] = block + label.ljust(PAGE, b"\0")


PLACES: dict[str, Callable[[Path], Place]] = {
    "filesystem": FolderPlace,
    "imitated mooncake": ObjectPlace,
    "s3": S3Place,
    "own": OwnPlace,
}
