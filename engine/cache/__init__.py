"""KV caches: one layer's caches, and the prefix cache of earlier prompts, in blocks and within a byte limit."""
