"""CUDA as far as copies need it: the driver's calls, memory that is ours alone, streams and events."""
