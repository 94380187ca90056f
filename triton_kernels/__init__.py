"""Triton kernels, imported as `kv_connector.triton_kernels`. They move bytes and know no dtype and no model."""
