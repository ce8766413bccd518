"""Clients that mean harm: raw sockets against a gateway's process, and an engine behind it that records all it hears."""
