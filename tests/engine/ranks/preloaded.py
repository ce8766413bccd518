"""Imported by the process that forks ranks (forks.py): all that an engine needs, and mlx."""

import importlib

for name in ("engine.process", "engine.model_rank"):
    importlib.import_module(name)
