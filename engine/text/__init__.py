"""Conversion between tokens and the text that clients see: stop words, reasoning, tool calls. No mlx."""
