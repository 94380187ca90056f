"""The example for Kubernetes is one that a cluster would take, and its parts fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kv_connector import Config
from kv_connector.values import parse_size

EXAMPLE = Path(__file__).parents[1] / "integration" / "deploy" / "kubernetes.yaml"
OBJECTS: dict[str, dict[str, Any]] = {one["kind"]: one for one in yaml.safe_load_all(EXAMPLE.read_text())}
POD = OBJECTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
OF_AN_OPERATOR = {"PodMonitor"}
"""Resources of the Prometheus operator: Kubernetes' own schemas do not have them."""


@pytest.mark.parametrize("kind", sorted(OBJECTS.keys() - OF_AN_OPERATOR))
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_it(kind: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    """Of the validator: strict, it knows no other fields than those of the schema."""
    broken = json.loads(json.dumps(OBJECTS["Deployment"]))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = CONTAINER["readinessProbe"]
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_service_and_monitor_find_the_pods_and_their_port() -> None:
    labels, ports = POD["metadata"]["labels"], {port["name"] for port in CONTAINER["ports"]}
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert OBJECTS["Service"]["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in OBJECTS["Service"]["spec"]["ports"]} <= ports
    monitor = OBJECTS["PodMonitor"]
    assert (monitor["apiVersion"], set(monitor["spec"])) == (
        "monitoring.coreos.com/v1",
        {"selector", "podMetricsEndpoints"},
    )
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports and endpoint["path"] == "/metrics"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"]["port"] in ports


def test_the_container_has_what_the_settings_take(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = CONTAINER["args"]
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    variable = transfer["kv_connector_extra_config"]["storage"]["secret_env"]
    assert variable in {entry["name"] for entry in CONTAINER["env"]}
    monkeypatch.setenv(variable, "0123456789abcdef")
    config = Config.from_mapping(transfer["kv_connector_extra_config"])
    assert config.storage is not None

    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in CONTAINER["volumeMounts"]}
    assert any(config.storage.path.startswith(f"{path}/") for path in mounts), "the folder would go with the container"
    shared = mounts["/dev/shm"]["emptyDir"]
    assert shared["medium"] == "Memory"
    limit = parse_size(f"{CONTAINER['resources']['limits']['memory']}B")
    assert limit >= config.host_memory + parse_size(f"{shared['sizeLimit']}B") + parse_size("16GiB")
    assert CONTAINER["resources"]["requests"] == CONTAINER["resources"]["limits"]
    assert CONTAINER["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
