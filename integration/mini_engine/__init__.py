"""A tiny paged LLM engine that drives the connector as a real engine does."""
