"""The quantization of a model, in a process of its own."""
