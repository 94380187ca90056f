"""Storage in Amazon S3, and in servers that speak its protocol."""
