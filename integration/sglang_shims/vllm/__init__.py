"""Stands for vLLM where SGLang runs on the CPU: see `_custom_ops`."""
