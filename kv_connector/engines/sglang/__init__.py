"""The linker for SGLang's UnifiedCacheLinker slot, and storage for its HiCacheStorage slot, versions 0.5.23 and newer;
only this folder needs SGLang.

SGLang finds `TieredKVLinker` through `linker_module_path`, and `TieredKVStorage` through `module_path`, set to this
module: see docs/sglang.md.
"""

from .hicache import TieredKVStorage
from .linker import TieredKVLinker

__all__ = ["TieredKVLinker", "TieredKVStorage"]
