"""Nodes: liveness, flapping, quiet hours, holds, and their views for placement."""
