"""What requests and operators say of the cache: hints, pins, times to live, tenants."""
