"""Imports that the fork server of engine_forks.py makes once: everything an engine needs, and mlx."""

import importlib

for name in ("engine.process", "engine.model_rank"):
    importlib.import_module(name)
