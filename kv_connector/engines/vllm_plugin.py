"""The `vllm.general_plugins` entry point: gives the connector its short name in every process of vLLM.

MultiConnector needs the name to rebuild our statistics in the front end.
"""

from __future__ import annotations

NAME = "TieredKVConnector"


def register() -> None:
    """Called by vLLM as it starts, possibly more than once in a process; imports nothing of the connector yet."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kv_connector.engines.vllm", NAME)
