"""The command line: an OpenAI-compatible proxy in front of prefill and decode engines. An example, not a product.

    python -m integration.pd_proxy --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Each completion is asked of a prefill engine for one token, with `do_remote_decode`, and what that answers in
`kv_transfer_params` goes with the same request to a decode engine, whose answer is passed on as it comes. Given where a
prefill engine's ranks listen for peers (`--prefill URL,HOST:PORT`), both are asked at once, under a transfer id of our
own. Without a prefill engine the decode engine computes the prompt, without a decode engine the client gets 503.
Several of each are taken in turns.
"""

from __future__ import annotations

import argparse
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx
import uvicorn

from .app import make_app
from .completions import Limits
from .engines import Engine, Role, Turns

MIB = 1 << 20


def engine_of(role: Role) -> Callable[[str], Engine]:
    """Reads `URL`, and of a prefill engine `URL,HOST:PORT`, too."""

    def parse(text: str) -> Engine:
        url, _, peer = text.partition(",")
        host, _, port = peer.rpartition(":")
        try:
            parts = urlsplit(url)
            is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
            httpx.Request("GET", url)
        except (ValueError, httpx.InvalidURL):  # of a port or a name that is none
            is_server = False
        if not is_server:
            raise argparse.ArgumentTypeError(f"{url!r} is no server: give one such as http://127.0.0.1:8100")
        if peer and (role == "decode" or not host or not port.isdecimal() or not 0 < int(port) < 65536):
            raise argparse.ArgumentTypeError(
                f"{peer!r} is not where a prefill engine listens for peers: give --prefill URL,HOST:PORT"
            )
        return Engine(role, url, (host, int(port)) if peer else None)

    return parse


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is impossible: give a number above 0")
    return number


def port(text: str) -> int:
    """A port; 0 stands for any that is free."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give 0 to 65535")
    return int(text)


def whole(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is impossible: give a whole number above 0")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with one line where they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.pd_proxy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    add("--port", type=port, default=8000, help="port to listen at (8000); 0 takes a free one")
    add("--prefill", type=engine_of("prefill"), action="append", default=[], metavar="URL[,HOST:PORT]")
    add("--decode", type=engine_of("decode"), action="append", required=True, metavar="URL")
    add("--max-in-flight", type=whole, default=256, help="completions under way (256); 429 beyond them")
    add("--max-body-mib", type=positive, default=32, help="size of a request's body (32); 413 beyond it")
    add("--client-seconds", type=positive, default=60, help="a body may take, or a client not read its answer (60)")
    add("--engine-seconds", type=positive, default=300, help="an engine may be silent (300)")
    add("--check-seconds", type=positive, default=5, help="between two checks of an engine's /health (5)")
    add("--drain-seconds", type=whole, default=30, help="answers may take to end when the proxy is stopped (30)")
    add("--ssl-certfile", metavar="FILE", help="serve https with this certificate")
    add("--ssl-keyfile", metavar="FILE", help="and this key")
    add("--upstream-ca", metavar="FILE", help="trust engines behind https whose certificates these sign")
    options = parser.parse_args(arguments)
    if bool(options.ssl_certfile) != bool(options.ssl_keyfile):
        parser.error("--ssl-certfile and --ssl-keyfile belong together: give both, or neither for http")
    try:
        options.verify = ssl.create_default_context(cafile=options.upstream_ca)
        if options.ssl_certfile:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one, too
        parser.error(f"a certificate or key cannot be read: {error}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted; answers under way are ended first."""
    options = parse_arguments(arguments)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    limits = Limits(options.max_in_flight, int(options.max_body_mib * MIB), options.client_seconds)
    app = make_app(
        Turns(options.prefill),
        Turns(options.decode),
        limits,
        options.engine_seconds,
        options.check_seconds,
        options.verify,
    )
    try:
        listener = socket.create_server((options.host, options.port), backlog=1024)
    except OSError as error:
        print(f"error: cannot listen at {options.host}:{options.port}: {error}", file=sys.stderr)
        return 2
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            timeout_graceful_shutdown=options.drain_seconds,
        )
    )
    scheme = "https" if options.ssl_certfile else "http"
    print(f"serving at {scheme}://{options.host}:{listener.getsockname()[1]}", flush=True)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
