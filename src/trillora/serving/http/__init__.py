"""The HTTP server under the protocol: connections, their limits, and the log."""
