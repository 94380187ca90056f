"""A model of TensorRT-LLM's executor around its KV cache connector slot, for machines that cannot have the engine.

It follows the order of calls of the PyTorch executor of TensorRT-LLM 1.2 to 1.4, in our own words: `blocks` is its
first cache manager, `connector_manager` what stands between executor and connector, `executor` the loop of one rank,
with and without overlap, `engine` all ranks, one thread each, `collectives` what they tell each other. What is computed
is real: the mini engine's Llama, on a cache of the engine's layout. `smoke` is for the engine itself.
"""
