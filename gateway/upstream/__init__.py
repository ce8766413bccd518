"""Connections to engines: a pool, and one exchange at a time on each connection. Knows no models."""
