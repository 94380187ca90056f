"""Limits, defaults and versions that documents name and that are no settings: they are those of the code. A phrase that
is worded anew is worded anew here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from integration.pd_proxy.__main__ import parse_arguments
from kv_connector import config, events
from kv_connector.admin import bodies, inbox, routes, server
from kv_connector.admin import pins as admin_pins
from kv_connector.cli.doctor import copies, software
from kv_connector.config import secrets as config_secrets
from kv_connector.config import tenants
from kv_connector.index import LEAST_REMEMBERED
from kv_connector.peer.carriers import leases
from kv_connector.peer.carriers.cuda_ipc import CudaIpcTransport
from kv_connector.peer.carriers.nixl_agent import LONGEST_TRANSFER_SECONDS
from kv_connector.peer.carriers.staged.slot_sender import NUM_SLOTS
from kv_connector.peer.protocol import early
from kv_connector.peer.shards import MOST_PARTNERS
from kv_connector.peer.wire import channel, frames, messages, sockets
from kv_connector.replay import recorder
from kv_connector.scheduler.control import expiry, hints, pins
from kv_connector.scheduler.loads import choice
from kv_connector.scheduler.saves import budget, refusals
from kv_connector.scheduler.storage import backups, fetches
from kv_connector.storage import checked
from kv_connector.storage.breaker import Breaker
from kv_connector.storage.filesystem import backend as filesystem
from kv_connector.storage.filesystem import pin_file
from kv_connector.storage.filesystem.layout import LOCK_SECONDS
from kv_connector.storage.mooncake import client as mooncake
from kv_connector.storage.objects import backend as objects
from kv_connector.storage.objects import groups
from kv_connector.storage.s3 import backend as s3
from kv_connector.transfer import form_choice
from kv_connector.transfer.costs import curves
from kv_connector.transfer.cuda import turns
from kv_connector.transfer.paths import base as paths
from kv_connector.types import Direction

ROOT = Path(__file__).parents[1]
LONGEST = CudaIpcTransport.longest_transfer_seconds, LONGEST_TRANSFER_SECONDS
FENCES = tuple(leases.LEASE_SECONDS + seconds for seconds in LONGEST)
LATEST = tuple(leases.LEASE_SECONDS + leases.STILL_SECONDS + 2 * seconds for seconds in LONGEST)
OBJECTS_MIB = groups.GROUP_BYTES >> 20, s3.GROUP_BYTES >> 20
AWAITED = Direction.LOAD, True
LAUNCHED_GIB = curves.MOST_LAUNCHED_BYTES >> 30
DEFAULTS = config.Config()
S3 = config.S3Config("bucket")
STORAGE = config.StorageConfig(path="/data/kv", capacity="1GiB")  # type: ignore[arg-type]
BREAKER = inspect.signature(Breaker).parameters
LIMITS = {
    "ARCHITECTURE.md": (
        "Long DMA copies yield every {} MiB of a background load, {} of a save and {} of a step's load".format(
            *(turns.TURN_BYTES[pace] >> 20 for pace in ((Direction.LOAD, False), (Direction.SAVE, False), AWAITED))
        ),
        f"Parts are slices of {paths.SLICE_BYTES >> 20} MiB",
        f"one kernel is a copy, {paths.LONG_SLICE_BYTES >> 20} MiB",
        f"copies what takes {curves.DISTURBING_US:.0f} us at most",
        f"all of it, up to {LAUNCHED_GIB} GiB, where the step is light",
        f"in jobs of {fetches._FETCH_BLOCKS} that become matchable",
        f"at most {curves._WORTH_PACKING[Direction.LOAD]} of what DMA takes alone for loads and "
        f"{curves._WORTH_PACKING[Direction.SAVE]} for saves",
    ),
    "SECURITY.md": (f"A shared secret of at least {config_secrets.LEAST_CHARACTERS} characters",),
    "docs/admin.md": (
        f"At most {server.MOST_CONNECTIONS} connections",
        f"has at most {server.MOST_BODY_BYTES >> 20} MiB",
        f"a `text` {bodies._MOST_TEXT:,} characters",
        f"arrive within {server.CLIENT_SECONDS:.0f} seconds",
        f"a command within {routes.ENGINE_SECONDS:.0f} seconds",
        f"beyond {inbox._MOST_WAITING} that wait",
        f"{admin_pins._MOST_PINS:,} at most",
        f"seconds (30, at most {bodies.MOST_WAIT_SECONDS:.0f})",
    ),
    "docs/cli.md": (
        f"of at most {recorder.MOST_BYTES >> 30} GiB",
        f"need {copies._GPU_BLOCKS * copies.LAYERS * copies.PIECE_BYTES >> 30} GiB of its free memory",
        f"less than {100 * copies._LEAST_OF_LINK:.0f} % of what its generation and width carry",
        f"a warning below {100 * copies._LEAST_OF_PLAIN:.0f} % of plain ones",
    ),
    "docs/benchmarks.md": (
        f"{LAUNCHED_GIB} GiB, in pieces of up to {curves._LONGEST_LAUNCHED_BYTES >> 10} KiB",
        "after each {} MiB of a load in the background, {} of a save and {} of a load that a step waits for".format(
            *(turns.TURN_BYTES[pace] >> 20 for pace in ((Direction.LOAD, False), (Direction.SAVE, False), AWAITED))
        ),
        f"which copies {turns._PAGE_BYTES >> 10} KiB in the same direction",
    ),
    "docs/choosing.md": (f"the connector takes `staging_memory`, {DEFAULTS.staging_memory >> 20} MiB",),
    "docs/control.md": (
        f"They hold `pinned_share` of the host at most ({DEFAULTS.pinned_share} by default)",
        f"An object of more than {hints._MOST_HINTS} hints has no effect",
        f"beyond {pins._MOST_PINS:,} pins at a time",
        f"{expiry._MOST:,} prompts, and {expiry._MOST_HASHES:,} blocks of theirs, may wait",
        f"`ttl_s` | {hints.LEAST_TTL:.0f} to {hints.MOST_TTL:.0f}",
        f"{tenants._MOST_TENANTS} tenants at most, with names of 1 to {tenants.LONGEST_NAME} characters",
        f"weights of 1 to {tenants._MOST_WEIGHT:,}.",
        f"It has {pin_file.MOST_BYTES >> 20} MiB at most",
    ),
    "docs/lossless.md": (
        f"has at most {form_choice.LARGEST_SHARE} of its raw bytes",
        f"half of the last {refusals.JUDGED_BLOCKS:,} blocks",
    ),
    "docs/mooncake.md": (
        f"Of smaller ones 2, 4, 8, up to {groups.MAX_BLOCKS} that follow one another",
        *(f"`{name}={value}`" for name, value in mooncake._DEFAULTS.items()),
        f"after {BREAKER['first_pause'].default} seconds, then ever less often, down to once in "
        f"{BREAKER['longest_pause'].default:.0f} seconds",
    ),
    "docs/observability.md": (
        f"more than {events._MAX_PENDING:,} events",
        f"the host holds, and {LEAST_REMEMBERED:,} at least",
        f"a read of up to {fetches._FETCH_BLOCKS} blocks",
        f"a write of up to {backups._JOB_BLOCKS} blocks",
    ),
    "docs/peers.md": (
        f"at most {messages.MAX_MESSAGE >> 20} MiB ({frames.MAX_HELLO >> 10} KiB before the handshake is over)",
        f"read is bounded at {sockets.MAX_UNSENT >> 20} MiB",
        f"nobody has begun at {early.MOST_EARLY_BLOCKS:,} blocks",
        f"at most {channel._MOST_UNAUTHENTICATED} connections from outside, and {channel.MOST_CALLS} that the rank",
        f"tensor-parallel ranks, {MOST_PARTNERS} times at most",
        f"a ring of {NUM_SLOTS} slots for each link",
        f"within a lease of {leases.LEASE_SECONDS:.0f} s",
        f"after {leases.GONE_SECONDS:.0f} s; at the latest after {2 * leases.GONE_SECONDS + leases.STILL_SECONDS} s",
        f"{FENCES[0]:.0f} s (CUDA IPC), {FENCES[1]:.0f} s (NIXL); at the latest after {LATEST[0]} s and {LATEST[1]} s",
    ),
    "docs/sglang.md": (
        f'{OBJECTS_MIB[0]} MiB or more for `"mooncake"` and {OBJECTS_MIB[1]} MiB for `"s3"`',
        f"a load of up to {LAUNCHED_GIB} GiB ({(LAUNCHED_GIB << 30) // (128 << 10):,} tokens here), in front of a step "
        f"that computes a {'sixteenth' if choice._LIGHT == 16 else choice._LIGHT} of its tokens",
    ),
    "docs/storage.md": (
        f"waited for at most {'ten' if LOCK_SECONDS == 10 else LOCK_SECONDS} seconds",
        f"{filesystem.NUM_THREADS} threads read a folder",
        f"waits at most `storage.timeout_ms` ({STORAGE.timeout_ms}) after it was first seen",
    ),
    "docs/storage_backends.md": (
        f"A batch has at most {checked._BATCH_BYTES >> 20} MiB, or one object",
        f"A future is waited for {checked._SECONDS:.0f} seconds",
    ),
    "docs/storage_s3.md": (
        f"`PREFIX/{groups.Groups(b'', 1).name(b'').rpartition('.')[0]}.HASH`",
        f"An object has {OBJECTS_MIB[1]} MiB or more",
        f"or {groups.MAX_BLOCKS} blocks where these are smaller than {s3.GROUP_BYTES // groups.MAX_BLOCKS >> 10} KiB",
        f"asks for {objects._NAMES_PER_LOOK_UP} objects",
        f"`max_retries` times ({S3.max_retries}) and until `timeout_ms` ({S3.timeout_ms:,})",
    ),
    "docs/vllm.md": (f"One step saves at most what {budget.BURST_SECONDS} s allow",),
}
"""By document, what it says of limits that are in the code and no settings."""


@pytest.mark.parametrize("document", LIMITS)
def test_limits_are_those_of_the_code(document: str) -> None:
    text = " ".join((ROOT / document).read_text().split())
    assert [told for told in LIMITS[document] if told not in text] == []


def test_limits_of_the_proxy_are_its_defaults() -> None:
    text = (ROOT / "docs" / "peers.md").read_text()
    options = vars(parse_arguments(["--decode", "http://127.0.0.1:1"]))
    numbers = {name.replace("_", "-"): value for name, value in options.items() if type(value) in (int, float)}
    told = {name: re.search(rf"`--{name}`(?: \w+)? \((\d+)", text) for name in numbers.keys() - {"port"}}
    assert len(told) == 6
    assert {name: float(found[1]) for name, found in told.items() if found} == {name: numbers[name] for name in told}


def test_outcomes_of_the_proxy_are_those_that_it_counts() -> None:
    text = " ".join((ROOT / "docs" / "peers.md").read_text().split())
    told = re.search(r"`pd_proxy_requests_total` by outcome \((.*?)\)", text)
    source = "".join(path.read_text() for path in (ROOT / "integration" / "pd_proxy").glob("*.py"))
    assert told is not None
    named = re.findall(r"`(\w+)`", told[1])
    assert len(named) == 7 and [name for name in named if f'"{name}"' not in source] == []


def test_versions_in_the_readme_are_those_that_are_tested_and_needed() -> None:
    rows = {row.split("|")[1].strip(): row for row in (ROOT / "README.md").read_text().splitlines() if row[:1] == "|"}
    for engine in software.ENGINES:
        tested = rows[engine.name].split("|")[2]
        assert tuple(re.findall(r"\d+\.\d+\.\d+", tested)) == tuple(engine.tested), engine.name
    least = software._LEAST
    assert f"from {least['torch']}, {least['triton']} on" in rows["torch, Triton"]
    project = (ROOT / "pyproject.toml").read_text()
    for package, version in least.items():
        assert f'"{package}>={version}' in project
    assert re.search(r'requires-python = ">=(.*?)"', project)[1] + " and newer" in rows["Python"]  # type: ignore[index]


def test_the_default_policy_is_named_as_that() -> None:
    readme = (ROOT / "README.md").read_text()
    default = config.Config().write_policy.value
    assert re.findall(r"`(\w+)` \(default\)", readme) == [default]
    assert {policy.value for policy in config.WritePolicy} <= set(re.findall(r"(?m)^\| `(\w+)`", readme))


LINES = {
    "linker": "linker_module_path",
    "class_name": "module_path",
    "connector_scheduler_class": "connector_module",
    "connector_worker_class": "connector_module",
    "kv_connector": "kv_connector_module_path",
}
"""By the key of an engine's launch line that names a class of ours: the one that names its module."""


def test_classes_in_launch_lines_are_in_their_modules() -> None:
    found = set()
    for document in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")]):
        for block in re.findall(r"(?ms)^ *```.*?^ *```", document.read_text()):
            pairs = re.findall(r'"(\w+)": ?"([\w.]+)"', block) + re.findall(r"(?m)^ +(\w+): ([\w.]+)$", block)
            modules = {key: value for key, value in pairs if key in LINES.values()}
            for key, name in pairs:
                module = modules.get(LINES.get(key, ""), "kv_connector.engines.vllm")
                if key in LINES and module.startswith("kv_connector."):
                    source = ROOT / module.replace(".", "/") / "__init__.py"
                    assert re.search(rf"\b{name}\b", source.read_text()), (document.name, name)
                    found.add(name)
    assert found == {
        *("TieredKVConnector", "TieredKVLinker", "TieredKVStorage", "TieredKVScheduler", "TieredKVWorker"),
    }
