"""Llama with weights of which an answer depends on the whole prompt."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.llama import LlamaForCausalLM


class LargeLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama whose dummy weights are taken times a power of two.

    They are so small, in the norms as well, that what attention adds to a token's embedding is lost in rounding: an
    answer would be that of the last token alone, and a load that brought nothing would not be seen.
    """

    def post_load_weights(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(256)


EntryClass = LargeLlamaForCausalLM
