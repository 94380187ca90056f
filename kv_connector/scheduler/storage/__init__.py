"""What the scheduler half knows of storage: prefetches, backups, and their jobs."""
