"""The endpoint through which an operator sees and steers a running engine, and its client (layer 3)."""
