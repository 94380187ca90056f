"""The proxy as a process: its command line, https on both sides, and how it ends."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from integration.pd_proxy.__main__ import parse_arguments
from tests.http_servers import serving
from tests.pd_engines import PATIENCE, Scripted, Streaming, served, wait_until

ROOT = Path(__file__).parents[1]
TOLD = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7}


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    command = [sys.executable, "-m", "integration.pd_proxy", "--port", "0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("serving at http"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*private))
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_https_on_both_sides(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    tls = {"ssl_certfile": cert, "ssl_keyfile": key}
    prefill, decode = Scripted(params=TOLD), Scripted("answer")
    with served(prefill.app, **tls) as first, served(decode.app, **tls) as second:
        engines = ("--prefill", first, "--decode", second)
        trusted = ssl.create_default_context(cafile=cert)
        with running(*engines, "--upstream-ca", cert, "--ssl-certfile", cert, "--ssl-keyfile", key) as (_, url):
            assert url.startswith("https://")
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, verify=trusted, timeout=PATIENCE)
            assert answer.json()["choices"] == [{"text": "answer"}]
        assert decode.asked == [{"prompt": "x", "kv_transfer_params": TOLD}]
        with running(*engines) as (_, url):
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
            assert refused.status_code == 503, "nobody vouches for the engines"


class SpeaksPlainly(BaseHTTPRequestHandler):
    """Answers in plain text in the middle of a conversation that is encrypted."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        os.write(self.connection.fileno(), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    do_POST = do_GET  # noqa: N815 - as `http.server` calls it.


def test_an_engine_whose_encryption_breaks_is_left_out_like_any_that_is_dead(certificate: tuple[str, str]) -> None:
    """What TLS finds wrong behind the handshake, httpx hands on as it is: also that a certificate is wanted of us."""
    cert, key = certificate
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    prefill, decode = Scripted(params=TOLD), Scripted("answer")
    with served(prefill.app) as first, served(decode.app) as second, serving(SpeaksPlainly, tls) as third:
        engines = ("--prefill", third, "--prefill", first, "--decode", third, "--decode", second)
        with running(*engines, "--upstream-ca", cert, "--check-seconds", "0.01") as (_, url):
            for _ in range(4):
                answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
                assert answer.json()["choices"] == [{"text": "answer"}]
            assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 200

            def has_left_out() -> bool:
                known = httpx.get(f"{url}/health", timeout=PATIENCE).json()["engines"]
                return [each["url"] for each in known if not each["healthy"]] == [third, third]

            wait_until(has_left_out, "it is out, as a prefill engine and as a decode engine")
    assert len(prefill.asked) == len(decode.asked) == 4


def test_models_are_told_by_another_than_an_engine_whose_encryption_breaks(certificate: tuple[str, str]) -> None:
    """Before any check has found it out."""
    cert, key = certificate
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    with (
        served(Scripted("answer").app) as good,
        serving(SpeaksPlainly, tls) as broken,
        running("--decode", broken, "--decode", good, "--upstream-ca", cert, "--check-seconds", "600") as (_, url),
    ):
        answers = [httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code for _ in range(2)]
    assert answers == [200, 200]


def test_a_proxy_that_is_stopped_ends_what_it_has_begun() -> None:
    decode = Streaming([b"data: 1\n\n", b"data: 2\n\n"])
    with (
        served(decode.app) as engine,
        running("--decode", engine) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json={"stream": True}, timeout=PATIENCE) as answer,
    ):
        parts = answer.iter_bytes()
        assert next(parts) == b"data: 1\n\n"
        process.send_signal(signal.SIGTERM)

        def is_closed() -> bool:
            try:
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
            except ConnectionError:  # refused, or reset by one that is just closing
                return True
            return False

        wait_until(is_closed, "it takes nothing new")
        decode.go_on.set()
        assert b"".join(parts) == b"data: 2\n\n"
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "integration.pd_proxy", "--port", port, "--decode", "http://127.0.0.1:1"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 2)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: cannot listen at 127.0.0.1:{port}: [Errno 98] Address already in use")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "the following arguments are required: --decode"),
        ("--decode ftp://x:1", "'ftp://x:1' is no server: give one such as http://127.0.0.1:8100"),
        ("--decode http://x:99999", "'http://x:99999' is no server: give one such as http://127.0.0.1:8100"),
        ("--decode http://x:1,h:2", "'h:2' is not where a prefill engine listens for peers"),
        ("--decode http://xn--:1", "'http://xn--:1' is no server: give one such as http://127.0.0.1:8100"),
        ("--decode http://x:1 --prefill http://y:1,h", "'h' is not where a prefill engine listens for peers"),
        ("--decode http://x:1 --max-in-flight 0", "'0' is impossible: give a whole number above 0"),
        ("--decode http://x:1 --check-seconds x", "'x' is impossible: give a number above 0"),
        ("--decode http://x:1 --client-seconds inf", "'inf' is impossible: give a number above 0"),
        ("--decode http://x:1 --port 70000", "'70000' is no port: give 0 to 65535"),
        ("--decode http://x:1 --ssl-certfile c", "--ssl-certfile and --ssl-keyfile belong together"),
        ("--decode http://x:1 --upstream-ca /nowhere/ca.pem", "a certificate or key cannot be read: [Errno 2]"),
        (
            "--decode http://x:1 --ssl-certfile /n/a --ssl-keyfile /n/b",
            "a certificate or key cannot be read: [Errno 2]",
        ),
    ],
)
def test_what_cannot_work_is_said_at_the_start(arguments: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(arguments.split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert error in last
