"""The memory on both sides: cache tensors as regions of bytes, and the host pool."""
