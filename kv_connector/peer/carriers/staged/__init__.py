"""Blocks that travel through pinned host memory, where devices cannot reach each other."""
