"""Hostile clients: raw sockets against a gateway process, with an engine that records every byte."""
