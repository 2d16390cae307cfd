"""The parameter server: scheduler, servers and workers over ZeroMQ."""
