"""YAML to typed objects to a set of changes: load, defaults, validate, diff, apply."""
