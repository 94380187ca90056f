"""The connector for vLLM's V1 slot, versions 0.20 to 0.32; this folder is the only part of the package that needs vLLM.

vLLM finds `TieredKVConnector` through `kv_connector_module_path` set to this module, or by its short name alone, which
`register` gives it as a plugin of vLLM.
"""

from .connector import TieredKVConnector

__all__ = ["TieredKVConnector"]
