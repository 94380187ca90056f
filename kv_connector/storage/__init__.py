"""The storage tier (layer 1): blocks behind the host's memory, by name, that outlive the engine and may be shared."""

from .base import KEY_BYTES, Storage, StorageCounters, ThreadedStorage
from .external import STORAGE_VERSION, StorageContext

__all__ = ["KEY_BYTES", "STORAGE_VERSION", "Storage", "StorageContext", "StorageCounters", "ThreadedStorage"]
