"""Adapters of engines: each translates between its engine's types and the halves, and decides nothing (layer 4)."""
