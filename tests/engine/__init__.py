"""The engine: pure parts alone, mlx-lm as we use it, and whole processes."""
