"""Ollama's API: `docs/reference/ollama.md` says what of it is honoured."""
