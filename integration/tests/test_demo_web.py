"""The demo on its page, in a real browser: what it shows is what the demo measured."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from integration.mini_engine.demo import parse_arguments
from integration.mini_engine.page import Page
from integration.models.smollm2 import default_folder, is_converted
from integration.servers import HOST, free_ports

httpx = pytest.importorskip("httpx", reason="needs the extra proxy: httpx speaks to the browser's driver")

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[2]
SMALL = "--users 2 --turns 2 --document-tokens 60 --answer-tokens 4 --device-blocks 24 --policy write_through"
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4
"""Of the model: tokens, layers, K and V, heads, their length, fp32."""
BROWSER = ["headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
BROWSER += ["disable-component-update", "disable-sync", "window-size=1280,1000"]
NUMBERS = """
const cells = [...document.querySelectorAll('[data-ttft]')].map(
  cell => [cell.id, {...cell.dataset, text: cell.innerText}]);
const bars = [...document.querySelectorAll('.way')].map(way => [way.dataset.way,
  [...way.querySelectorAll('[data-seconds]')].map(bar => Number(bar.dataset.seconds))]);
const tiers = [...document.querySelectorAll('[data-tier]')].map(tier => [tier.closest('.way').dataset.way,
  tier.dataset.tier, Number(tier.dataset.bytes)]);
return {cells: Object.fromEntries(cells), bars: Object.fromEntries(bars), tiers, status: $('status').textContent};
"""


class Browser:
    """A headless Chromium, by the WebDriver protocol of its own driver."""

    def __init__(self, driver: str) -> None:
        options = {"args": [f"--{argument}" for argument in BROWSER], "binary": shutil.which("chromium")}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self._http = httpx.Client(base_url=driver, timeout=120, trust_env=False)
        self._session = self._call("", capabilities=capabilities)["sessionId"]

    def open(self, url: str) -> None:
        """Go there."""
        self._call(f"/{self._session}/url", url=url)

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._call(f"/{self._session}/execute/sync", script=script, args=[])

    def wait_for(self, state: str) -> None:
        """Until the page is in this state; its status in the failure says where it stands."""
        end = time.monotonic() + 300
        while (found := self.run("return [document.body.dataset.state, $('status').textContent]"))[0] != state:
            assert time.monotonic() < end, f"never {state}: {found}"

    def quit(self) -> None:
        """Close it."""
        self._http.delete(f"/session/{self._session}")
        self._http.close()

    def _call(self, path: str, **body: Any) -> Any:
        answer = self._http.post(f"/session{path}", json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    port = free_ports(1)[0]
    with subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert any("started successfully" in line for line in driver.stdout), "the driver did not start"
        browser = Browser(f"http://{HOST}:{port}")
        try:
            yield browser
        finally:
            browser.quit()
            driver.terminate()


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The demo's process, without a display, and the URL of its page."""
    command = [sys.executable, "-m", "integration.mini_engine.demo", *SMALL.split(), "--web", "--port", "0", *arguments]
    command += ["--json", str(folder / "demo.json"), "--png", str(folder / "demo.png")]
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith(f"page: http://{HOST}:"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


@pytest.mark.model
@pytest.mark.skipif(not is_converted(default_folder()), reason="needs the converted SmolLM2 (make model)")
def test_a_browser_shows_the_numbers_of_the_demo(browser: Browser, tmp_path: Path) -> None:
    with demo(tmp_path) as (process, url):
        browser.open(url)
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait(60) == 0, printed
    browser.wait_for("over")  # the process has ended: all that is shown was told before
    shown = browser.run(NUMBERS)
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert len(rows) == 12
    expected = {
        f"turn-{row['turn']}-user-{row['user']}-{row['way']}": {
            "ttft": repr(row["ttft"]),
            "device": str(row["device_hit_tokens"]),
            "host": str(row["host_hit_tokens"]),
            "text": f"{1e3 * row['ttft']:.1f}",
        }
        for row in rows
    }
    assert {name: cell | {"ttft": repr(float(cell["ttft"]))} for name, cell in shown["cells"].items()} == expected
    ways = ["no cache", "device cache", "write_through"]
    medians = {
        way: [median(r["ttft"] for r in rows if (r["way"], r["turn"]) == (way, turn)) for turn in (0, 1)]
        for way in ways
    }
    assert shown["bars"] == medians
    tiers = {(way, tier): size for way, tier, size in shown["tiers"]}
    assert set(tiers) == {(way, "device") for way in ways} | {("write_through", "host")}
    assert tiers["no cache", "device"] == 0 < tiers["device cache", "device"]
    assert tiers["write_through", "host"] % BLOCK_BYTES == 0 < tiers["write_through", "host"]
    assert tiers["device cache", "device"] <= 24 * BLOCK_BYTES
    assert shown["status"].startswith("Over: all answers are equal.")


def test_every_page_is_told_all_before_the_demo_ends(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[list[str]] = [[], []]
    begun = threading.Semaphore(0)

    def listen(lines: list[str]) -> None:
        with httpx.stream("GET", f"{url}events", timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if "begin" in line:
                    begun.release()

    with ThreadPoolExecutor(2) as pool:
        with Page(0, stay=False) as page:
            url = capsys.readouterr().out.split()[-1]
            page.show("begin", users=2)
            listeners = [pool.submit(listen, lines) for lines in told]
            for _ in listeners:
                assert begun.acquire(timeout=60), "they are told what was before they came"
            page.show("end", claims={})
        for listener in listeners:
            listener.result()
    assert told == [['data: {"kind": "begin", "users": 2}', "", 'data: {"kind": "end", "claims": {}}', ""]] * 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_page_takes_nothing_from_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with Page(0, stay=False):
        url = capsys.readouterr().out.split()[-1]
        answer = httpx.get(url)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "://" not in answer.text
        assert re.findall(r'(?:src|href)="([^"]*)"', answer.text) == ["data:,"]
        assert httpx.get(f"{url}elsewhere").status_code == 404


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--port {port}: Address already in use; give another one, or 0 for any"):
            Page(port, stay=False)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--web --port 70000", "--port 70000 is impossible: give 0 to 65535"),
        ("--stay", "--stay keeps the page of --web: give both"),
    ],
)
def test_what_cannot_work_is_said(arguments: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert error in capsys.readouterr().err
