"""How a hit comes to the device, and the blocks of a load until its job is planned."""
