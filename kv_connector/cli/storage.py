"""`kv-connector storage`: inspect and trim a storage folder, also while engines use it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..config.secrets import STORAGE_SECRET, secret_of
from ..errors import ConfigError
from ..storage.checksums import CRC_BYTES
from ..storage.filesystem.survey import DAMAGED, PackFile, damaged_blocks, survey, temporary_files
from ..storage.macs import OtherSecretError
from ..values import check_integer, parse_size, shown
from .progress import progress
from .text import Parsers, size_text, time_text


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "inspect and trim a storage folder"
    storage = parsers.add_parser("storage", help=text, description=text)
    commands = storage.add_subparsers(required=True, metavar="COMMAND")

    def add_command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="the folder")
        command.set_defaults(run=run)
        return command

    add_command("stat", _stat, "show what the folder holds, in all and by identity")
    ls = add_command("ls", _ls, "list packs, the last used first")
    ls.add_argument("--limit", type=int, help="lines")
    verify = add_command("verify", _verify, "read everything and compare checksums")
    verify.add_argument(
        "--delete",
        action="store_true",
        help="delete packs without a good block; engines read the good blocks of others",
    )
    verify.add_argument(
        "--secret-env",
        metavar="NAME",
        help=f"environment variable with the secret of blocks with MACs; {STORAGE_SECRET} if it is there",
    )
    gc = add_command("gc", _gc, "delete the least recently used packs until the folder is small enough")
    gc.add_argument("--capacity", required=True, help='such as "100GiB"')
    rm = add_command("rm", _rm, "delete packs")
    rm.add_argument("names", nargs="*", help="names of packs, or their first digits")
    rm.add_argument("--identity", help="delete the packs of one identity, given by its digits or the first of them")
    rm.add_argument("--all", action="store_true", help="delete all packs, of every identity")


def _stat(options: argparse.Namespace) -> int:
    packs = list(survey(options.path))
    groups: dict[str, list[PackFile]] = {}
    for pack in packs:
        groups.setdefault(_identity(pack), []).append(pack)
    print(f"{'identity':16} {'packs':>8} {'blocks':>10} {'bytes':>12} {'block':>10} {'check':>6}  last used")
    for identity, group in sorted(groups.items()):
        _print_group(identity, group)
    _print_group("in all", packs)
    temporary = temporary_files(options.path)
    print(f"{len(temporary)} temporary files, {size_text(sum(temporary.values()))}")
    return 0


def _ls(options: argparse.Namespace) -> int:
    if options.limit is not None:
        check_integer("--limit", options.limit, 1)
    packs = sorted(survey(options.path), key=lambda pack: -pack.used_ns)
    for pack in packs[: options.limit]:
        blocks = len(pack.header.keys) if pack.header else 0
        told, size = pack.problem or f"{blocks} blocks", size_text(pack.num_bytes)
        print(f"{pack.name[:16]}  {_identity(pack):16}  {size:>10}  {time_text(pack.used_ns)}  {told}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    secret = _secret(options.secret_env)
    packs = list(survey(options.path))
    num_blocks, num_bad_blocks, lost, left, partly, unread, unchecked = 0, 0, 0, 0, 0, 0, 0
    for pack in progress(packs, "verify", lambda pack: pack.num_bytes):
        try:
            bad = {} if pack.header is None else damaged_blocks(pack, secret)
        except FileNotFoundError:
            continue  # evicted meanwhile
        except OtherSecretError:
            unchecked += 1  # of those who know it they may be good
            continue
        count = len(pack.header.keys) if pack.header is not None else 0
        num_blocks, num_bad_blocks = num_blocks + count, num_bad_blocks + len(bad)
        if not pack.problem and not bad:
            continue
        print(f"{pack.path}: {pack.problem or _bad_blocks(bad, count)}")
        if len(bad) < count:
            partly += 1
        elif not pack.was_read or set(bad.values()) - {DAMAGED}:
            unread += 1  # it may be good: a disk that hiccups empties no folder
        else:
            lost += 1
            left += not (options.delete and _remove(pack))
    done = " and deleted" if lost and not left else ""
    print(
        f"{len(packs)} packs, {lost} without a good block{done}, {partly} with some; "
        f"{num_blocks} blocks, {num_bad_blocks} damaged{_left_alone(unread, unchecked, secret)}"
    )
    if partly or unread or left:
        return 1
    return 2 if unchecked else 0


def _left_alone(unread: int, unchecked: int, secret: bytes) -> str:
    """What is said of packs of which nobody knows whether they are good."""
    text = f"; {unread} packs that cannot be read, and are left alone" if unread else ""
    if unchecked:
        fix = "and the given one is not theirs" if secret else f"give it in {STORAGE_SECRET} or with --secret-env"
        text += f"; {unchecked} packs whose blocks can be checked with their engines' secret only: {fix}"
    return text


def _secret(variable: str | None) -> bytes:
    """That in the variable, or in the usual one; empty where there is none. Raises ConfigError for one that is bad."""
    if variable is None and STORAGE_SECRET not in os.environ:
        return b""
    name = STORAGE_SECRET if variable is None else variable
    return secret_of("--secret-env", name, STORAGE_SECRET, "all engines that share the folder")


def _bad_blocks(bad: Mapping[int, str], count: int) -> str:
    """What is said of a pack's slots, by what is wrong with them."""
    whats = dict.fromkeys(bad.values())
    return "; ".join(f"of {count} blocks {[slot for slot in bad if bad[slot] == what]} {what}" for what in whats)


def _gc(options: argparse.Namespace) -> int:
    capacity = parse_size(options.capacity, "--capacity")
    packs = sorted(survey(options.path), key=lambda pack: pack.used_ns)
    excess = sum(pack.num_bytes for pack in packs) - capacity
    gone = []
    for pack in packs:
        if excess <= 0:
            break
        gone.append(pack)
        excess -= pack.num_bytes
    return _delete(gone)


def _rm(options: argparse.Namespace) -> int:
    names = tuple(options.names)
    if "" in names or options.identity == "" or not (names or options.identity or options.all):
        raise ConfigError("nothing to delete: give names, --identity or --all, none of them empty")
    if bool(names) + bool(options.identity) + options.all > 1:  # is the second all that is meant, or more of it?
        raise ConfigError("not clear what to delete: give one of names, --identity and --all; nothing was deleted")
    packs = list(survey(options.path))
    for name in names:  # before anything is deleted: it may be a slip of the keyboard
        if not any(pack.name.startswith(name) for pack in packs):
            raise ConfigError(f"no pack is named {shown(name)}: see kv-connector storage ls; nothing was deleted")
    if options.identity:
        return _delete(_of_identity(packs, options.identity))
    return _delete([pack for pack in packs if options.all or pack.name.startswith(names)])


def _of_identity(packs: Sequence[PackFile], digits: str) -> list[PackFile]:
    """Raises ConfigError where there are none: that too may be a slip."""
    found = [pack for pack in packs if pack.header and pack.header.identity.hex().startswith(digits)]
    if not found:
        raise ConfigError(
            f"no pack is of the identity {shown(digits)}: see kv-connector storage stat; nothing was deleted"
        )
    return found


def _delete(packs: Sequence[PackFile]) -> int:
    gone = [pack for pack in progress(packs, "delete", lambda pack: pack.num_bytes) if _remove(pack)]
    print(f"deleted {len(gone)} packs, {size_text(sum(pack.num_bytes for pack in gone))}")
    return 0 if len(gone) == len(packs) else 2


def _remove(pack: PackFile) -> bool:
    """Whether a pack is gone. One that cannot be deleted is told of, and keeps no other."""
    try:
        pack.path.unlink(missing_ok=True)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def _print_group(identity: str, packs: Sequence[PackFile]) -> None:
    headers = [pack.header for pack in packs if pack.header is not None]
    sizes = sorted({header.block_bytes for header in headers})
    block = size_text(sizes[0]) if len(sizes) == 1 else "-"
    blocks = sum(len(header.keys) for header in headers)
    used = time_text(max(pack.used_ns for pack in packs)) if packs else "-"
    total = size_text(sum(pack.num_bytes for pack in packs))
    checks = {"CRC-32" if header.checksum_bytes == CRC_BYTES else "MAC" for header in headers}
    check = checks.pop() if len(checks) == 1 else "-"
    print(f"{identity:16} {len(packs):8} {blocks:10} {total:>12} {block:>10} {check:>6}  {used}")


def _identity(pack: PackFile) -> str:
    if pack.header is not None:
        return pack.header.identity.hex()[:16]
    return "(not a pack)" if pack.was_read else "(not read)"
