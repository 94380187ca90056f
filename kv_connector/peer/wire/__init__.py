"""The side channel: sockets, frames, and the handshake that authenticates both ends."""
