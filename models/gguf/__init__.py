"""GGUF files of llama.cpp as input: read within limits, and written as an MLX model, in a process of its own."""
