"""The connector for TensorRT-LLM's KV cache connector slot. It has not run in the engine yet: see docs/tensorrt_llm.md.

TensorRT-LLM finds both classes through `connector_module` set to this module. They have the methods that its base
classes name and do not derive from them: nothing here needs TensorRT-LLM before a worker is made.
"""

from .scheduler import TieredKVScheduler
from .worker import TieredKVWorker

__all__ = ["TieredKVScheduler", "TieredKVWorker"]
