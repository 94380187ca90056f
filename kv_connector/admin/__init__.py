"""The endpoint through which an operator sees and steers a running engine, and who speaks to it (layer 3)."""
