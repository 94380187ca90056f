"""Benchmarks; each takes `--json FILE`."""
