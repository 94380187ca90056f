"""`kv-connector admin ...`: what an operator asks of a running engine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..config.admin import ADMIN_TOKEN, read_token
from ..errors import ConfigError
from ..values import shown
from .base import Answer, Refusal
from .client import AdminClient

_WAIT_SECONDS = 10.0
"""Of each question of how far a drain is."""
_Run = Callable[[AdminClient, argparse.Namespace], Answer]


def add(parsers: Any) -> None:
    """Register `admin` and its commands among the subparsers of `kv-connector`."""
    text = "see and steer a running engine through its admin endpoint"
    admin = parsers.add_parser("admin", help=text, description=text)
    commands = admin.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "stats", _stats, "all statistics, by tier", _shown_stats)
    _add(commands, "pins", _pins, "the prefixes that are pinned", _shown_pins)
    pin = _add(commands, "pin", _pin, "keep a prefix on the host")
    _add_prefix(pin)
    pin.add_argument("--ttl", type=float, metavar="SECONDS", help="seconds that the pin lasts; without it, until unpin")
    unpin = _add(commands, "unpin", _unpin, "undo a pin")
    unpin.add_argument("id", help="as pin printed it, and pins lists it")
    resize = _add(commands, "resize", _resize, "use another size of host memory from now on")
    resize.add_argument("size", help='such as "32GiB", over all ranks; "all" for what the engine was started with')
    _add(commands, "reset", _reset, "drop all that is cached behind the device")
    clear = _add(commands, "clear", _clear, "drop a tenant's blocks from the host")
    clear.add_argument("tenant", help="its name in the engine's settings")
    _add_prefix(_add(commands, "warm", _warm, "read what storage has of a prefix to the host"))
    drain = _add(commands, "drain", _drain, "write all that is on the host to storage")
    drain.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="seconds to wait until all is written"
    )


def _add(
    commands: Any, name: str, run: _Run, text: str, show: Callable[[Answer], str] | None = None
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("--url", default="", help='such as "http://127.0.0.1:7200"')
    command.add_argument("--socket", default="", metavar="PATH", help="path of a Unix socket")
    command.add_argument(
        "--token-env", default=ADMIN_TOKEN, metavar="NAME", help=f"variable with the token; {ADMIN_TOKEN} if left out"
    )
    command.add_argument("--token-file", default="", metavar="FILE", help="file with the token, of mode 0600")
    command.add_argument("--json", action="store_true", help="print the JSON answer")
    command.set_defaults(run=lambda options: _call(run, show or _shown, options))
    return command


def _add_prefix(command: argparse.ArgumentParser) -> None:
    prefix = command.add_mutually_exclusive_group(required=True)
    prefix.add_argument("--tokens", metavar="FILE", help='JSON list of token ids, "-" for standard input')
    prefix.add_argument("--text", help="the prompt's text; needs an engine with a tokenizer")
    prefix.add_argument("--text-file", metavar="FILE", help='file with the text, "-" for standard input')
    prefix.add_argument("--hashes", metavar="FILE", help="JSON list of block hashes in hexadecimal digits")
    command.add_argument("--salt", default="", help="cache_salt of the requests with this prefix")
    command.add_argument(
        "--tenant", metavar="NAME", help="tenant whose share of the host it takes; the salt's if left out"
    )


def _call(run: _Run, show: Callable[[Answer], str], options: argparse.Namespace) -> int:
    """0 where it was done, 1 where it is under way yet, 2 where the endpoint refuses it."""
    token = read_token(options.token_env, options.token_file, "--token-env", "--token-file")
    client = AdminClient(options.url, options.socket, token)
    try:
        answer = run(client, options)
        text = json.dumps(answer, indent=2) if options.json else show(answer)
    except Refusal as refusal:
        print(f"error: {client.where}: {refusal.status}: {refusal}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, AttributeError) as error:  # another server's answer, which has not what ours have
        raise ConfigError(f"{client.where} does not answer as an admin endpoint: {shown(error)}") from error
    print(text)
    return 1 if answer.get("done") is False else 0


def _stats(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("GET", "/v1/stats")


def _pins(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("GET", "/v1/pins")


def _pin(client: AdminClient, options: argparse.Namespace) -> Answer:
    ttl = {} if options.ttl is None else {"ttl_s": options.ttl}
    return client.call("POST", "/v1/pins", _prefix(options) | ttl)


def _unpin(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("DELETE", f"/v1/pins/{quote(options.id, safe='')}")


def _resize(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("POST", "/v1/resize", {"host_memory": None if options.size == "all" else options.size})


def _reset(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("POST", "/v1/reset")


def _clear(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("POST", f"/v1/tenants/{quote(options.tenant, safe='')}/clear")


def _warm(client: AdminClient, options: argparse.Namespace) -> Answer:
    return client.call("POST", "/v1/warm", _prefix(options))


def _drain(client: AdminClient, options: argparse.Namespace) -> Answer:
    """Asked until it is done: each answer says how far it is."""
    deadline = time.monotonic() + options.timeout
    while True:
        wait = min(_WAIT_SECONDS, max(0.0, deadline - time.monotonic()))
        answer = client.call("POST", "/v1/drain", {"wait_s": wait})
        if answer["done"] or not wait:
            return answer
        print(f"{answer['remaining_blocks']} blocks are to be written", file=sys.stderr)


def _prefix(options: argparse.Namespace) -> dict[str, Any]:
    whose = {"cache_salt": options.salt} if options.salt else {}
    whose |= {"tenant": options.tenant} if options.tenant is not None else {}
    if options.tokens is not None:
        return {"token_ids": _parsed("--tokens", options.tokens)} | whose
    if options.hashes is not None:
        return {"hashes": _parsed("--hashes", options.hashes)} | whose
    return {"text": options.text if options.text is not None else _read("--text-file", options.text_file)} | whose


def _parsed(option: str, file: str) -> Any:
    text = _read(option, file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {shown(file)} is not JSON: {error}") from error


def _read(option: str, file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {shown(file)} is not UTF-8: {error}") from error


def _shown(answer: Answer) -> str:
    return "\n".join(f"{name.replace('_', ' ')}: {_text(value)}" for name, value in answer.items())


def _shown_pins(answer: Answer) -> str:
    lines = [f"{'id':28} {'blocks':>8}  seconds left"]
    for pin in answer["pins"]:
        left = "for ever" if pin["seconds_left"] is None else f"{pin['seconds_left']:.0f}"
        lines.append(f"{pin['id']:28} {pin['num_blocks']:8}  {left}")
    return "\n".join(lines)


def _shown_stats(answer: Answer) -> str:
    """A block of lines for each tier and tenant; counters that are 0 are left out."""
    parts = [(name, value) for name, value in answer.items() if not isinstance(value, Mapping)]
    lines = [f"{name:36} {_text(value):>20}" for name, value in parts]
    for kind, owners in (("", answer["tiers"]), ("tenant ", answer["tenants"])):
        for owner, statistics in owners.items():
            lines += ["", f"{kind}{owner}"]
            lines += [f"  {name:34} {_text(value):>20}" for name, value in statistics.items() if value]
    return "\n".join(lines)


def _text(value: object) -> str:
    return f"{value:,.10g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
