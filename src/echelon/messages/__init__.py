"""Authenticated, encrypted messages between a run's processes: ZeroMQ sockets, CURVE keys, framing. No pickle."""
