"""Continuous batching: prefill, decode and sampling in one thread, identical on all ranks of a group."""
