"""Model folders: configuration, weights, adapters, memory footprint, fingerprint, golden question. Must not import mlx."""
