"""The engine: one child process that loads a model with mlx-lm and serves it over HTTP. The only importer of mlx."""
