"""From tokens to what a client sees: text, stop words, reasoning, tool calls. Runs on the event loop; no mlx."""
