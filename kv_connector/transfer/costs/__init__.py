"""What copies take on this machine, and what follows from it."""
