"""Contract tests and fakes for authors of a storage backend, a carrier or an engine's adapter."""
