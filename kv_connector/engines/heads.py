"""Which models are known to have the same KV heads on several ranks."""

HEADS_ALIKE = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM"),
        *("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    }
)
"""Architectures whose layers all have `num_key_value_heads`, of which vLLM gives ranks next to each other the same."""
