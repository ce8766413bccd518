"""Configuration of other tools, made manifests: what has a counterpart becomes a field, everything else a comment."""
