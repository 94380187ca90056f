"""The storage tier (layer 1): blocks behind the host's memory, by name, that outlive the engine and may be shared."""
