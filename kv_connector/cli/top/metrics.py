"""An engine's /metrics: our names in it, summed over engines and labels."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...errors import ConfigError
from ...metrics import DOCUMENTATION
from ...values import shortened, shown

_SAMPLE = re.compile(r"^(?:vllm|sglang):kv_tiered_(\w+?)(?:_total)?(?:\{.*\})? (\S+)(?: \d+)?$", re.MULTILINE)
_MOST_BYTES = 64 << 20
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Values by our names without prefix, at a second of some clock."""

    seconds: float
    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        """0 for what this engine's version does not tell."""
        assert name in DOCUMENTATION, name
        return self.values.get(name, 0.0)


def metrics_url(url: str) -> str:
    """With the path that engines serve metrics at, where none is given. Raises ConfigError for what is no URL."""
    if "://" not in url:
        url = f"http://{url}"
    no_url = ConfigError(f"{shown(url)} is no URL of a server: give one such as http://localhost:8000")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise no_url from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise no_url
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics"


def fetch(url: str, seconds: float) -> Sample:
    """Read them now. Raises ConfigError where nobody answers, or there are none of ours."""
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as response:
            text = response.read(_MOST_BYTES).decode(errors="replace")
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ConfigError(f"{shown(url)} does not answer: {shortened(_reason(error))}") from error
    return Sample(seconds, read_values(text, url))


def _reason(error: Exception) -> str:
    """The system's words without urllib's around them; of an answer that is none, such as 404, urllib's."""
    reason = error.reason if type(error) is urllib.error.URLError else error
    return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)


def read_values(text: str, url: str) -> dict[str, float]:
    """Of text in Prometheus's format. Buckets and the times of making are no values of ours."""
    values: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        name, value = match[1], match[2]
        if name in DOCUMENTATION:
            values[name] = values.get(name, 0.0) + _number(value, name)
    if not values:
        raise ConfigError(
            f"{shown(url)} has no kv_tiered_*: is it an engine of vLLM with --kv-transfer-config, without "
            "--disable-log-stats, or one of SGLang with our linker and --enable-metrics?"
        )
    return values


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {shown(text)}, which is no number") from error
