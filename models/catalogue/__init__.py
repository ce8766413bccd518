"""The shipped list of well-known MLX repositories. Data: repositories.json."""
