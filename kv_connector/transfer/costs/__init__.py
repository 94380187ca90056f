"""How long copies take on this machine, and what is chosen by that."""
