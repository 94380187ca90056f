"""What a user sees of a running engine. That real engines write such text, integration/tests/test_vllm_serve.py and
test_sglang_contract.py show."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler

import pytest

from kv_connector.cli import main, top
from kv_connector.cli.top.metrics import Sample, metrics_url, read_values
from kv_connector.errors import ConfigError
from tests.http_servers import serving

TEXT = """# HELP vllm:kv_tiered_requests_total Requests admitted.
# TYPE vllm:kv_tiered_requests_total counter
vllm:kv_tiered_requests_total{engine="0",model_name="a {strange} name"} 3.0
vllm:kv_tiered_requests_total{engine="1",model_name="a {strange} name"} 1.0
vllm:kv_tiered_requests_created{engine="0",model_name="m"} 1.7e+09
vllm:kv_tiered_queries_tokens_total{engine="0"} 1000.0
vllm:kv_tiered_device_hit_tokens_total{engine="0"} 100.0
vllm:kv_tiered_host_hit_tokens_total{engine="0"} 400.0
vllm:kv_tiered_storage_hit_tokens_total{engine="0"} 150.0
vllm:kv_tiered_loaded_bytes_total{engine="0"} 2.0e+09
vllm:kv_tiered_load_milliseconds_total{engine="0"} 40.0
vllm:kv_tiered_host_capacity_blocks{engine="0"} 200.0
vllm:kv_tiered_host_cached_blocks{engine="0"} 50.0
vllm:kv_tiered_storage_breaker_is_open{engine="0"} 1.0
vllm:kv_tiered_of_a_later_version_total{engine="0"} 1.0
vllm:prompt_tokens_total{engine="0"} 1000.0
"""


def saying(text: str) -> AbstractContextManager[str]:
    """A server whose /metrics says this; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

    return serving(Handler)


def cells(text: str, title: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(title)]
    return line.replace(title, "").split()


def test_once_says_where_tokens_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    """Summed over engines; what came from storage is a part of the host's hits."""
    with saying(TEXT) as url:
        assert main(["top", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert cells(text, "requests")[0] == "4"
    assert cells(text, "from the device") == ["100", "10.0", "%", "-", "-"]
    assert cells(text, "from the host") == ["250", "25.0", "%", "-", "-"]
    assert cells(text, "from storage") == ["150", "15.0", "%", "-", "-"]
    assert cells(text, "computed") == ["500", "50.0", "%", "-", "-"]
    assert cells(text, "speed of loads") == ["50.0", "GB/s"]
    assert cells(text, "host blocks cached") == ["50", "of", "200", "25.0", "%"]
    assert "open: left alone" in text


def test_an_engine_of_sglang_is_read_as_well() -> None:
    text = TEXT.replace("vllm:", "sglang:").replace('engine="0"', 'engine_type="unified",tp_rank="0"')
    assert read_values(text, "x") == read_values(TEXT, "x")


def test_rates_are_those_since_the_last_look() -> None:
    now = {name: 2 * value for name, value in read_values(TEXT, "x").items()}
    table = top.rows(Sample(12.0, now), Sample(10.0, read_values(TEXT, "x")))
    found = {row[0].strip(): row[1:] for row in table}
    assert found["prompt tokens"][2] == "500.0"
    assert found["from the host"][2:] == ["125.0", "25.0 %"]
    assert found["computed"][2:] == ["250.0", "50.0 %"]
    again = top.rows(Sample(14.0, read_values(TEXT, "x")), Sample(12.0, now))
    assert {row[0].strip(): row for row in again}["prompt tokens"][3] == "0.0", "the engine was started anew"


@pytest.mark.parametrize("has_rich", [True, False])
def test_it_goes_on_until_the_user_has_seen_enough(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn in place by rich, and printed where that is missing."""
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.live", None)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    with saying(TEXT) as url:
        assert main(["top", url, "--interval", "0.5"]) == 0
    assert looks == [0.5] * 3
    assert capsys.readouterr().out.count("prompt tokens") >= (1 if has_rich else 3)


def test_what_is_no_engine_of_ours_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with saying("vllm:prompt_tokens_total 3\n") as url:
        assert main(["top", url, "--once"]) == 2
        assert "is it an engine of vLLM with --kv-transfer-config" in capsys.readouterr().err
        assert main(["top", f"{url}/other", "--once"]) == 2
        assert "404" in capsys.readouterr().err
    assert main(["top", url, "--once"]) == 2
    assert capsys.readouterr().err == f"error: '{url}/metrics' does not answer: Connection refused\n"
    assert main(["top", url, "--interval", "nan"]) == 2
    assert "give seconds, at least 0.1" in capsys.readouterr().err


def test_addresses() -> None:
    assert metrics_url("localhost:8000") == metrics_url("http://localhost:8000/") == "http://localhost:8000/metrics"
    assert metrics_url("https://host/gpu/metrics") == "https://host/gpu/metrics"
    for url in ("file:///etc/passwd", "http://", "http://[::1", "localhost:abc", "localhost:99999", "http://:8000"):
        with pytest.raises(ConfigError, match="is no URL of a server"):
            metrics_url(url)
