"""Archives that install mlx-fleet on a machine, with or without a network."""
