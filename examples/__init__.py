"""Manifests and models to try mlx-fleet with."""
