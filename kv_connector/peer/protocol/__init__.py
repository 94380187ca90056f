"""The protocol between two worker halves: jobs, what a producer offers, and what a consumer receives."""
