"""For those who write a backend or a carrier: ready-made opposites to test it against."""
