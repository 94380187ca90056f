"""Blocks handed from one engine to another: side channel, backends, and the protocol between two worker halves."""
