"""What a model's config says about its size: layers, caches, widths. Pure; must not import mlx."""
