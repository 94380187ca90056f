"""Storage in a folder of immutable, checksummed packs that several engines share."""
