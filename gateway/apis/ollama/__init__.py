"""Ollama's API; `docs/reference/ollama.md` lists the supported fields."""
