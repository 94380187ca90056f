"""Storage in Mooncake Store, the memory of many machines that all engines share."""
