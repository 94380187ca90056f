"""What the scheduler half knows of other engines: what it offers and what it asks for."""
