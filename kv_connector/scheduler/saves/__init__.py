"""Which blocks are saved in a step, and how much of the link saves may take."""
