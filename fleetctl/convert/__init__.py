"""Host files of MLX to shard groups and back, and configuration for Prometheus."""
