"""SGLang imports vLLM's rotary embedding on devices that it has no kernel of its own for, and calls it for none of the
models that tests run on the CPU."""

from __future__ import annotations


def rotary_embedding(*args: object) -> None:
    """Never called."""
    raise NotImplementedError("this stands for vLLM's kernel: install vLLM to call it")
