"""Tables of the documents that are written from the code: settings from `Config`, metrics from `DOCUMENTATION`, alerts
from the rules that Prometheus is given.

`python -m integration.figures --write` puts them where a document has their name between its markers.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import yaml

from integration.figures.markdown import head, line
from integration.figures.results import ROOT
from kv_connector.config import AdminConfig, Config, PeerConfig, S3Config, StorageConfig, TenantConfig
from kv_connector.errors import ConfigError
from kv_connector.histograms import HISTOGRAMS
from kv_connector.metrics import DOCUMENTATION, GAUGES, TENANT_DOCUMENTATION, TENANT_GAUGES
from kv_connector.values import parse_size

_LEAST: dict[type, Mapping[str, Any]] = {
    Config: {"host_memory": "1GiB"},
    StorageConfig: {"kind": "mooncake", "master": "10.0.0.1:50051"},
    S3Config: {"bucket": "my-kv"},
    PeerConfig: {"secret": "0123456789abcdef"},
    AdminConfig: {"bind": "127.0.0.1:7200"},
}
"""What an object of each kind has to be given."""
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
_BEGINS = re.compile(r"([a-z_0-9]+): (.*)")


def described(kind: type) -> dict[str, str]:
    """What the docstring of a class says of each of its fields or values: a line `name: text`, and indented ones."""
    found: dict[str, str] = {}
    for text in inspect.getdoc(kind).splitlines()[1:]:  # type: ignore[union-attr]
        if begun := _BEGINS.fullmatch(text):
            found[begun[1]] = begun[2]
        elif found and text.startswith("    "):
            found[list(found)[-1]] += f" {text.strip()}"
    return found


def settings_of(kind: type, prefix: str = "") -> list[str]:
    """A table of the settings of a dataclass, with what each value of a choice means. Raises KeyError for a field or
    value that its docstring does not describe."""
    texts = described(kind)
    lines = head("| key | default | meaning |")
    for field in dataclasses.fields(kind):
        default, sentence = _default(kind, field), texts[field.name]
        choices = type(field.default) if isinstance(field.default, Enum) else None
        if choices is not None:
            meanings = described(choices)
            sentence += "".join(f"<br>`{json.dumps(one.value)}`: {meanings[one.value]}" for one in choices)
        lines.append(line(f"`{prefix}{field.name}`", default, _linked(sentence)))
    return lines


def metrics_of(documentation: Mapping[str, str], gauges: frozenset[str], prefix: str = "") -> list[str]:
    """A table of counters and gauges, by what they are about."""
    lines = head("| series | kind | what it counts |")
    for name, text in documentation.items():
        kind, suffix = ("gauge", "") if name in gauges else ("counter", "_total")
        lines.append(line(f"`vllm:kv_tiered_{prefix}{name}{suffix}`", kind, text))
    return lines


def histograms() -> list[str]:
    """A table of all histograms."""
    lines = head("| histogram | `tier` | what it is |")
    for name, kind in HISTOGRAMS.items():
        tiers = ", ".join(f"`{tier}`" for tier in kind.tiers)
        lines.append(line(f"`vllm:kv_tiered_{name}`", tiers, kind.documentation))
    return lines


def alerts() -> list[str]:
    """A table of all alerts. Raises KeyError for one that does not say what it means and what to do."""
    lines = head("| alert | fires where | means | do |")
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        told = rule["annotations"]
        lasting = f", for {rule['for']}" if "for" in rule else ""
        summary = re.sub(r"( on)? {{ \$labels.instance }}", lambda at: "" if at[1] else " an engine", told["summary"])
        lines.append(line(f"`{rule['alert']}`", f"`{rule['expr']}`{lasting}", f"{summary}.", f"{told['action']}."))
    return lines


SETTINGS: dict[str, tuple[type, str]] = {
    "settings": (Config, ""),
    "settings_storage": (StorageConfig, "storage."),
    "settings_s3": (S3Config, "storage.s3."),
    "settings_peer": (PeerConfig, "peer."),
    "settings_tenants": (TenantConfig, "tenants.NAME."),
    "settings_admin": (AdminConfig, "admin."),
}
"""By the name in a document: the dataclass, and what its keys begin with."""

TABLES: dict[str, Callable[[], list[str]]] = {
    "metrics": partial(metrics_of, DOCUMENTATION, GAUGES),
    "tenant_metrics": partial(metrics_of, TENANT_DOCUMENTATION, TENANT_GAUGES, "tenant_"),
    "histograms": histograms,
    "alerts": alerts,
    **{name: partial(settings_of, *of) for name, of in SETTINGS.items()},
}
"""By the name in a document: what writes its lines."""


def _default(kind: type, field: dataclasses.Field[Any]) -> str:
    """As a user would write it."""
    value = field.default.value if isinstance(field.default, Enum) else field.default
    if value in (dataclasses.MISSING, None, ""):
        return "none"
    return f"`{json.dumps(_size(value) if value and _takes_sizes(kind, field.name) else value)}`"


def _takes_sizes(kind: type, name: str) -> bool:
    """Whether the setting accepts text such as `"1GiB"`, found out by giving it."""
    try:
        given = kind(**{**_LEAST.get(kind, {}), name: "1GiB"})
    except ConfigError:
        return False
    return bool(getattr(given, name) == parse_size("1GiB"))


def _size(num_bytes: int) -> str:
    """In the largest unit of which it is a multiple."""
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "B") if num_bytes % parse_size(f"1{unit}") == 0)
    return f"{num_bytes // parse_size(f'1{unit}')}{unit}"


def _linked(text: str) -> str:
    """As a sentence, with its documents as links beside the document that it is in."""
    text = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)
    return text if text.startswith("`") else text[0].upper() + text[1:]
