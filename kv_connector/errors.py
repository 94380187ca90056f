"""The exceptions of this package (layer 0).

KVConnectorError
+-- ConfigError          a setting is unknown, of the wrong type or impossible; raised at start-up (a ValueError)
+-- LayoutError          a cache tensor cannot be described as regions; raised at registration (a ValueError)
+-- InvalidBlockError    a block id is out of range, repeated or not in the state that the call needs (a ValueError)
+-- TransferError        a copy could not be submitted or did not complete; it fails its job, never the engine
"""

from __future__ import annotations


class KVConnectorError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(KVConnectorError, ValueError):
    """A setting is unknown, of the wrong type or impossible; the text names the value, the limit and the fix."""


class LayoutError(KVConnectorError, ValueError):
    """A cache tensor cannot be described as regions of equal blocks."""


class InvalidBlockError(KVConnectorError, ValueError):
    """A block id is out of range, repeated, or in a state that forbids the call."""


class TransferError(KVConnectorError):
    """A copy could not be submitted or did not complete."""
