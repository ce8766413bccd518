"""The HTTP API of the dashboard process."""
