"""Forwarding of requests to engines: admission, retries, health and resumption. Writes nothing to clients."""
