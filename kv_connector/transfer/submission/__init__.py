"""From a job to the driver and back: checked, queued, submitted in parts, reported once."""
