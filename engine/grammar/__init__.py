"""Outputs that must match a schema: llguidance behind one port."""
