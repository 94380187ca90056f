"""Where the weights of the demo's models come from."""
