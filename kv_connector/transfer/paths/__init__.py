"""Ways from the device's blocks to those of the host, or of another engine."""
