"""Copies between device and host (layer 1): the only owner of CUDA streams and events."""
