"""Images in requests: their limits and sizes, and the models that see them. The only folder that imports mlx-vlm."""
